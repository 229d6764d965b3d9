/* links_relay: a shaped link between two network namespaces. It forwards IP packets between two TUN devices, one in each namespace, and knows nothing of
 * TCP: what it has not delivered nobody has acknowledged. (A proxy of TCP would acknowledge early, and a sender that paces itself by acknowledgements would
 * see a link that is not there.)
 *
 *     links_relay NAMESPACE_A NAMESPACE_B          needs root; makes the device `link0` in both, then says "ready"
 *
 * Both directions are shaped alike: a token bucket of BUCKET_NS in front of the line, a queue of so many bytes before it whose tail is dropped, and then the
 * delay. Commands on stdin, one a line; the end of stdin ends the program:
 *
 *     shape MBIT_PER_S DELAY_MS QUEUE_BYTES        from now on; packets that wait keep the time that they were promised
 *     stats                                        answers "BYTES PACKETS DROPPED" from A to B, then the same from B to A, since the start
 *
 * One thread, one loop; a packet is copied once, into a ring that can hold all that is queued and all that is on its way. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define RING_SIZE  (64u << 20) /* 1000 Mbit/s for 100 ms are 12.5 MB */
#define PACKET_MAX 65536u
#define BURST      64       /* packets read of one device before the other has its turn */
#define BUCKET_NS  1000000u /* a loop that was late may catch up so much */
/* a packet may come so much later, or a hundredth of the delay, with those behind it: a loop for each would cost a core that is measured */
#define TICK_NS     250000u
#define DEVICE_NAME "link0"

struct packet {
    uint64_t deliver_ns;
    uint32_t size; /* 0: the ring goes on at its beginning */
};

struct way { /* one direction */
    int in, out;
    uint64_t free_ns; /* when the line has sent all that it was given */
    uint8_t *ring;
    size_t head, tail; /* next packet to deliver; where the next is put */
    uint64_t bytes, packets, dropped;
};

struct shape {
    double ns_per_byte;
    uint64_t delay_ns, queue_ns; /* queue: how far free_ns may be ahead */
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void fail(const char *what)
{
    fprintf(stderr, "links_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* A TUN device belongs to the namespace of the thread that opens it. */
static int open_device(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int ns = open(path, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET) < 0)
        fail(path);
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, DEVICE_NAME);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0)
        fail("/dev/net/tun");
    return fd;
}

/* ---- the ring: packets lie whole, behind a head, on borders of eight bytes ---- */

static size_t room_of(uint32_t size)
{
    return (sizeof(struct packet) + size + 7) & ~(size_t)7;
}

static bool ring_put(struct way *w, const uint8_t *data, uint32_t size, uint64_t deliver_ns)
{
    size_t room = room_of(size), last = RING_SIZE - sizeof(struct packet);
    if (w->tail >= w->head && w->tail + room > last) {
        if (room >= w->head)
            return false;
        memcpy(w->ring + w->tail, &(struct packet){0}, sizeof(struct packet));
        w->tail = 0;
    } else if (w->tail < w->head && w->tail + room >= w->head) {
        return false;
    }
    memcpy(w->ring + w->tail, &(struct packet){deliver_ns, size}, sizeof(struct packet));
    memcpy(w->ring + w->tail + sizeof(struct packet), data, size);
    w->tail += room;
    return true;
}

/* The next packet's head, or false. */
static bool ring_next(struct way *w, struct packet *out)
{
    if (w->head == w->tail)
        return false;
    memcpy(out, w->ring + w->head, sizeof *out);
    if (out->size == 0) {
        w->head = 0;
        return ring_next(w, out);
    }
    return true;
}

/* ---- the link ---- */

static void take(struct way *w, const struct shape *s)
{
    static uint8_t data[PACKET_MAX];
    for (int i = 0; i < BURST; i++) {
        ssize_t size = read(w->in, data, sizeof data);
        if (size <= 0)
            return;
        uint64_t now = now_ns(), start = now - BUCKET_NS > w->free_ns ? now - BUCKET_NS : w->free_ns;
        uint64_t sent = start + (uint64_t)((double)size * s->ns_per_byte);
        uint64_t deliver = (sent > now ? sent : now) + s->delay_ns;
        if (sent > now + s->queue_ns || !ring_put(w, data, (uint32_t)size, deliver)) {
            w->dropped++;
            continue;
        }
        w->free_ns = sent;
    }
}

/* Hands over what is due; returns when the next packet is, 0 for never. */
static uint64_t deliver(struct way *w)
{
    struct packet p;
    while (ring_next(w, &p)) {
        if (p.deliver_ns > now_ns())
            return p.deliver_ns;
        if (write(w->out, w->ring + w->head + sizeof p, p.size) == (ssize_t)p.size) {
            w->bytes += p.size;
            w->packets++;
        } else {
            w->dropped++;
        }
        w->head += room_of(p.size);
    }
    return 0;
}

static void command(char *line, struct shape *s, const struct way *ways)
{
    double mbit, delay_ms, queue;
    if (sscanf(line, "shape %lf %lf %lf", &mbit, &delay_ms, &queue) == 3 && mbit > 0) {
        s->ns_per_byte = 8e3 / mbit;
        s->delay_ns = (uint64_t)(delay_ms * 1e6);
        s->queue_ns = (uint64_t)(queue * s->ns_per_byte);
        printf("shaped\n");
    } else if (strncmp(line, "stats", 5) == 0) {
        for (int i = 0; i < 2; i++)
            printf("%llu %llu %llu%c", (unsigned long long)ways[i].bytes, (unsigned long long)ways[i].packets,
                   (unsigned long long)ways[i].dropped, i ? '\n' : ' ');
    } else {
        printf("what?\n");
    }
    fflush(stdout);
}

/* False at the end of stdin. */
static bool read_commands(struct shape *s, const struct way *ways)
{
    static char text[4096];
    static size_t used;
    ssize_t size = read(STDIN_FILENO, text + used, sizeof text - 1 - used);
    if (size <= 0)
        return size < 0 && errno == EINTR;
    text[used += (size_t)size] = '\0';
    for (char *end; (end = strchr(text, '\n'));) {
        *end = '\0';
        command(text, s, ways);
        used -= (size_t)(end + 1 - text);
        memmove(text, end + 1, used + 1);
    }
    return used < sizeof text - 1;
}

static void run(struct way *ways)
{
    struct shape shape = {.ns_per_byte = 8, .queue_ns = 1000000000};
    struct pollfd polled[] = {{.fd = ways[0].in, .events = POLLIN},
                              {.fd = ways[1].in, .events = POLLIN},
                              {.fd = STDIN_FILENO, .events = POLLIN}};
    for (;;) {
        uint64_t a = deliver(&ways[0]), b = deliver(&ways[1]), next = !a || (b && b < a) ? b : a,
                 now = now_ns(), tick = shape.delay_ns / 100 > TICK_NS ? shape.delay_ns / 100 : TICK_NS;
        uint64_t wait = next > now ? next - now + tick : 0;
        struct timespec timeout = {.tv_sec = (time_t)(wait / 1000000000u),
                                   .tv_nsec = (long)(wait % 1000000000u)};
        if (ppoll(polled, 3, next ? &timeout : NULL, NULL) < 0 && errno != EINTR)
            fail("poll");
        for (int i = 0; i < 2; i++)
            take(&ways[i], &shape);
        if (polled[2].revents && !read_commands(&shape, ways))
            return;
    }
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: links_relay NAMESPACE_A NAMESPACE_B\n");
        return 2;
    }
    int a = open_device(argv[1]), b = open_device(argv[2]);
    struct way ways[2] = {{.in = a, .out = b, .ring = malloc(RING_SIZE)},
                          {.in = b, .out = a, .ring = malloc(RING_SIZE)}};
    if (!ways[0].ring || !ways[1].ring)
        fail("memory");
    /* A link does not wait for a core; where this is not allowed it may. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    printf("ready\n");
    fflush(stdout);
    run(ways);
    free(ways[0].ring);
    free(ways[1].ring);
    return 0;
}
