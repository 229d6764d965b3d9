/* engine_port: the network loop's side of the engine. Events come on the engine's thread; here they are copied, carried to the loop and given
 * to whoever is bound to their sequence. An event for a sequence that nobody is bound to any more is dropped, so a stream or a call may
 * go away at any time, whatever the engine is about to say.
 *
 * Commands that end a sequence must not get lost because the engine's queue is full: they are repeated until it takes them.
 * Copies of events are bounded (ENGINE_PORT_SIZE_MAX); beyond that, or without memory, every bound sequence fails: none may go on with a gap. */
#ifndef TANDEM_CLOUD_ENGINE_PORT_H
#define TANDEM_CLOUD_ENGINE_PORT_H
#include "cloud/engine.h"
#include "protocol/inbox.h"

#define ENGINE_PORT_SIZE_MAX (256u << 20)

struct engine_port;
struct engine_listener { /* embedded in a stream or call */
    uint64_t sequence;   /* set by engine_port_open */
    bool bound;
    struct engine_listener *next;
    /* Loop's thread. The event is borrowed. It may unbind itself, or others. */
    void (*on_event)(struct engine_listener *l, const struct engine_event *event);
};

/* inbox: of the loop. NULL without memory. */
struct engine_port *engine_port_create(struct engine *engine, struct inbox *inbox);
/* The engine is gone: commands go to nobody, events have ended. */
void engine_port_stop(struct engine_port *p);
/* After engine_port_stop and before the inbox is destroyed. */
void engine_port_destroy(struct engine_port *p);

/* All on the loop's thread. engine_port_open fills in the sink. On failure nothing is bound, and open->ids are freed. */
int engine_port_open(struct engine_port *p, struct engine_open *open, struct engine_listener *l);
void engine_port_unbind(struct engine_port *p, struct engine_listener *l);
/* engine_cancel, sooner or later; finished keeps the listener bound for ENGINE_DONE, else it is unbound. */
void engine_port_cancel(struct engine_port *p, struct engine_listener *l, bool finished, uint32_t keep_count);
void engine_port_detach(struct engine_port *p, struct engine_listener *l); /* unbinds */
void engine_port_tick(struct engine_port *p);             /* repeat what the engine had no room for */
struct engine *engine_port_engine(struct engine_port *p); /* NULL: it is gone */

#endif
