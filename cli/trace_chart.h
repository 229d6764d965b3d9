/* trace_chart: hit rates by capacity as an SVG that can be read on its own. */
#ifndef TANDEM_CLI_TRACE_CHART_H
#define TANDEM_CLI_TRACE_CHART_H
#include "shared/base.h"
#include "shared/status.h"

#define CHART_SERIES_MAX 8
#define CHART_POINTS_MAX 16

struct chart {
    const char *title, *x_label, *y_label; /* plain text without < & > */
    const char *names[CHART_SERIES_MAX];
    double x[CHART_POINTS_MAX];                   /* greater than 0, ascending; the axis is logarithmic */
    double y[CHART_SERIES_MAX][CHART_POINTS_MAX]; /* 0 .. 100 */
    size_t series_count, point_count;
};
/* Writes the whole file or leaves an error: -TD_ERR_IO. */
int trace_chart_write(const struct chart *c, const char *path, struct td_error *err);

#endif
