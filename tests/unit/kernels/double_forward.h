/* double_forward: a Llama model in double precision, from the values that its weights stand for: what every engine is measured
 * against. Written as plainly as can be; nothing is rounded but the weights as they are stored. */
#ifndef TANDEM_TESTS_KERNELS_DOUBLE_FORWARD_H
#define TANDEM_TESTS_KERNELS_DOUBLE_FORWARD_H
#include "kernels/cpu/blocks.h"
#include "kernels/model.h"
#include <math.h>
#include <stdlib.h>

struct double_matrix {
    uint32_t rows, columns;
    float *values;
};

static inline struct double_matrix double_matrix_of(const struct weight *w)
{
    struct double_matrix m = {w->rows, w->columns, malloc(sizeof(float) * w->rows * w->columns)};
    for (uint32_t r = 0; r < w->rows; r++)
        weight_row_to_f32(w->type, (const uint8_t *)w->data + weight_row_size(w->type, w->columns) * r, 0,
                          w->columns, m.values + (size_t)r * w->columns);
    return m;
}

static inline void double_product(const struct double_matrix *m, const double *x, double *out)
{
    for (uint32_t r = 0; r < m->rows; r++) {
        double sum = 0;
        for (uint32_t c = 0; c < m->columns; c++)
            sum += (double)m->values[(size_t)r * m->columns + c] * x[c];
        out[r] = sum;
    }
}

static inline void double_norm(const double *x, const struct weight *w, double eps, uint32_t count,
                               double *out)
{
    const float *weight = w->data;
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    for (uint32_t i = 0; i < count; i++)
        out[i] = x[i] / sqrt(sum / count + eps) * (double)weight[i];
}

static inline void double_rotate(double *head, const struct model_params *p, uint32_t position)
{
    uint32_t half = p->rope_dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        double angle = position * pow((double)p->rope_base, -2.0 * i / p->rope_dim);
        uint32_t a = p->rope_kind == ROPE_INTERLEAVED ? 2 * i : i,
                 b = p->rope_kind == ROPE_INTERLEAVED ? 2 * i + 1 : i + half;
        double x = head[a], y = head[b];
        head[a] = x * cos(angle) - y * sin(angle), head[b] = x * sin(angle) + y * cos(angle);
    }
}

/* out: [head_dim] of one head; keys and values: [token][stride] of its KV head. */
static inline void double_attend(const double *q, const double *keys, const double *values, uint32_t tokens,
                                 size_t stride, uint32_t head_dim, double *out)
{
    double *score = malloc(sizeof *score * tokens), most = -1e300, sum = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        score[t] = 0;
        for (uint32_t d = 0; d < head_dim; d++)
            score[t] += q[d] * keys[t * stride + d] / sqrt(head_dim);
        most = fmax(most, score[t]);
    }
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] = 0;
    for (uint32_t t = 0; t < tokens; t++) {
        double e = exp(score[t] - most);
        sum += e;
        for (uint32_t d = 0; d < head_dim; d++)
            out[d] += e * values[t * stride + d];
    }
    for (uint32_t d = 0; d < head_dim; d++)
        out[d] /= sum;
    free(score);
}

/* x: [count][embd], rows of one sequence from position 0, through one layer. */
static inline void double_layer(const struct model *m, const struct model_layer *l, uint32_t count, double *x)
{
    const struct model_params *p = &m->params;
    uint32_t embd = p->embd_size, dim = p->head_dim, q_size = p->head_count * dim,
             kv = p->kv_head_count * dim, ffn = p->ffn_size;
    struct double_matrix w[] = {double_matrix_of(&l->wq),     double_matrix_of(&l->wk),
                                double_matrix_of(&l->wv),     double_matrix_of(&l->wo),
                                double_matrix_of(&l->w_gate), double_matrix_of(&l->w_up),
                                double_matrix_of(&l->w_down)};
    double *keys = malloc(sizeof *keys * count * kv), *values = malloc(sizeof *values * count * kv),
           *act = malloc(sizeof *act * embd), *q = malloc(sizeof *q * q_size),
           *mixed = malloc(sizeof *mixed * q_size), *gate = malloc(sizeof *gate * ffn),
           *up = malloc(sizeof *up * ffn);
    for (uint32_t t = 0; t < count; t++) {
        double *row = x + (size_t)t * embd, *k = keys + (size_t)t * kv;
        double_norm(row, &l->attn_norm, (double)p->norm_eps, embd, act);
        double_product(&w[0], act, q), double_product(&w[1], act, k);
        double_product(&w[2], act, values + (size_t)t * kv);
        for (uint32_t h = 0; h < p->kv_head_count; h++)
            double_rotate(k + h * dim, p, t);
        for (uint32_t h = 0; h < p->head_count; h++) {
            size_t at = (size_t)(h / (p->head_count / p->kv_head_count)) * dim;
            double_rotate(q + h * dim, p, t);
            double_attend(q + h * dim, keys + at, values + at, t + 1, kv, dim, mixed + h * dim);
        }
        double_product(&w[3], mixed, act);
        for (uint32_t i = 0; i < embd; i++)
            row[i] += act[i];
        double_norm(row, &l->ffn_norm, (double)p->norm_eps, embd, act);
        double_product(&w[4], act, gate), double_product(&w[5], act, up);
        for (uint32_t i = 0; i < ffn; i++)
            gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        double_product(&w[6], gate, act);
        for (uint32_t i = 0; i < embd; i++)
            row[i] += act[i];
    }
    for (size_t i = 0; i < sizeof w / sizeof *w; i++)
        free(w[i].values);
    free(keys), free(values), free(act), free(q), free(mixed), free(gate), free(up);
}

/* logits: [count][vocab_count] of ids from position 0. */
static inline void double_forward(const struct model *m, const int32_t *ids, uint32_t count, double *logits)
{
    const struct model_params *p = &m->params;
    struct double_matrix embed = double_matrix_of(&m->embed), head = double_matrix_of(&m->output);
    double *x = malloc(sizeof *x * count * p->embd_size), *act = malloc(sizeof *act * p->embd_size);
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t i = 0; i < p->embd_size; i++)
            x[(size_t)t * p->embd_size + i] = (double)embed.values[(size_t)ids[t] * p->embd_size + i];
    for (uint32_t layer = 0; layer < p->layer_count; layer++)
        double_layer(m, &m->layers[layer], count, x);
    for (uint32_t t = 0; t < count; t++) {
        double_norm(x + (size_t)t * p->embd_size, &m->output_norm, (double)p->norm_eps, p->embd_size, act);
        double_product(&head, act, logits + (size_t)t * p->vocab_count);
    }
    free(embed.values), free(head.values), free(x), free(act);
}

#endif
