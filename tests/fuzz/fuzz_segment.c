/* fuzz_segment: hostile bytes as record heads and as a segment file. Input: one byte of mode, then pages. Checksums and place are
 * made right first (odd mode), so that the fuzzer reaches the fields; a head that parses must write back to the same bytes, and a
 * scan over anything must end within the file. */
#include "store/segment.h"
#include <errno.h>
#include <stdlib.h>

#define INPUT_SIZE_MAX (64u << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct memory_file { /* an io that reads one buffer */
    struct io io;
    const uint8_t *data;
    size_t size;
};

static int64_t memory_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)fd;
    const struct memory_file *f = (const struct memory_file *)io;
    if (offset >= f->size)
        return 0;
    size_t got = TD_MIN(size, f->size - (size_t)offset);
    memcpy(data, f->data + offset, got);
    return (int64_t)got;
}

static void memory_advise(struct io *io, int fd, uint64_t offset, uint64_t size, enum io_advice advice)
{
    (void)io, (void)fd, (void)offset, (void)size, (void)advice;
}

struct visit {
    uint64_t end, size;
    uint32_t count;
};

static int on_record(void *ctx, const struct record_head *head, const uint8_t *page)
{
    struct visit *v = ctx;
    uint8_t again[RECORD_PAGE];
    if (head->offset < v->end || head->offset + record_size(head->body_size) > v->size)
        abort();
    v->end = head->offset + record_size(head->body_size);
    v->count++;
    record_head_write(head, again);
    record_head_finish(again, head->body_crc);
    if (memcmp(again, page, RECORD_PAGE) != 0)
        abort();
    return 0;
}

/* Give every page that looks like a head its checksum and its place. */
static void make_right(uint8_t *pages, size_t size, const struct segment *s)
{
    for (size_t at = 0; at + RECORD_PAGE <= size; at += RECORD_PAGE) {
        uint8_t *page = pages + at;
        if (load_le32(page) != 0x43524454u)
            continue;
        store_le64(page + 16, s->id);
        store_le64(page + 24, s->nonce);
        store_le64(page + 40, at);
        store_le32(page + RECORD_PAGE - 4, crc32c(0, page, RECORD_PAGE - 4));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > INPUT_SIZE_MAX)
        return 0;
    struct segment s = {.id = 7, .nonce = 9};
    /* Inputs hold only the start of each page, so that the fuzzer is not busy with zeros: 512 bytes become one page. */
    size_t piece = 512, count = (size - 1 + piece - 1) / piece, length = count * RECORD_PAGE;
    uint8_t *pages = calloc(1, length + 1);
    for (size_t i = 0; i < count; i++)
        memcpy(pages + i * RECORD_PAGE, data + 1 + i * piece, TD_MIN(piece, size - 1 - i * piece));
    if (data[0] & 1)
        make_right(pages, length, &s);

    struct segment_head segment_head;
    if (count > 0)
        segment_head_parse(pages, &segment_head);
    struct memory_file f = {
        .io = {.pread = memory_pread, .advise = memory_advise}, .data = pages, .size = length};
    struct visit v = {.size = length};
    struct segment_scan scan;
    if (segment_scan(&f.io, 0, &s, 0, length, on_record, &v, &scan) != 0 || scan.end != v.end ||
        scan.record_count != v.count)
        abort();
    free(pages);
    return 0;
}
