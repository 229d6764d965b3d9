/* trace_chart: see trace_chart.h. Its own white ground and dark ink make it readable on light and dark pages; series differ in colour (Okabe and
 * Ito's, told apart by most eyes), mark and dash; each line is named in the legend in the order of its last value. */
#include "cli/trace_chart.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>

enum { WIDTH = 760, HEIGHT = 440, LEFT = 70, RIGHT = 150, TOP = 50, BOTTOM = 60 };

static const struct {
    const char *colour, *dash;
} STYLES[CHART_SERIES_MAX] = {
    {"#0072b2", ""},    {"#d55e00", "7 4"}, {"#009e73", "2 3"}, {"#555555", "10 3 2 3"},
    {"#cc79a7", "5 2"}, {"#e69f00", "8 2"}, {"#56b4e9", "3 3"}, {"#000000", "1 2"},
};

static double place_x(const struct chart *c, double x)
{
    double low = log(c->x[0]), high = log(c->x[c->point_count - 1]);
    double part = high > low ? (log(x) - low) / (high - low) : 0.5;
    return LEFT + 20 + part * (WIDTH - LEFT - RIGHT - 40);
}

static double place_y(double y, double top)
{
    return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM);
}

static void write_axes(FILE *f, const struct chart *c, double top, double step)
{
    for (double y = 0; y <= top + 1e-9; y += step) {
        double at = place_y(y, top);
        fprintf(f, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"%s\"/>\n", LEFT, at,
                WIDTH - RIGHT, at, y > 0 ? "#dddddd" : "#222222");
        fprintf(f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT - 8, at + 4, y);
    }
    for (size_t i = 0; i < c->point_count; i++) {
        double at = place_x(c, c->x[i]);
        fprintf(f, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#222222\"/>\n", at,
                HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 5);
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%g</text>\n", at, HEIGHT - BOTTOM + 20,
                c->x[i]);
    }
    fprintf(f, "<text x=\"%d\" y=\"26\" font-size=\"16\" font-weight=\"bold\">%s</text>\n", LEFT, c->title);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 16, c->x_label);
    fprintf(f, "<text transform=\"translate(20 %d) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
            (TOP + HEIGHT - BOTTOM) / 2, c->y_label);
}

static void write_mark(FILE *f, size_t series, double x, double y)
{
    const char *colour = STYLES[series].colour;
    if (series % 4 == 0)
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\" fill=\"%s\"/>\n", x, y, colour);
    else if (series % 4 == 1)
        fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"8\" fill=\"%s\"/>\n", x - 4, y - 4,
                colour);
    else if (series % 4 == 2)
        fprintf(f, "<path d=\"M%.1f %.1fl5 9h-10z\" fill=\"%s\"/>\n", x, y - 6, colour);
    else
        fprintf(f, "<path d=\"M%.1f %.1fl5 5l-5 5l-5 -5z\" fill=\"%s\"/>\n", x, y - 5, colour);
}

static void write_line(FILE *f, size_t series, const double *x, const double *y, size_t count)
{
    fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2.2\" stroke-dasharray=\"%s\" points=\"",
            STYLES[series].colour, STYLES[series].dash);
    for (size_t i = 0; i < count; i++)
        fprintf(f, "%.1f,%.1f ", x[i], y[i]);
    fprintf(f, "\"/>\n");
    for (size_t i = 0; i < count; i++)
        write_mark(f, series, x[i], y[i]);
}

static void write_series(FILE *f, const struct chart *c, double top)
{
    for (size_t s = 0; s < c->series_count; s++) {
        double x[CHART_POINTS_MAX], y[CHART_POINTS_MAX], rank = 0;
        for (size_t i = 0; i < c->point_count; i++) {
            x[i] = place_x(c, c->x[i]);
            y[i] = place_y(c->y[s][i], top);
        }
        write_line(f, s, x, y, c->point_count);
        for (size_t other = 0; other < c->series_count; other++) {
            double mine = c->y[s][c->point_count - 1], theirs = c->y[other][c->point_count - 1];
            rank += theirs > mine || (theirs == mine && other < s);
        }
        double key_x[2] = {WIDTH - RIGHT + 12, WIDTH - RIGHT + 44}, key_y[2];
        key_y[0] = key_y[1] = TOP + 14 + 24 * rank;
        write_line(f, s, key_x, key_y, 2);
        fprintf(f, "<text x=\"%d\" y=\"%.1f\">%s</text>\n", WIDTH - RIGHT + 56, key_y[0] + 4, c->names[s]);
    }
}

int trace_chart_write(const struct chart *c, const char *path, struct td_error *err)
{
    double highest = 0, step = 10;
    for (size_t s = 0; s < c->series_count; s++)
        for (size_t i = 0; i < c->point_count; i++)
            highest = TD_MAX(highest, c->y[s][i]);
    if (highest <= 40)
        step = 5;
    double top = TD_MAX(ceil(highest / step) * step, step);
    FILE *f = fopen(path, "w");
    if (!f)
        return td_fail(err, -TD_ERR_IO, "cannot write chart %s: %s", path, strerror(errno));
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#222222\">\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT);
    fprintf(f, "<title>%s</title>\n<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", c->title, WIDTH,
            HEIGHT);
    write_axes(f, c, top, step);
    write_series(f, c, top);
    fprintf(f, "</svg>\n");
    bool good = !ferror(f);
    good = fclose(f) == 0 && good;
    return good ? 0 : td_fail(err, -TD_ERR_IO, "cannot write chart %s: %s", path, strerror(errno));
}
