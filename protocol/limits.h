/* limits: every bound of the wire and of the HTTP APIs, in one place, with units. Each is tested at its edge. */
#ifndef TANDEM_PROTOCOL_LIMITS_H
#define TANDEM_PROTOCOL_LIMITS_H

/* frames */
#define LIMIT_HEADER_SIZE_BEFORE_WELCOME 4096u
#define LIMIT_HEADER_SIZE                16384u
#define LIMIT_FRAME_SIZE                 (1u << 20) /* head + header + payload of one frame */
#define LIMIT_PIECE_SIZE                 (4u << 20) /* a HIDDEN or KV_BLOCK message put together from its frames */
#define LIMIT_BULK_FRAME_MIN             2048u /* a bulk frame is about 20 ms of measured link, between these */
#define LIMIT_BULK_FRAME_MAX             (256u << 10)
#define LIMIT_BULK_FRAME_US              20000u

/* connections and streams */
#define LIMIT_HELLO_TIMEOUT_MS          5000u
#define LIMIT_UNAUTHENTICATED_PER_PEER  16u
#define LIMIT_GREETING_MS               500u        /* before it makes room for others from its address */
#define LIMIT_CONNECTIONS_PER_PRINCIPAL 512u        /* each may hold a frame that is not whole yet */
#define LIMIT_STREAMS                   64u         /* open streams a connection */
#define LIMIT_CONNECTION_WINDOW         (16u << 20) /* unread bulk bytes a connection */
/* What a fast link brings during a step, and rows that wait to run. */
#define LIMIT_STREAM_WINDOW        (4u << 20) /* unread bulk bytes a stream */
#define LIMIT_CONTROL_FRAMES_PER_S 1000u      /* non-bulk frames that a peer may send */
#define LIMIT_UPLOAD_IDLE_MS       30000u     /* an upload without progress is freed */
/* bulk bytes queued in one link before link_send_bulk answers FULL */
#define LIMIT_SEND_QUEUE_SIZE (64u << 20)
/* unsent control frames, and as many of tokens, before link_send answers FULL */
#define LIMIT_CONTROL_QUEUE_SIZE (8u << 20)
#define LIMIT_CREDIT_SIZE        (1u << 30) /* a window that a peer may open */
/* unacknowledged bytes <= rate x (min RTT + this), at least two bulk frames */
#define LIMIT_UNACKED_MARGIN_US 40000u
#define LIMIT_PING_INTERVAL_MS  10000u
#define LIMIT_PEER_SILENCE_MS   30000u /* nothing heard, pings included: the link is dead */

/* messages */
#define LIMIT_VERSIONS                  8u
#define LIMIT_RANGES                    64u
#define LIMIT_FETCH_BLOCKS              16u   /* of one FETCH */
#define LIMIT_TOKEN_SIZE                128u  /* characters of a bearer credential */
#define LIMIT_NAME_SIZE                 64u   /* tenant, principal, conversation id, node */
#define LIMIT_IDEMPOTENCY_SIZE          128u  /* characters of an Idempotency-Key */
#define LIMIT_TEXT_SIZE                 1024u /* bytes of the text in an ERROR or GOAWAY */
#define LIMIT_PROMPT_TOKENS             (240u << 10) /* prompt and held reply tokens of an OPEN: they fit one frame */
#define LIMIT_STAGED_SIZE_PER_PRINCIPAL (256u << 20)
#define LIMIT_STAGED_SIZE               (2048ull << 20)

/* generations */
#define LIMIT_DETACHED_TOKENS      64u     /* decoded after the socket was lost, then parked */
#define LIMIT_PARK_MS              300000u /* a parked or finished generation can be re-attached for so long */
#define LIMIT_PARKED_PER_PRINCIPAL 256u    /* generations kept for re-attachment */

/* HTTP */
#define LIMIT_HTTP_BODY_SIZE     (8u << 20)
#define LIMIT_HTTP_BUFFERED_SIZE (256u << 20) /* request bodies in memory, a listener */
#define LIMIT_HTTP_HEADER_SIZE   8192u
#define LIMIT_HTTP_IDLE_MS       30000u
#define LIMIT_HTTP_EXCHANGES     1024u /* open requests a listener */
/* unsent bytes of one SSE stream; beyond it the client counts as gone */
#define LIMIT_HTTP_STREAM_QUEUE (4u << 20)
#define LIMIT_HTTP_KEEPALIVE_MS 10000u /* an SSE comment on a stream that is silent for so long */
#define LIMIT_API_MESSAGES      4096u
#define LIMIT_API_STOPS         16u
#define LIMIT_API_STOP_SIZE     256u
#define LIMIT_API_CHOICES       1u     /* n > 1 is refused clearly */
#define LIMIT_JSON_DEPTH        64u    /* a request body's nesting */
#define LIMIT_JSON_CONTAINERS   65536u /* its objects and lists: each costs the parser some 250 bytes */
#define LIMIT_JSON_VALUES       (LIMIT_PROMPT_TOKENS + 65536u) /* its values: 40 bytes each */

#endif
