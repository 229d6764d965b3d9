/* line: see line.h. */
#include "shared/line.h"
#include <math.h>

void line_add(struct line *l, double x, double y)
{
    const double keep = exp2(-1 / LINE_HALF_LIFE);
    l->weight = l->weight * keep + 1;
    l->x = l->x * keep + x;
    l->y = l->y * keep + y;
    l->xx = l->xx * keep + x * x;
    l->xy = l->xy * keep + x * y;
}

/* Sums about the middle of what was measured. */
static double spread_of(const struct line *l)
{
    double spread = l->weight > 0 ? l->xx - l->x * l->x / l->weight : 0;
    return spread > 1e-9 * l->xx ? spread : 0;
}

static double rise_of(const struct line *l)
{
    return spread_of(l) > 0 ? l->xy - l->x * l->y / l->weight : 0;
}

static double steepest(const struct line *l) /* the base stays at or above zero */
{
    return l->x > 0 ? l->y / l->x : HUGE_VAL;
}

double line_common_slope(const struct line *a, const struct line *b, double rise)
{
    double weight = a->weight + b->weight, x = a->x + b->x, y = a->y + b->y;
    double expected = weight > 0 ? rise * y / (weight + rise * x) : 0;
    double near = LINE_NEAR * LINE_NEAR, spread = spread_of(a) + spread_of(b);
    double slope = (rise_of(a) + rise_of(b) + near * expected) / (spread + near);
    return fmax(fmin(slope, fmin(steepest(a), steepest(b))), 0);
}

double line_base_of_slope(const struct line *l, double slope)
{
    return l->weight > 0 ? (l->y - slope * l->x) / l->weight : 0;
}
