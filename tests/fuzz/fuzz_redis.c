/* fuzz_redis: hostile bytes from the shared server. The first byte says as what: 0 a directory entry, its checksum made right; 1 a block's value; 2 the
 * stream of a connection, read as the tier reads it. No block may come out of a value, since nobody but the store can seal one. */
#include "shared/log.h"
#include "store/known.h"
#include "store/record.h"
#include "store/redis_link.h"
#include "store/tier.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define INPUT_SIZE_MAX (64u << 10)
#define REPLY_SIZE_MAX (16u << 10)
#define REPLIES        4

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct store *store;
static struct redis_server server = {.host = "127.0.0.1"};
static int listener;

static void need(bool good)
{
    if (!good)
        abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static char directory[] = "/dev/shm/tandem-fuzz-redis-XXXXXX";
    struct store_config config = {.ballast_size = 4096, .limit_size = 1u << 20};
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    uint8_t key[CRYPTO_KEY_SIZE];
    (void)argc, (void)argv;
    log_set_level(LOG_ERROR);
    config.directory = mkdtemp(directory);
    need(config.directory && store_open(&config, &store, NULL) == 0);
    need(store_chain_key(store, "acme", key, NULL) == 0);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    need(bind(listener, (struct sockaddr *)&a, sizeof a) == 0 && listen(listener, 4) == 0);
    need(getsockname(listener, (struct sockaddr *)&a, &size) == 0);
    server.port = ntohs(a.sin_port);
    return 0;
}

static void try_entry(const uint8_t *data, size_t size)
{
    uint8_t entry[KNOWN_ENTRY_SIZE], again[KNOWN_ENTRY_SIZE];
    struct store_block_info info;
    uint64_t epoch;
    known_entry_parse(data, size, &info, &epoch);
    if (size != sizeof entry)
        return;
    memcpy(entry, data, size);
    store_le32(entry + 36, crc32c(0, entry, 36));
    if (known_entry_parse(entry, size, &info, &epoch) != 0)
        return;
    known_entry_write(&info, epoch, again);
    need(memcmp(again, entry, sizeof entry) == 0);
}

static void try_value(const uint8_t *data, size_t size)
{
    struct kv_block_id id = {{1, 2, 3}};
    struct tier_block *block = NULL;
    uint8_t name[32], *record = malloc(size + 1);
    memcpy(record, data, size);
    if (size >= RECORD_PAGE) /* so that the fields are reached */
        store_le32(record + RECORD_PAGE - 4, crc32c(0, record, RECORD_PAGE - 4));
    need(store_sealed_name(store, "acme", &id, name) == 0);
    store_sealed_mask(store, "acme", name, record, size);
    need(store_open_sealed(store, "acme", &id, record, size, &block) < 0 && !block);
    free(record);
}

static void try_stream(const uint8_t *data, size_t size)
{
    struct redis_link link;
    const struct span ping = redis_word("PING");
    redis_link_init(&link, &server);
    need(redis_link_begin(&link, 5000000, REPLY_SIZE_MAX) == 0);
    int peer = accept(listener, NULL, NULL);
    need(peer >= 0);
    for (int i = 0; i < REPLIES; i++)
        redis_link_send(&link, 1, &ping);
    need(send(peer, data, size, MSG_NOSIGNAL) == (ssize_t)size || size == 0);
    shutdown(peer, SHUT_WR);
    for (int i = 0; i < REPLIES; i++) {
        redisReply *reply;
        int rc = redis_link_reply(&link, &reply);
        if (rc == 0)
            freeReplyObject(reply);
        if (rc == -TD_ERR_IO)
            break;
    }
    redis_link_close(&link);
    close(peer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > INPUT_SIZE_MAX)
        return 0;
    switch (data[0] % 3) {
    case 0:
        try_entry(data + 1, size - 1);
        break;
    case 1:
        try_value(data + 1, size - 1);
        break;
    default:
        try_stream(data + 1, size - 1);
        break;
    }
    return 0;
}
