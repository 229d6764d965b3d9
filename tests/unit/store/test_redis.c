/* tier_redis: two nodes share blocks through a real server; a server that is stopped, hung, emptied, wants a password, or answers nonsense
 * costs hits and nothing else, and the tier comes back by itself. */
#include "redis_fixture.h"
#include "shared/log.h"
#include "store/known.h"
#include "store/redis_link.h"
#include "store/tiers.h"
#include "store_fixture.h"

#define WAIT_US 20000000 /* the most that anything is waited for */

static struct tiers_want want = {KV_ACCEPT_EXACT, KV_NUMERICS_CPU_V1, 0, FIXTURE_LAYERS};

struct node {
    char *directory;
    struct store *store;
    struct tiers *tiers;
};

static const struct store_demotion *demotion; /* of nodes that are opened next */
static struct io *node_io;
static uint32_t node_command_ms = WAIT_US / 1000; /* for a server that answers when it can */

/* keys_of: the node that it shares the tenants' keys with. */
static void node_open(struct node *n, uint16_t port, const char *password, const struct node *keys_of)
{
    n->directory = fixture_directory();
    struct store_config c = fixture_config(n->directory);
    c.keys_directory = keys_of ? keys_of->directory : n->directory;
    c.demotion = demotion;
    if (node_io)
        assert_int_equal(store_open_with(&c, &(struct store_env){.io = node_io}, &n->store, NULL), 0);
    else
        n->store = fixture_open(&c);
    struct tier_redis_config remote = {.host = "127.0.0.1",
                                       .port = port,
                                       .password = password,
                                       .node_epoch = 7,
                                       .command_ms = node_command_ms,
                                       .knock_ms = 20};
    struct tiers_config config = {.store = n->store, .ram_size = 1 << 20, .threads = 2, .remote = &remote};
    assert_int_equal(tiers_create(&config, &n->tiers, NULL), 0);
}

static void node_close(struct node *n)
{
    tiers_destroy(n->tiers);
    store_close(n->store);
    fixture_remove(n->directory);
}

static struct tier_stats stats_of(struct node *n)
{
    struct tier_stats s;
    tiers_stats(n->tiers, TIER_REMOTE, &s);
    return s;
}

#define until(condition)                                                                                     \
    do {                                                                                                     \
        for (uint64_t end_ = clock_mono_us() + WAIT_US; !(condition);) {                                     \
            if (clock_mono_us() > end_)                                                                      \
                fail_msg("never came: %s", #condition);                                                      \
            fixture_pause(2000);                                                                             \
        }                                                                                                    \
    } while (0)

static void put(struct node *n, const char *tenant, const struct fixture_block *f)
{
    struct tier_block *b = tier_block_create(FIXTURE_LAYERS, 2 * FIXTURE_LAYERS * FIXTURE_PIECE);
    b->block = f->block;
    b->block.pieces = b->pieces;
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++) {
        memcpy(b->data + i * FIXTURE_PIECE, f->pieces[i].data, f->pieces[i].size);
        b->pieces[i] = (struct span){b->data + i * FIXTURE_PIECE, f->pieces[i].size};
    }
    assert_int_equal(tiers_put(n->tiers, tenant, b, NULL, NULL), 0);
    tier_block_release(b);
    store_flush(n->store);
}

/* Look up afar, wait for the answer, and find. */
static int look_up(struct node *n, const char *tenant, const struct fixture_block *f,
                   struct tiers_found *found)
{
    int rc;
    tiers_look_up(n->tiers, tenant, &f->id, 1);
    for (uint64_t end = clock_mono_us() + WAIT_US;
         (rc = tiers_find(n->tiers, tenant, &f->id, &want, found)) == -TD_ERR_AGAIN;) {
        assert_true(clock_mono_us() < end);
        fixture_pause(500);
    }
    return rc;
}

/* An answer that takes longer than KNOWN_ASKED_US is a miss, and one of the next questions finds it. */
#define until_found(node, tenant, block, found) until(look_up(node, tenant, block, found) == 0)

static int get(struct node *n, const char *tenant, const struct fixture_block *f, enum tier_kind *from)
{
    struct tier_block *b;
    int rc = tiers_get(n->tiers, tenant, &f->id, &want, &b, from);
    if (rc < 0)
        return rc;
    for (int i = 0; i < 2 * FIXTURE_LAYERS; i++) {
        assert_int_equal(b->block.pieces[i].size, f->pieces[i].size);
        assert_memory_equal(b->block.pieces[i].data, f->pieces[i].data, f->pieces[i].size);
    }
    tier_block_release(b);
    return 0;
}

static void blocks_travel_between_nodes(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct node a, b, stranger;
    struct fixture_block f[4], absent;
    struct tiers_found found;
    enum tier_kind from;
    uint8_t key[32];
    redis_start(&redis);
    node_open(&a, redis.port, NULL, NULL);
    store_chain_key(a.store, "acme", key, NULL);
    until(!stats_of(&a).sick);
    for (uint64_t i = 0; i < 4; i++) {
        fixture_block_make(&f[i], i + 1);
        put(&a, "acme", &f[i]);
    }
    until(stats_of(&a).puts == 4);

    node_open(&b, redis.port, NULL, &a);
    until(!stats_of(&b).sick);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(tiers_find(b.tiers, "acme", &f[i].id, &want, &found),
                         -TD_ERR_NOTFOUND); /* never asked */
        until_found(&b, "acme", &f[i], &found);
        assert_int_equal(found.tier, TIER_REMOTE);
        assert_int_equal(found.info.block_index, f[i].block.block_index);
        assert_int_equal(get(&b, "acme", &f[i], &from), 0);
        assert_int_equal(from, TIER_REMOTE);
        assert_int_equal(get(&b, "acme", &f[i], &from), 0); /* it is here now */
        assert_int_equal(from, TIER_RAM);
    }
    store_flush(b.store);
    assert_true(fixture_block_reads(b.store, "acme", &f[0])); /* and on this disk, too */
    fixture_block_make(&absent, 99);
    assert_int_equal(look_up(&b, "acme", &absent, &found), -TD_ERR_NOTFOUND);
    assert_int_equal(look_up(&b, "other", &f[0], &found), -TD_ERR_NOTFOUND);

    node_open(&stranger, redis.port, NULL, NULL); /* other keys under the same tenant's name */
    store_chain_key(stranger.store, "acme", key, NULL);
    until(!stats_of(&stranger).sick);
    assert_int_equal(look_up(&stranger, "acme", &f[0], &found), -TD_ERR_NOTFOUND);
    node_close(&stranger);
    assert_int_equal(stats_of(&b).blocks, 4);
    assert_int_equal(tiers_erase_tenant(b.tiers, "acme", NULL), 0);
    assert_int_equal(stats_of(&b).blocks, 0); /* of which tenant they were it does not know */
    node_close(&b);
    node_close(&a);
    redis_stop(&redis);
}

/* All bytes that the server holds: neither an id nor a piece of content is among them; the masked ids are. */
/* The server has one copy of a block, the best that it was given; what a node has stored at a lossy level since does not replace it, and is replaced by it. */
static void the_server_keeps_the_best_copy(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct node a, b;
    struct fixture_block f, small;
    struct tiers_found found;
    struct store_stats stats;
    struct store_block_info info;
    enum tier_kind from;
    uint64_t gone, freed;
    redis_start(&redis);
    demotion = fixture_demotion("acme");
    node_open(&a, redis.port, NULL, NULL);
    demotion = NULL;
    until(!stats_of(&a).sick);
    fixture_block_make(&f, 1);
    fixture_block_demoted(&f, "l1", &small);
    put(&a, "acme", &f);
    until(stats_of(&a).puts == 1);
    store_stats(a.store, &stats);
    assert_int_equal(store_set_tenant(a.store, "acme", stats.block_bytes, 0), 0);
    assert_int_equal(store_gc(a.store, NULL, NULL, &gone, &freed, NULL), 0);
    assert_true(fixture_block_reads(a.store, "acme", &small));
    tiers_destroy(a.tiers); /* with what is in memory */
    struct tier_redis_config remote = {.host = "127.0.0.1",
                                       .port = redis.port,
                                       .node_epoch = 7,
                                       .command_ms = node_command_ms,
                                       .knock_ms = 20};
    struct tiers_config config = {.store = a.store, .threads = 2, .remote = &remote};
    assert_int_equal(tiers_create(&config, &a.tiers, NULL), 0);
    until(!stats_of(&a).sick);
    put(&a, "acme", &small); /* as good as what the disk has: to the server, too */
    until(stats_of(&a).puts == 1);
    node_open(&b, redis.port, NULL, &a);
    until(!stats_of(&b).sick);
    until_found(&b, "acme", &f, &found);
    assert_int_equal(get(&b, "acme", &f, &from), 0);
    assert_int_equal(from, TIER_REMOTE);
    until_found(&a, "acme", &f, &found);
    assert_int_equal(get(&a, "acme", &f, &from), 0);
    assert_int_equal(from, TIER_REMOTE); /* the disk's is not exact … */
    store_flush(a.store);
    assert_int_equal(store_find(a.store, "acme", &f.id, &info), 0);
    assert_int_equal(info.quality.fidelity, KV_L0); /* … and is again */
    node_close(&b);
    node_close(&a);
    redis_stop(&redis);
}

static struct store *demoting;
static struct fixture_block demoted;
static atomic_bool demote_at_read;
static struct fixture_done demotion_done;

static int64_t demoting_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    if (!atomic_exchange(&demote_at_read, false))
        return io_posix.pread(&io_posix, fd, data, size, offset);
    uint8_t before[64];
    int64_t rc = io_posix.pread(&io_posix, fd, data, size, offset);
    assert_true(rc >= (int64_t)sizeof before);
    memcpy(before, data, sizeof before);
    fixture_put_demoted(demoting, "acme", &demoted, &demotion_done);
    store_flush(demoting); /* behind which the old record is made void some time */
    for (uint64_t end = clock_mono_us() + WAIT_US;
         memcmp(before, data, sizeof before) == 0 && clock_mono_us() < end;
         rc = io_posix.pread(&io_posix, fd, data, size, offset))
        fixture_pause(500);
    return rc;
}

/* Between the look and the read of who writes to the server: the smaller copy goes there, and is what the server says that it has. */
static void a_block_that_is_demoted_on_its_way_is_written_as_it_is_then(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct node a, b;
    struct fixture_block f;
    struct tiers_found found;
    enum tier_kind from;
    struct io io = io_posix;
    io.pread = demoting_pread;
    redis_start(&redis);
    node_io = &io;
    node_open(&a, redis.port, NULL, NULL);
    node_io = NULL;
    until(!stats_of(&a).sick);
    fixture_block_make(&f, 1);
    fixture_block_demoted(&f, "l1", &demoted);
    demoting = a.store;
    assert_int_equal(fixture_put(a.store, "acme", &f), 0);
    atomic_store(&demote_at_read, true);
    put(&a, "acme", &f); /* the disk has it: only who writes to the server reads */
    until(stats_of(&a).puts + stats_of(&a).put_failures == 1);
    assert_int_equal(stats_of(&a).puts, 1);
    assert_int_equal(demotion_done.calls, 1);
    assert_int_equal(demotion_done.status, 0);
    node_open(&b, redis.port, NULL, &a);
    until(!stats_of(&b).sick);
    assert_int_equal(look_up(&b, "acme", &f, &found), -TD_ERR_NOTFOUND);
    want.accept = KV_ACCEPT_ANY;
    until_found(&b, "acme", &demoted, &found);
    assert_int_equal(get(&b, "acme", &demoted, &from), 0);
    want.accept = KV_ACCEPT_EXACT;
    assert_int_equal(from, TIER_REMOTE);
    node_close(&b);
    node_close(&a);
    redis_stop(&redis);
}

static void the_server_sees_nothing(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct redis_server server = {.host = "127.0.0.1"};
    struct redis_link link;
    struct node a;
    struct fixture_block f;
    redisReply *keys, *value;
    redis_start(&redis);
    server.port = redis.port;
    node_open(&a, redis.port, NULL, NULL);
    until(!stats_of(&a).sick);
    fixture_block_make(&f, 5);
    put(&a, "acme", &f);
    until(stats_of(&a).puts == 1);
    redis_link_init(&link, &server);
    assert_int_equal(redis_link_begin(&link, WAIT_US, 1 << 20), 0);
    const struct span list[] = {redis_word("KEYS"), redis_word("*")};
    redis_link_send(&link, 2, list);
    assert_int_equal(redis_link_reply(&link, &keys), 0);
    assert_int_equal(keys->elements, 2);
    for (size_t i = 0; i < keys->elements; i++) {
        char hex[65];
        hex_encode(f.id.bytes, 32, hex);
        assert_null(strstr(keys->element[i]->str, hex));
        const struct span read[] = {redis_word("GET"), redis_word(keys->element[i]->str)};
        redis_link_send(&link, 2, read);
        assert_int_equal(redis_link_reply(&link, &value), 0);
        assert_null(memmem(value->str, value->len, f.id.bytes, 16));
        assert_null(memmem(value->str, value->len, f.bytes[0] + KV_PIECE_HEAD_SIZE, 32));
        assert_null(memmem(value->str, value->len, "acme", 4));
        freeReplyObject(value);
        const struct span ttl[] = {redis_word("TTL"), redis_word(keys->element[i]->str)};
        redis_link_send(&link, 2, ttl);
        assert_int_equal(redis_link_reply(&link, &value), 0);
        assert_true(value->integer > 0 && value->integer <= REDIS_TTL_S);
        freeReplyObject(value);
    }
    freeReplyObject(keys);
    redis_link_close(&link);
    node_close(&a);
    redis_stop(&redis);
}

/* Whoever has not noticed yet that the server was away writes to it in vain once. */
static bool put_and_get(struct node *a, struct node *b, const struct fixture_block *f, enum tier_kind *from)
{
    struct tiers_found found;
    put(a, "acme", f);
    return look_up(b, "acme", f, &found) == 0 && get(b, "acme", f, from) == 0;
}

static void stopped_hung_and_emptied_servers_are_misses(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct node a, b;
    struct fixture_block f, g;
    struct tiers_found found;
    enum tier_kind from;
    uint8_t key[32];
    redis_start(&redis);
    node_open(&a, redis.port, NULL, NULL);
    store_chain_key(a.store, "acme", key, NULL);
    node_command_ms = 200; /* on a busy machine an answer may be later: then once more */
    node_open(&b, redis.port, NULL, &a);
    node_command_ms = WAIT_US / 1000;
    until(!stats_of(&a).sick && !stats_of(&b).sick);
    fixture_block_make(&f, 1);
    fixture_block_make(&g, 2);
    put(&a, "acme", &f);
    put(&a, "acme", &g);
    until(stats_of(&a).puts == 2);
    until_found(&b, "acme", &f, &found);
    until_found(&b, "acme", &g, &found);

    kill(redis.pid, SIGSTOP); /* hung: known to be there, and never comes */
    assert_int_equal(get(&b, "acme", &f, &from), -TD_ERR_NOTFOUND);
    until(stats_of(&b).sick);
    assert_int_equal(look_up(&b, "acme", &f, &found), -TD_ERR_NOTFOUND); /* at once */
    kill(redis.pid, SIGCONT);
    until(look_up(&b, "acme", &f, &found) == 0 && get(&b, "acme", &f, &from) == 0);

    until_found(&b, "acme", &g, &found);
    redis_stop(&redis); /* gone */
    assert_int_equal(get(&b, "acme", &g, &from), -TD_ERR_NOTFOUND);
    until(stats_of(&b).sick);
    redis_start(&redis); /* back, and empty */
    until(!stats_of(&b).sick && !stats_of(&a).sick);
    assert_int_equal(look_up(&b, "acme", &g, &found), -TD_ERR_NOTFOUND);
    until(put_and_get(&a, &b, &g, &from)); /* the disk has it already, the server gets it again */
    assert_int_equal(from, TIER_REMOTE);
    node_close(&b);
    node_close(&a);
    redis_stop(&redis);
}

static void passwords(void **state)
{
    (void)state;
    struct real_redis redis = {.password = "correct-horse"};
    struct node right, wrong;
    redis_start(&redis);
    node_open(&right, redis.port, "correct-horse", NULL);
    node_open(&wrong, redis.port, "battery-staple", NULL);
    until(!stats_of(&right).sick);
    until(stats_of(&wrong).sick);
    node_close(&wrong);
    node_close(&right);
    redis_stop(&redis);
}

/* ---- hostile ------------------------------------------------------------------------------------------------ */

/* A link meets an answer: never more than an error, never later than its deadline. */
static void nonsense_is_an_error(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        int status;
    } cases[] = {
        {"+OK\r\n", 0},
        {"-ERR no\r\n", -TD_ERR_UNSUPPORTED},
        {"$3\r\nabc\r\n", 0},
        {"garbage\r\n", -TD_ERR_IO},
        {"$-5\r\n", -TD_ERR_IO},
        {"$99999999999999999999\r\n", -TD_ERR_IO},
        {"*2000000000\r\n", -TD_ERR_IO},
        {"*-7\r\n", -TD_ERR_IO},
        {"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", -TD_ERR_IO},
        {"$1000000000\r\nxx", -TD_ERR_IO}, /* announced, and then nothing */
        {"\0\0\0\0", -TD_ERR_IO},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct fake_redis fake;
        struct redis_link l;
        redisReply *reply = NULL;
        fake_start(&fake);
        struct redis_server server = {.host = "127.0.0.1", .port = fake.port};
        fake_answer(&fake, cases[i].bytes, i == TD_COUNT(cases) - 1 ? 4 : strlen(cases[i].bytes), false);
        redis_link_init(&l, &server);
        const struct span ping = redis_word("PING");
        assert_int_equal(redis_link_begin(&l, cases[i].status == -TD_ERR_IO ? 150000 : WAIT_US, 1000), 0);
        assert_int_equal(redis_link_send(&l, 1, &ping), 0);
        int rc = redis_link_reply(&l, &reply);
        if (rc != cases[i].status)
            fail_msg("case %zu: %d, not %d", i, rc, cases[i].status);
        if (rc == 0)
            freeReplyObject(reply);
        redis_link_close(&l);
        fake_stop(&fake);
    }
}

static void endless_answers_end(void **state)
{
    (void)state;
    struct fake_redis fake;
    struct redis_link l;
    redisReply *reply;
    fake_start(&fake);
    struct redis_server server = {.host = "127.0.0.1", .port = fake.port};
    fake_answer(&fake, "$100000\r\n", 9, false);
    fake.trickle = true; /* each byte in time, the whole never */
    redis_link_init(&l, &server);
    const struct span ping = redis_word("PING");
    assert_int_equal(redis_link_begin(&l, 200000, 1 << 20), 0);
    redis_link_send(&l, 1, &ping);
    assert_int_equal(redis_link_reply(&l, &reply), -TD_ERR_IO);
    assert_string_equal(l.why, "it does not answer in time");
    fake_stop(&fake);
}

/* The whole tier against a server that says PONG and then lies about everything. */
static void a_lying_server_gives_misses(void **state)
{
    (void)state;
    static const char *const lies[] = {"*1\r\n$3\r\nabc\r\n", "$3\r\nabc\r\n", ":42\r\n", "*0\r\n",
                                       "-LOADING wait\r\n",   "!?\r\n"};
    struct fake_redis fake;
    struct node n;
    struct fixture_block f;
    struct tiers_found found;
    enum tier_kind from;
    fake_start(&fake);
    fake_answer(&fake, "", 0, true);
    node_command_ms = 200; /* some lies are to be continued, which they are not */
    node_open(&n, fake.port, NULL, NULL);
    node_command_ms = WAIT_US / 1000;
    fixture_block_make(&f, 1);
    put(&n, "acme", &f);
    for (size_t i = 0; i < TD_COUNT(lies); i++) {
        struct fixture_block other;
        fixture_block_make(&other, 100 + i);
        fake_answer(&fake, lies[i], strlen(lies[i]), true);
        until(!stats_of(&n).sick);
        assert_int_equal(look_up(&n, "acme", &other, &found), -TD_ERR_NOTFOUND);
        assert_int_equal(get(&n, "acme", &other, &from), -TD_ERR_NOTFOUND);
        assert_int_equal(get(&n, "acme", &f, &from), 0); /* what is here is served all the while */
    }
    node_close(&n);
    fake_stop(&fake);
}

/* A directory entry that is right and a block that is not: counted as damaged. */
static void false_blocks_are_never_used(void **state)
{
    (void)state;
    struct real_redis redis = {.port = 0};
    struct redis_server server = {.host = "127.0.0.1"};
    struct redis_link link;
    struct node a, b;
    struct fixture_block f[3];
    struct tiers_found found;
    enum tier_kind from;
    uint8_t key[32], names[3][32];
    char key_names[3][80];
    redisReply *value[3], *ok;
    redis_start(&redis);
    server.port = redis.port;
    node_open(&a, redis.port, NULL, NULL);
    store_chain_key(a.store, "acme", key, NULL);
    node_open(&b, redis.port, NULL, &a);
    until(!stats_of(&a).sick && !stats_of(&b).sick);
    for (uint64_t i = 0; i < 3; i++) {
        fixture_block_make(&f[i], i + 1);
        put(&a, "acme", &f[i]);
        store_sealed_name(a.store, "acme", &f[i].id, names[i]);
        strcpy(key_names[i], "td:b:");
        hex_encode(names[i], 32, key_names[i] + 5);
    }
    until(stats_of(&a).puts == 3);
    redis_link_init(&link, &server);
    redis_link_begin(&link, WAIT_US, 1 << 20);
    for (int i = 0; i < 3; i++) {
        const struct span read[] = {redis_word("GET"), redis_word(key_names[i])};
        redis_link_send(&link, 2, read);
        assert_int_equal(redis_link_reply(&link, &value[i]), 0);
    }
    value[0]->str[5000] ^= 1; /* one bit; another block's bytes; cut short */
    const struct span wrong[3] = {{(uint8_t *)value[0]->str, value[0]->len},
                                  {(uint8_t *)value[0]->str, value[0]->len},
                                  {(uint8_t *)value[2]->str, value[2]->len - 1}};
    for (int i = 0; i < 3; i++) {
        const struct span write[] = {redis_word("SET"), redis_word(key_names[i]), wrong[i]};
        redis_link_send(&link, 3, write);
        assert_int_equal(redis_link_reply(&link, &ok), 0);
        freeReplyObject(ok);
    }
    for (int i = 0; i < 3; i++) {
        until_found(&b, "acme", &f[i], &found);
        assert_int_equal(get(&b, "acme", &f[i], &from), -TD_ERR_NOTFOUND);
        assert_int_equal(stats_of(&b).damaged, i + 1);
        freeReplyObject(value[i]);
    }
    assert_false(stats_of(&b).sick);
    redis_link_close(&link);
    node_close(&b);
    node_close(&a);
    redis_stop(&redis);
}

static void directory_entries(void **state)
{
    (void)state;
    struct store_block_info info = {{KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0}, 77, 2, 9, 123456}, again;
    uint8_t entry[KNOWN_ENTRY_SIZE];
    uint64_t epoch;
    known_entry_write(&info, 0x1122334455667788u, entry);
    assert_int_equal(known_entry_parse(entry, sizeof entry, &again, &epoch), 0);
    assert_memory_equal(&info, &again, sizeof info);
    assert_true(epoch == 0x1122334455667788u);
    for (size_t i = 0; i < sizeof entry; i++) {
        entry[i] ^= 0x40;
        assert_true(known_entry_parse(entry, sizeof entry, &again, &epoch) < 0);
        entry[i] ^= 0x40;
    }
    assert_int_equal(known_entry_parse(entry, sizeof entry - 1, &again, &epoch), -TD_ERR_FORMAT);
}

int main(void)
{
    const struct CMUnitTest real[] = {
        cmocka_unit_test(blocks_travel_between_nodes),
        cmocka_unit_test(the_server_keeps_the_best_copy),
        cmocka_unit_test(a_block_that_is_demoted_on_its_way_is_written_as_it_is_then),
        cmocka_unit_test(the_server_sees_nothing),
        cmocka_unit_test(stopped_hung_and_emptied_servers_are_misses),
        cmocka_unit_test(passwords),
        cmocka_unit_test(false_blocks_are_never_used),
    };
    const struct CMUnitTest hostile[] = {
        cmocka_unit_test(directory_entries),
        cmocka_unit_test(nonsense_is_an_error),
        cmocka_unit_test(endless_answers_end),
        cmocka_unit_test(a_lying_server_gives_misses),
    };
    log_set_level(LOG_ERROR);
    crypto_init();
    int failed = cmocka_run_group_tests(hostile, NULL, NULL);
    if (!redis_is_installed())
        print_message("skipped: no redis-server (deploy/deps.sh --test installs it)\n");
    else
        failed += cmocka_run_group_tests(real, NULL, NULL);
    return failed;
}
