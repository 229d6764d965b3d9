/* metrics: one process-wide list of metrics, rendered in the Prometheus text format (version 0.0.4).
 *
 * Invariants: a metric is never moved or freed, so pointers stay good for ever; the list only grows, under
 * `lock`; values are updated without it. A histogram's count is the sum of its buckets, read once, so a
 * scrape that races with updates still has buckets that ascend to the count (its sum may be an observation
 * ahead or behind). */
#include "shared/metrics.h"
#include "shared/base.h"
#include "shared/status.h"
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum metric_kind { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };

static const char *const kind_names[] = {"counter", "gauge", "histogram"};

struct metric {
    struct metric *next; /* under lock */
    enum metric_kind kind;
    char *name, *labels, *help;  /* labels: "" without */
    _Atomic uint64_t value_bits; /* of a double: value, or a histogram's sum */
    const double *bounds;
    size_t bound_count;
    _Atomic uint64_t *buckets; /* bound_count + 1; each counts its own interval only */
};

static struct metric *registry_first;
static struct metric **registry_end = &registry_first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */

/* From the time of one token on a GPU to a long prefill on a phone. */
const double METRIC_SECONDS_BOUNDS[] = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                        0.5,    1,     2.5,    5,     10,   25,    50,   100};
const size_t METRIC_SECONDS_BOUNDS_COUNT = TD_COUNT(METRIC_SECONDS_BOUNDS);

/* --- registration --- */

static bool name_is_valid(const char *name)
{
    for (const char *c = name; *c; c++) {
        bool letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || *c == '_' || *c == ':';
        if (!letter && !(c > name && *c >= '0' && *c <= '9'))
            return false;
    }
    return *name != '\0';
}

static struct metric *find_metric(const char *name, const char *labels)
{
    for (struct metric *m = registry_first; m; m = m->next)
        if (strcmp(m->name, name) == 0 && (!labels || strcmp(m->labels, labels) == 0))
            return m;
    return NULL;
}

static void destroy_metric(struct metric *m)
{
    if (!m)
        return;
    free(m->name);
    free(m->labels);
    free(m->help);
    free(m->buckets);
    free(m);
}

static struct metric *create_metric(enum metric_kind kind, const char *name, const char *labels,
                                    const char *help, const double *bounds, size_t bound_count)
{
    struct metric *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->kind = kind;
    m->name = strdup(name);
    m->labels = strdup(labels);
    m->help = strdup(help);
    m->bounds = bounds;
    m->bound_count = bound_count;
    if (kind == METRIC_HISTOGRAM)
        m->buckets = calloc(bound_count + 1, sizeof *m->buckets);
    if (m->name && m->labels && m->help && (m->buckets || kind != METRIC_HISTOGRAM))
        return m;
    destroy_metric(m);
    return NULL;
}

/* Without memory for another, what would be counted in it is counted where nobody reads: no reason to end an application. */
static struct metric *unread_metric(enum metric_kind kind)
{
    static _Atomic uint64_t bucket;
    static struct metric plain = {.kind = METRIC_GAUGE},
                         histogram = {.kind = METRIC_HISTOGRAM, .buckets = &bucket};
    return kind == METRIC_HISTOGRAM ? &histogram : &plain;
}

static struct metric *register_metric(enum metric_kind kind, const char *name, const char *labels,
                                      const char *help, const double *bounds, size_t bound_count)
{
    pthread_mutex_lock(&lock);
    struct metric *m = find_metric(name, labels ? labels : "");
    struct metric *relative = find_metric(name, NULL);
    if (!name_is_valid(name) || (relative && relative->kind != kind)) {
        fprintf(stderr, "cannot register metric %s: its name is invalid or already of another type\n", name);
        abort(); /* a mistake in the program's source, met at its first start */
    }
    if (!m) {
        m = create_metric(kind, name, labels ? labels : "", help ? help : "", bounds, bound_count);
        if (m) {
            *registry_end = m;
            registry_end = &m->next;
        } else {
            m = unread_metric(kind);
        }
    }
    pthread_mutex_unlock(&lock);
    return m;
}

struct metric *metric_counter(const char *name, const char *labels, const char *help)
{
    return register_metric(METRIC_COUNTER, name, labels, help, NULL, 0);
}

struct metric *metric_gauge(const char *name, const char *labels, const char *help)
{
    return register_metric(METRIC_GAUGE, name, labels, help, NULL, 0);
}

struct metric *metric_histogram(const char *name, const char *labels, const char *help, const double *bounds,
                                size_t count)
{
    return register_metric(METRIC_HISTOGRAM, name, labels, help, bounds, count);
}

int metric_label(char *out, size_t size, const char *name, const char *value)
{
    int length = snprintf(out, size, "%s=\"", name);
    if (length < 0 || (size_t)length >= size)
        return -TD_ERR_NOSPACE;
    size_t used = (size_t)length;
    for (const char *c = value; *c; c++) {
        bool special = *c == '\\' || *c == '"' || *c == '\n';
        if (size - used < (special ? 4u : 3u)) /* with the closing quote and NUL */
            return -TD_ERR_NOSPACE;
        if (special)
            out[used++] = '\\';
        out[used++] = *c == '\n' ? 'n' : *c;
    }
    if (size - used < 2)
        return -TD_ERR_NOSPACE;
    out[used++] = '"';
    out[used] = '\0';
    return 0;
}

/* --- updating --- */

static double double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void add_value(struct metric *m, double amount)
{
    uint64_t before = atomic_load_explicit(&m->value_bits, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&m->value_bits, &before,
                                                  bits_of(double_of(before) + amount), memory_order_relaxed,
                                                  memory_order_relaxed))
        ;
}

void metric_add(struct metric *m, double amount)
{
    if (m->kind == METRIC_GAUGE || (m->kind == METRIC_COUNTER && amount >= 0)) /* a counter never falls */
        add_value(m, amount);
}

void metric_set(struct metric *m, double value)
{
    if (m->kind != METRIC_HISTOGRAM) /* a counter too: its total may be kept elsewhere */
        atomic_store_explicit(&m->value_bits, bits_of(value), memory_order_relaxed);
}

void metric_observe(struct metric *m, double value)
{
    if (m->kind != METRIC_HISTOGRAM || isnan(value))
        return;
    size_t bucket = 0;
    while (bucket < m->bound_count && value > m->bounds[bucket])
        bucket++;
    atomic_fetch_add_explicit(&m->buckets[bucket], 1, memory_order_relaxed);
    add_value(m, value);
}

double metric_value(const struct metric *m)
{
    if (m->kind != METRIC_HISTOGRAM)
        return double_of(atomic_load_explicit(&m->value_bits, memory_order_relaxed));
    uint64_t count = 0;
    for (size_t i = 0; i <= m->bound_count; i++)
        count += atomic_load_explicit(&m->buckets[i], memory_order_relaxed);
    return (double)count;
}

/* --- rendering --- */

struct text { /* grows; `failed` once memory ran out, and nothing is added from then on */
    char *data;
    size_t size, capacity;
    bool failed;
};

static bool text_reserve(struct text *t, size_t more)
{
    if (!t->failed && t->capacity - t->size <= more) {
        size_t capacity = TD_MAX(t->capacity * 2, t->size + more + 4096);
        char *grown = realloc(t->data, capacity);
        t->failed = grown == NULL;
        if (grown) {
            t->data = grown;
            t->capacity = capacity;
        }
    }
    return !t->failed;
}

static void text_add(struct text *t, const char *added)
{
    size_t size = strlen(added);
    if (text_reserve(t, size)) {
        memcpy(t->data + t->size, added, size + 1);
        t->size += size;
    }
}

/* HELP escapes backslash and newline; a label set, which comes escaped, can at worst hold a newline. */
static void text_add_escaped(struct text *t, const char *added, bool backslash_too)
{
    for (char one[2] = ""; *added; added++) {
        one[0] = *added;
        text_add(t, *added == '\n' ? "\\n" : *added == '\\' && backslash_too ? "\\\\" : one);
    }
}

/* The shortest of 15 or 17 digits that gives the same double back. */
static void format_number(char out[32], double value)
{
    if (isnan(value))
        strcpy(out, "NaN");
    else if (isinf(value))
        strcpy(out, value > 0 ? "+Inf" : "-Inf");
    else if (snprintf(out, 32, "%.15g", value) > 0 && strtod(out, NULL) != value)
        snprintf(out, 32, "%.17g", value);
}

/* name + suffix + {labels,le="bound"} + value; bound may be NULL. */
static void render_sample(struct text *t, const struct metric *m, const char *suffix, const char *bound,
                          double value)
{
    char number[32];
    format_number(number, value);
    text_add(t, m->name);
    text_add(t, suffix);
    if (*m->labels || bound) {
        text_add(t, "{");
        text_add_escaped(t, m->labels, false);
        if (bound) {
            text_add(t, *m->labels ? ",le=\"" : "le=\"");
            text_add(t, bound);
            text_add(t, "\"");
        }
        text_add(t, "}");
    }
    text_add(t, " ");
    text_add(t, number);
    text_add(t, "\n");
}

static void render_histogram(struct text *t, const struct metric *m)
{
    uint64_t count = 0;
    for (size_t i = 0; i <= m->bound_count; i++) {
        char bound[32];
        format_number(bound, i < m->bound_count ? m->bounds[i] : INFINITY);
        count += atomic_load_explicit(&m->buckets[i], memory_order_relaxed);
        render_sample(t, m, "_bucket", bound, (double)count);
    }
    render_sample(t, m, "_sum", NULL, double_of(atomic_load_explicit(&m->value_bits, memory_order_relaxed)));
    render_sample(t, m, "_count", NULL, (double)count);
}

/* All metrics of one name, in the order of their registration, below one head. */
static void render_family(struct text *t, const struct metric *first)
{
    text_add(t, "# HELP ");
    text_add(t, first->name);
    text_add(t, " ");
    text_add_escaped(t, first->help, true);
    text_add(t, "\n# TYPE ");
    text_add(t, first->name);
    text_add(t, " ");
    text_add(t, kind_names[first->kind]);
    text_add(t, "\n");
    for (const struct metric *m = first; m; m = m->next) {
        if (strcmp(m->name, first->name) != 0)
            continue;
        if (m->kind == METRIC_HISTOGRAM)
            render_histogram(t, m);
        else
            render_sample(t, m, "", NULL, metric_value(m));
    }
}

char *metrics_render(size_t *size)
{
    struct text t = {0};
    text_add(&t, "");
    pthread_mutex_lock(&lock);
    for (const struct metric *m = registry_first; m; m = m->next)
        if (find_metric(m->name, NULL) == m)
            render_family(&t, m);
    pthread_mutex_unlock(&lock);
    if (t.failed) {
        free(t.data);
        return NULL;
    }
    if (size)
        *size = t.size;
    return t.data;
}
