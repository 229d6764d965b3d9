/* line: a straight line through measurements that come one by one, the older the less they count: what a unit of work costs (y) over where it is
 * done (x), from which the cost elsewhere is foretold. Weighted least squares; the weights halve every LINE_HALF_LIFE measurements. Neither base
 * nor slope is ever negative: with one x, or a falling cloud of points, the line is level. */
#ifndef TANDEM_SHARED_LINE_H
#define TANDEM_SHARED_LINE_H

/* more than a long prompt has chunks: a fit through its end alone says little about its beginning */
#define LINE_HALF_LIFE 48.0

struct line {                    /* zeros: nothing measured */
    double weight, x, y, xx, xy; /* weighted sums */
};

void line_add(struct line *l, double x, double y);
/* What was added so far counts as no more than so many measurements. */
void line_limit(struct line *l, double weight);
double line_slope(const struct line *l);
double line_base(const struct line *l);         /* y at x = 0; 0: nothing measured */
double line_at(const struct line *l, double x); /* 0: nothing measured */

#endif
