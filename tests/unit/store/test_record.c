/* Record heads: what is written is read again, every damaged field is refused, and a part opens only in its place. The byte
 * positions here are those of FORMAT.md, not the code's constants. */
#include "store_fixture.h"

static const uint8_t data_key[32] = {9, 8, 7};

static struct record_head block_head(void)
{
    struct record_head h = {
        .type = RECORD_BLOCK,
        .codec = 1,
        .lsn = 0x0102030405060708u,
        .segment_id = 0x1112131415161718u,
        .segment_nonce = 0x2122232425262728u,
        .sequence = 0x31323334u,
        .offset = 0x4142434445464748u,
        .durable_end = 0x5152535455565758u,
        .quality = {1, 2, 1, 0},
        .block_index = 0x61626364u,
        .layer_begin = 4,
        .layer_end = 6,
        .time_us = 0x7172737475767778u,
        .part_count = 2,
        .parts = {{100, 200}, {300, 0}},
    };
    h.body_size = 100 + 200 + 16 + 300 + 16;
    memset(h.key_id, 0xa1, sizeof h.key_id);
    memset(h.id, 0xa2, sizeof h.id);
    memset(h.parent, 0xa3, sizeof h.parent);
    memset(h.salt, 0xa4, sizeof h.salt);
    return h;
}

static void test_block_head_bytes(void **state)
{
    (void)state;
    struct record_head h = block_head(), back;
    uint8_t page[RECORD_PAGE];
    record_head_write(&h, page);
    record_head_finish(page, 0x81828384u);
    assert_memory_equal(page, "TDRC\x01\x01\x01\x00", 8);
    assert_int_equal(load_le64(page + 8), h.lsn);
    assert_int_equal(load_le64(page + 16), h.segment_id);
    assert_int_equal(load_le64(page + 24), h.segment_nonce);
    assert_int_equal(load_le32(page + 32), h.sequence);
    assert_int_equal(load_le32(page + 36), 2);
    assert_int_equal(load_le64(page + 40), h.offset);
    assert_int_equal(load_le64(page + 48), 632);
    assert_int_equal(load_le64(page + 56), h.durable_end);
    for (int i = 0; i < 112; i++)
        assert_int_equal(page[64 + i], i < 16 ? 0xa1 : i < 48 ? 0xa2 : i < 80 ? 0xa3 : 0xa4);
    assert_int_equal(load_le32(page + 176), 0x00010201);
    assert_int_equal(load_le32(page + 180), h.block_index);
    assert_int_equal(load_le32(page + 184), 4 | 6 << 16);
    assert_int_equal(load_le64(page + 200), h.time_us);
    assert_int_equal(load_le32(page + 256), 100);
    assert_int_equal(load_le32(page + 260), 200);
    assert_int_equal(load_le32(page + 264), 300);
    assert_int_equal(load_le32(page + 4088), 0x81828384u);
    assert_int_equal(load_le32(page + 4092), crc32c(0, page, 4092));
    h.body_crc = 0x81828384u;
    memset(&back, 0, sizeof back);
    assert_int_equal(record_head_parse(page, &back), 0);
    assert_memory_equal(&back, &h, offsetof(struct record_head, parts) + 2 * sizeof h.parts[0]);
    assert_int_equal(back.body_crc, h.body_crc);
    assert_int_equal(record_part_offset(&h, 1), 316);
    assert_int_equal(record_size(632), 2 * 4096);
    assert_int_equal(record_size(0), 4096);
    assert_int_equal(record_size(4097), 3 * 4096);
}

static void test_any_flipped_bit_is_noticed(void **state)
{
    (void)state;
    struct record_head h = block_head(), back;
    uint8_t page[RECORD_PAGE];
    record_head_write(&h, page);
    record_head_finish(page, 1);
    for (size_t at = 0; at < RECORD_PAGE; at++) {
        page[at] ^= 0x20;
        assert_true(record_head_parse(page, &back) < 0);
        page[at] ^= 0x20;
    }
    assert_int_equal(record_head_parse(page, &back), 0);
}

static void test_fields_are_checked(void **state)
{
    (void)state;
    const struct {
        size_t at;
        uint8_t value;
        int rc;
    } edits[] = {
        {4, 2, -TD_ERR_VERSION},
        {5, 0, -TD_ERR_FORMAT},
        {5, RECORD_CONVERSATION, -TD_ERR_FORMAT}, /* two parts */
        {5, RECORD_TOMBSTONE, -TD_ERR_FORMAT},
        {5, RECORD_PIN, -TD_ERR_FORMAT},
        {5, RECORD_SEAL, -TD_ERR_FORMAT},
        {5, RECORD_VOID, -TD_ERR_FORMAT},
        {5, 7, -TD_ERR_FORMAT},
        {7, 1, -TD_ERR_FORMAT},  /* a target on a block */
        {36, 3, -TD_ERR_FORMAT}, /* parts unlike layers */
        {37, 2, -TD_ERR_FORMAT}, /* too many parts */
        {48, 0, -TD_ERR_FORMAT}, /* body unlike its parts */
        {176, 5, -TD_ERR_FORMAT},
        {179, 1, -TD_ERR_FORMAT},
        {184, 6, -TD_ERR_FORMAT},
        {188, 1, -TD_ERR_FORMAT},
        {259, 0x80, -TD_ERR_FORMAT}, /* a part of 2 GiB */
        {272, 1, -TD_ERR_FORMAT},    /* behind the table */
        {4087, 1, -TD_ERR_FORMAT},
    };
    for (size_t i = 0; i < TD_COUNT(edits); i++) {
        struct record_head h = block_head(), back;
        uint8_t page[RECORD_PAGE];
        record_head_write(&h, page);
        page[edits[i].at] = edits[i].value;
        record_head_finish(page, 1);
        assert_int_equal(record_head_parse(page, &back), edits[i].rc);
    }
}

/* A body of one piece, as its reader makes room for it: the size is not under the tag of the head, so whoever can write to the disk may say anything. */
static void test_a_conversation_is_one_piece(void **state)
{
    (void)state;
    struct record_head h = {.type = RECORD_CONVERSATION, .version = 1, .part_count = 1, .body_size = 66},
                       back;
    uint8_t page[RECORD_PAGE];
    for (uint32_t first = 0; first <= 50; first += 25) {
        h.parts[0] = (struct record_part){first, 50 - first};
        record_head_write(&h, page);
        record_head_finish(page, 1);
        assert_int_equal(record_head_parse(page, &back), first == 50 ? 0 : -TD_ERR_FORMAT);
    }
}

static void test_segment_head(void **state)
{
    (void)state;
    struct segment_head h = {5, 6, 7, 8}, back;
    uint8_t page[RECORD_PAGE];
    segment_head_write(&h, page);
    assert_memory_equal(page, "TDSEGMNT\x01\0\0\0", 12);
    assert_int_equal(load_le64(page + 16), 5);
    assert_int_equal(load_le64(page + 24), 6);
    assert_int_equal(load_le64(page + 32), 7);
    assert_int_equal(load_le64(page + 40), 8);
    assert_int_equal(segment_head_parse(page, &back), 0);
    assert_memory_equal(&back, &h, sizeof h);
    for (size_t at = 0; at < RECORD_PAGE; at += 3) {
        page[at] ^= 1;
        assert_true(segment_head_parse(page, &back) < 0);
        page[at] ^= 1;
    }
    page[8] = 2;
    store_le32(page + 4092, crc32c(0, page, 4092));
    assert_int_equal(segment_head_parse(page, &back), -TD_ERR_VERSION);
}

static void test_segment_names(void **state)
{
    (void)state;
    char name[SEGMENT_NAME_SIZE];
    uint64_t id;
    segment_name(0xabc, name);
    assert_string_equal(name, "seg-0000000000000abc.td");
    assert_true(segment_name_parse(name, &id));
    assert_int_equal(id, 0xabc);
    static const char *const bad[] = {"seg-0000000000000ABC.td",
                                      "seg-abc.td",
                                      "seg-0000000000000abc.td2",
                                      "seg-0000000000000abg.td",
                                      "seg-0000000000000000.td",
                                      "keys.td",
                                      "",
                                      "seg- 00000000000abc.td"};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_false(segment_name_parse(bad[i], &id));
}

/* Seal part 1 of a block in `out`; returns its key. */
static void seal(const struct record_head *h, uint8_t page[RECORD_PAGE], const uint8_t *plain, uint8_t *out)
{
    uint8_t key[32];
    record_head_write(h, page);
    assert_int_equal(record_open_key(data_key, h, key), 0);
    assert_int_equal(record_seal_part(key, h, page, 1, plain, out), 0);
}

static int open_as(const struct record_head *h, const uint8_t *data_key_used, uint32_t part,
                   const uint8_t *sealed)
{
    uint8_t page[RECORD_PAGE], key[32], data[316];
    record_head_write(h, page);
    memcpy(data, sealed, sizeof data);
    if (record_open_key(data_key_used, h, key) < 0)
        return -TD_ERR_CRYPTO;
    return record_open_part(key, h, page, part, data, sealed + 300);
}

static void test_a_part_opens_only_in_its_place(void **state)
{
    (void)state;
    struct record_head h = block_head();
    uint8_t page[RECORD_PAGE], plain[300], sealed[316], wrong_key[32] = {9, 8, 6};
    memset(plain, 0x5a, sizeof plain);
    seal(&h, page, plain, sealed);
    assert_int_equal(open_as(&h, data_key, 1, sealed), 0);
    assert_int_equal(open_as(&h, wrong_key, 1, sealed), -TD_ERR_CRYPTO);
    assert_int_equal(open_as(&h, data_key, 0, sealed),
                     -TD_ERR_CRYPTO); /* of the same size, as another layer */
    struct record_head moved[12];
    for (int i = 0; i < 12; i++)
        moved[i] = h;
    moved[0].segment_id++, moved[1].offset++, moved[2].sequence++, moved[3].lsn++, moved[4].id[0]++,
        moved[5].parent[0]++;
    moved[6].salt[0]++, moved[7].quality.fidelity--, moved[8].block_index++, moved[9].codec++,
        moved[10].parts[0].first_size++;
    moved[11].layer_begin++, moved[11].layer_end++;
    for (int i = 0; i < 12; i++)
        assert_int_equal(open_as(&moved[i], data_key, 1, sealed), -TD_ERR_CRYPTO);
    for (size_t at = 0; at < sizeof sealed; at += 7) {
        sealed[at] ^= 1;
        assert_int_equal(open_as(&h, data_key, 1, sealed), -TD_ERR_CRYPTO);
        sealed[at] ^= 1;
    }
}

static void test_a_conversation_has_its_own_key(void **state)
{
    (void)state;
    struct record_head h = {
        .type = RECORD_CONVERSATION, .version = 1, .part_count = 1, .parts = {{50, 0}}, .body_size = 66};
    uint8_t body_key[32] = {1, 2, 3, 4}, opened[32];
    memset(h.salt, 3, sizeof h.salt);
    assert_int_equal(record_wrap_key(data_key, &h, body_key), 0);
    assert_int_equal(record_open_key(data_key, &h, opened), 0);
    assert_memory_equal(opened, body_key, 32);
    memset(h.wrapped_key, 0,
           sizeof h.wrapped_key); /* what voiding does: the data key alone no longer helps */
    assert_int_equal(record_open_key(data_key, &h, opened), -TD_ERR_CRYPTO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_head_bytes),
        cmocka_unit_test(test_any_flipped_bit_is_noticed),
        cmocka_unit_test(test_fields_are_checked),
        cmocka_unit_test(test_a_conversation_is_one_piece),
        cmocka_unit_test(test_segment_head),
        cmocka_unit_test(test_segment_names),
        cmocka_unit_test(test_a_part_opens_only_in_its_place),
        cmocka_unit_test(test_a_conversation_has_its_own_key),
    };
    crypto_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
