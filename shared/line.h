/* line: a straight line through measurements that come one by one, the older the less they count: what a unit of work costs (y) over where it is
 * done (x), from which the cost elsewhere is foretold. Weighted least squares; the weights halve every LINE_HALF_LIFE measurements. Neither base
 * nor slope is ever negative: a falling cloud of points makes a level line, and with one x it rises as is expected. */
#ifndef TANDEM_SHARED_LINE_H
#define TANDEM_SHARED_LINE_H

/* more than a long prompt has chunks: a fit through its end alone says little about its beginning */
#define LINE_HALF_LIFE 48.0
/* Two measurements that are closer say more about their moments than about their places, and drawn out to a long prompt's end would be many times the cost. A slope
 * is believed by spread / (spread + LINE_NEAR^2), spread being the sum of squared distances from the middle; for the rest the expected one is. */
#define LINE_NEAR 512.0

struct line {                    /* zeros: nothing measured */
    double weight, x, y, xx, xy; /* weighted sums */
};

void line_add(struct line *l, double x, double y);
/* The slope of two lines that rise alike, of which each may have been measured in few places.
 * rise: what is expected until then, the share of its base that each x adds to y; 0: that both are level. */
double line_common_slope(const struct line *a, const struct line *b, double rise);
/* y at x = 0 of a line that rises so; 0: nothing measured */
double line_base_of_slope(const struct line *l, double slope);

#endif
