/* metrics: process-wide counters, gauges and histograms, in Prometheus text. Registered once at start-up, then updated
 * without locks (relaxed atomics). Labels are fixed at registration: never anything a client chose. */
#ifndef TANDEM_SHARED_METRICS_H
#define TANDEM_SHARED_METRICS_H
#include <stddef.h>
#include <stdint.h>

struct metric;

/* labels: `tier="disk"` or NULL. The same (name, labels) gives the same metric. Aborts on no memory (start-up only). */
struct metric *metric_counter(const char *name, const char *labels, const char *help);
struct metric *metric_gauge(const char *name, const char *labels, const char *help);
/* bounds: ascending upper bounds, borrowed for ever (static); +Inf is added. */
struct metric *metric_histogram(const char *name, const char *labels, const char *help, const double *bounds,
                                size_t count);
extern const double METRIC_SECONDS_BOUNDS[];
extern const size_t METRIC_SECONDS_BOUNDS_COUNT;
/* metric_label: write `name="value"` with the value escaped, for labels that are not literals. 0 or -TD_ERR_NOSPACE. */
int metric_label(char *out, size_t size, const char *name, const char *value);

void metric_add(struct metric *m, double amount); /* a counter never falls: a negative amount is ignored */
void metric_set(struct metric *m, double value);  /* gauges; counters whose total is kept elsewhere */
void metric_observe(struct metric *m, double value);
double metric_value(const struct metric *m); /* histogram: the count */

/* metrics_render: malloc'ed text, the caller's; NULL without memory. */
char *metrics_render(size_t *size);

#endif
