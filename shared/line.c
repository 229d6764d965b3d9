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

void line_limit(struct line *l, double weight)
{
    double keep = l->weight > weight ? weight / l->weight : 1;
    l->weight *= keep;
    l->x *= keep;
    l->y *= keep;
    l->xx *= keep;
    l->xy *= keep;
}

double line_slope(const struct line *l)
{
    double spread = l->weight * l->xx - l->x * l->x;
    if (l->weight == 0 || spread <= 1e-9 * l->weight * l->xx)
        return 0;
    double slope = (l->weight * l->xy - l->x * l->y) / spread;
    if (slope <= 0)
        return 0;
    return l->x > 0 ? fmin(slope, l->y / l->x) : slope; /* the base stays at or above zero */
}

double line_base(const struct line *l)
{
    return l->weight > 0 ? (l->y - line_slope(l) * l->x) / l->weight : 0;
}

double line_at(const struct line *l, double x)
{
    return line_base(l) + line_slope(l) * x;
}
