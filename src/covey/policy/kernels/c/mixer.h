/* Layers with a state in decoding: of one new token a row, a causal convolution of what was projected, a gated linear
   recurrence (recurrence/base.py) and a gated norm. Each part may be absent.

   A row's numbers depend on nothing but the row: not on its neighbours, the number of threads, or the order of the work.
   Sums are float32. mixers.py mirrors struct Mixer. */

#pragma once

#include "lanes.h"

#define CHANNELS 256 /* channels that are convolved together */
#define NORM_EPS 1e-6f /* added to the squared norm of queries and keys */

typedef struct {
    const float *weight, *bias;        /* of the convolution: width x channels; channels, or NULL */
    const float *decay, *shift, *skip; /* of heads: the rate's factor, what is added to its logit, D or NULL */
    const float *norm;                 /* of values of all heads, or NULL */
    int64_t channels, width, silu;
    int64_t convolved, factor, gate;   /* columns of what was projected: what is convolved, what it is multiplied with
                                          before (-1: nothing), what gates the end (-1: nothing) */
    int64_t rate, beta;                /* columns of the rate's logit, and of the delta rule's (-1: no delta rule) */
    int64_t query, key, value;         /* of what was convolved */
    int64_t num_keys, num_heads, key_width, value_width; /* no heads: no recurrence */
    int64_t norm_width, gates_first, gate_silu;
    float eps, least, most;            /* of the norm; bounds of the rate without delta rule */
    float beta_scale;                  /* of the delta rule's rate */
} Mixer;

typedef struct {
    float *inputs; /* rows x (width - 1) x channels, oldest first */
    float *states; /* rows x heads x key width x value width */
} Held;

INLINE float logistic(float x) {
    const float e = exponential(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* mixed: what some channels of a row become; the oldest input gives way to the new one. */
INLINE void convolve(const Mixer *m, const float *row, float *inputs, float *out, int64_t from, int64_t to) {
    const int64_t count = to - from, last = m->width - 1;
    const float *given = row + m->convolved + from, *factor = row + m->factor + from;
    float x[CHANNELS], sum[CHANNELS];
    for (int64_t c = 0; c < count; c++) x[c] = given[c];
    if (m->factor >= 0)
        for (int64_t c = 0; c < count; c++) x[c] *= factor[c];
    for (int64_t c = 0; c < count; c++) sum[c] = m->bias ? m->bias[from + c] : 0.0f;
    for (int64_t w = 0; w <= last; w++) {
        const float *weight = m->weight + w * m->channels + from;
        const float *input = w < last ? inputs + w * m->channels + from : x;
        for (int64_t c = 0; c < count; c++) sum[c] += weight[c] * input[c];
    }
    for (int64_t w = 0; w < last; w++)
        memcpy(inputs + w * m->channels + from, w + 1 < last ? inputs + (w + 1) * m->channels + from : x,
               (size_t)count * sizeof(float));
    if (m->silu)
        for (int64_t c = 0; c < count; c++) sum[c] *= logistic(sum[c]);
    memcpy(out + from, sum, (size_t)count * sizeof(float));
}

INLINE float squares(const float *x, int64_t width) {
    float sum = 0.0f;
    for (int64_t c = 0; c < width; c++) sum += x[c] * x[c];
    return sum;
}

/* What the keys' rows of a state see, `num` vectors of it from number c on. */
INLINE void see(const float *key, const float *state, int64_t keys, int64_t width, int64_t c, lanes seen[], const int num) {
    lanes sum[4] = {{0}};
    for (int64_t n = 0; n < keys; n++)
        for (int v = 0; v < num; v++) sum[v] += key[n] * load(state + n * width + c + v * LANES);
    for (int v = 0; v < num; v++) seen[v] = sum[v];
}

/* state = kept * state + key * more; sum = query * state; of `num` vectors from number c on. */
INLINE void change(const float *query, const float *key, float kept, const lanes more[], float *state, int64_t keys,
                   int64_t width, int64_t c, lanes out[], const int num) {
    lanes sum[4] = {{0}};
    for (int64_t n = 0; n < keys; n++)
        for (int v = 0; v < num; v++) {
            const lanes next = kept * load(state + n * width + c + v * LANES) + key[n] * more[v];
            store(state + n * width + c + v * LANES, next);
            sum[v] += query[n] * next;
        }
    for (int v = 0; v < num; v++) out[v] = sum[v];
}

/* out: of one head of one row. */
INLINE void recur(const Mixer *m, const float *row, const float *mixed, float *state, int64_t head, float *out) {
    const int64_t keys = m->key_width, width = m->value_width, shared = head / (m->num_heads / m->num_keys);
    const float *query = mixed + m->query + shared * keys, *key = mixed + m->key + shared * keys;
    const float *value = mixed + m->value + head * width;
    const int is_delta = m->beta >= 0;
    float rate = softplus(row[m->rate + head] + m->shift[head]), scale = 1.0f, key_scale = 1.0f, beta = 0.0f;
    if (!is_delta) rate = rate < m->least ? m->least : rate > m->most ? m->most : rate;
    const float kept = expf(m->decay[head] * rate);
    if (is_delta) {
        scale = 1.0f / (sqrtf(squares(query, keys) + NORM_EPS) * sqrtf((float)keys));
        key_scale = 1.0f / sqrtf(squares(key, keys) + NORM_EPS);
        beta = m->beta_scale * logistic(row[m->beta + head]);
    }
    const int num = width % (4 * LANES) ? 1 : 4; /* vectors at a time; a sum is the same for either */
    for (int64_t c = 0; c < width; c += num * LANES) {
        lanes more[4] = {{0}}, sum[4];
        if (is_delta) num == 4 ? see(key, state, keys, width, c, more, 4) : see(key, state, keys, width, c, more, 1);
        for (int v = 0; v < num; v++) {
            const lanes own = load(value + c + v * LANES);
            more[v] = is_delta ? key_scale * beta * (own - kept * key_scale * more[v]) : rate * own;
        }
        num == 4 ? change(query, key, kept, more, state, keys, width, c, sum, 4)
                 : change(query, key, kept, more, state, keys, width, c, sum, 1);
        for (int v = 0; v < num; v++) {
            sum[v] *= scale;
            if (m->skip) sum[v] += m->skip[head] * load(value + c + v * LANES);
            store(out + c + v * LANES, sum[v]);
        }
    }
}

/* out: gated and normed, `width` numbers of a row. */
INLINE void finish(const Mixer *m, const float *row, float *out, int64_t width) {
    const float *gate = row + m->gate;
    const int gates = m->gate >= 0;
    if (gates && m->gates_first)
        for (int64_t c = 0; c < width; c++) out[c] *= m->gate_silu ? gate[c] * logistic(gate[c]) : gate[c];
    for (int64_t from = 0; m->norm && from < width; from += m->norm_width) {
        const float root = 1.0f / sqrtf(squares(out + from, m->norm_width) / (float)m->norm_width + m->eps);
        for (int64_t c = from; c < from + m->norm_width; c++) out[c] = m->norm[c] * (out[c] * root);
    }
    if (gates && !m->gates_first)
        for (int64_t c = 0; c < width; c++) out[c] *= m->gate_silu ? gate[c] * logistic(gate[c]) : gate[c];
}

/* out: rows x (heads x value width, or channels), rows `out_stride` apart, from what was projected, `stride` numbers a
   row; `mixed` has room for rows x channels. Shared out among the threads. */
INLINE void mix_rows(const Mixer *m, const Held *held, const float *projected, int64_t stride, float *mixed, float *out,
                     int64_t out_stride, int64_t rows) {
    const int64_t width = m->num_heads ? m->num_heads * m->value_width : m->channels, inputs = (m->width - 1) * m->channels;
    float *to = m->num_heads ? mixed : out;
    const int64_t to_stride = m->num_heads ? m->channels : out_stride;
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t from = 0; from < m->channels; from += CHANNELS)
            convolve(m, projected + row * stride, held->inputs + row * inputs, to + row * to_stride, from,
                     smaller(from + CHANNELS, m->channels));
    if (m->num_heads) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < m->num_heads; head++)
                recur(m, projected + row * stride, mixed + row * m->channels,
                      held->states + (row * m->num_heads + head) * m->key_width * m->value_width, head,
                      out + row * out_stride + head * m->value_width);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) finish(m, projected + row * stride, out + row * out_stride, width);
}
