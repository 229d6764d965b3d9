/* node_internal: what node.c (order of start and stop), node_load.c (model, store, engine) and node_watch.c (signals, tokens file) share. */
#ifndef TANDEM_CLOUD_NODE_INTERNAL_H
#define TANDEM_CLOUD_NODE_INTERNAL_H
#include "cloud/admin.h"
#include "cloud/direct.h"
#include "cloud/edge_server.h"
#include "cloud/node.h"
#include "store/tiers.h"
#include <pthread.h>
#include <stdatomic.h>

/* ---- node_memory.c: bytes of this machine's memory ---- */
#define NODE_MEMORY_BASE (96ull << 20) /* program, connections, steps, what the store seals in */
#define NODE_QUEUE_MIN   (32ull << 20) /* two of the largest conversations wait for the disk */

struct node_memory {
    uint64_t available, swap; /* swap: what may be put aside on the disk */
    uint64_t weights;         /* those that are copied, not the mapped file's; 0 where a GPU has them */
    uint64_t kv_least;        /* 0 where a GPU has the pages */
    uint64_t kv;              /* in: as wanted, 0: to be chosen; out: of pages */
    uint64_t store_ram;       /* in: as wanted; out: as there is room for */
    uint64_t store_queue;     /* out: of blocks and turns that wait for the disk */
};
/* 0, or weights and pages do not fit, even with swap, and why. */
int node_memory_fit(struct node_memory *m, struct td_error *err);

struct node {
    const struct settings *settings;
    struct service service; /* what everybody borrows; owned parts are freed by node_destroy */
    struct gguf *file;
    struct model *model;
    struct tokenizer *tokenizer;
    struct tiers *tiers;
    struct engine *engine;
    const struct backend *backend; /* the engine's */
    int lost;                      /* the code with which the device that computes failed */
    struct edge_server *edges;
    struct direct *direct;
    struct admin *admin;
    struct net_timer *timer;
    bool gpu;            /* it computes */
    uint32_t page_count; /* KV pages; 0: what the GPU has room for */
    struct node_memory memory;
    char host_name[LIMIT_NAME_SIZE + 1];
    uint16_t port;
    struct node_gauges *gauges;

    struct watch { /* node_watch.c */
        pthread_t thread;
        bool started;
        atomic_bool stop, serving;     /* serving: the loop runs, auth is there */
        char told[TD_ERROR_TEXT_SIZE]; /* what was wrong with the tokens file at the last look: told once */
    } watch;

    struct erase { /* node_erase.c: one at a time, as the admin listener's jobs are */
        pthread_mutex_t lock;
        pthread_cond_t changed;
        bool answered, stopping; /* under lock, as `status` */
        int status;
        char tenant[STORE_TENANT_MAX + 1];
        struct io_job barrier;
    } erase;

    struct speed { /* node_speed.c */
        pthread_t thread;
        pthread_mutex_t lock; /* guards `stopping` */
        pthread_cond_t stop;
        bool started, stopping;
        size_t block_size;
        uint64_t noted_us[TIER_COUNT]; /* the thread's, once it runs */
    } speed;

    /* stopping; the loop's thread alone, but for the drain thread's engine_drain */
    pthread_t drain_thread;
    bool drain_started, drained;
    uint64_t drained_us;
};

/* ---- node_load.c ---- */
int node_load_model(struct node *n, struct td_error *err);
int node_plan_memory(struct node *n, struct td_error *err);
int node_open_store(struct node *n, struct td_error *err);
int node_start_engine(struct node *n, struct td_error *err);
void node_gauges_update(struct node *n); /* what only the store knows, for /metrics */

/* ---- node_watch.c ---- */
int node_watch_start(struct node *n, struct td_error *err);
void node_watch_stop(struct node *n);
/* The keys of every tenant of the tokens file: 0, or why those of one are not there; the others are. */
int node_warm_keys(struct node *n, struct td_error *err);

/* ---- node_erase.c ---- */
void node_erase_init(struct node *n);
void node_erase_deinit(struct node *n);
int node_erase_tenant(void *node, const char *tenant, struct td_error *err);
/* The loop has ended: nobody waits for it any more. Before the admin listener's jobs are waited for. */
void node_erase_stop(struct node *n);

/* ---- node_speed.c ---- */
/* block_size: bytes of a block of this model, about. */
int node_speed_start(struct node *n, size_t block_size, struct td_error *err);
void node_speed_stop(struct node *n); /* notes what was measured; before the engine and the store go */

/* ---- node.c ---- */
void node_begin_drain(void *arg); /* loop's thread; arg: the node */

#endif
