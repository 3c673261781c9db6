/* The short causal convolution of each channel over a forest of segments, forward and backward, with silu where it is
   asked for. Computed in float32 on float32 or bfloat16. recurrence/compiled.py calls these functions and mirrors
   struct Conv.

   A plan says for each token which inputs it sees: tokens, rows of a holder or nothing. Outputs and gradients of inputs
   are written by one thread each, in an order that follows from a tree alone; the weight's gradient is summed over
   blocks of the stream. So no bit depends on the number of threads. */

#include "../kernels/c/lanes.h"

#define PIECE 512 /* channels that are computed together */
#define BLOCK 32  /* tokens of a task, whose share of the weight's gradient is one sum */

typedef struct {
    const void *x;               /* tokens x channels, rows `stride` apart */
    const float *weight, *bias;  /* width x channels, oldest first; channels or NULL */
    void *out;                   /* forward: tokens x channels */
    const void *out_gradient;    /* backward: the same */
    void *of_x;                  /* backward: tokens x channels */
    float *inner;                /* backward: gradients before silu, tokens x channels */
    float *sums, *of_weight;     /* backward: blocks x (width + 1) x channels; the sum of blocks, the bias's last */
    void *held;                  /* holders x (width - 1) x channels, oldest first: those that are read */
    void *kept;                  /* and those that are written */
    const int64_t *rows, *read, *write; /* of segments: first token, length, parent; holders or NULL */
    int64_t *sources;            /* tokens x width: the plan, oldest first */
    int64_t *ends, *readers;     /* tokens + 1; tokens x width: who sees a token, as places in the plan */
    int64_t stride, num_segments, num_tokens, channels, width, has_silu, num_threads;
    int64_t half, half_held;     /* bfloat16: x, out and their gradients; held and kept */
} Conv;

#define NOTHING -1 /* a source; below it lie rows of holders */

/* The input that stands `back` tokens before a segment's first one, from 1. */
static int64_t before(const Conv *t, int64_t segment, int64_t back) {
    for (;;) {
        if (t->read && t->read[segment] >= 0)
            return NOTHING - 1 - (t->read[segment] * (t->width - 1) + t->width - 1 - back);
        segment = t->rows[3 * segment + 2];
        if (segment < 0) return NOTHING;
        const int64_t first = t->rows[3 * segment], length = t->rows[3 * segment + 1];
        if (back <= length) return first + length - back;
        back -= length;
    }
}

void covey_conv_plan(const Conv *t) {
    for (int64_t s = 0; s < t->num_segments; s++)
        for (int64_t i = 0; i < t->rows[3 * s + 1]; i++)
            for (int64_t w = 0; w < t->width; w++) {
                const int64_t back = t->width - 1 - w, token = t->rows[3 * s] + i;
                t->sources[token * t->width + w] = back <= i ? token - back : before(t, s, back - i);
            }
    if (!t->readers) return;
    const int64_t places = t->num_tokens * t->width;
    memset(t->ends, 0, 8 * (t->num_tokens + 1));
    for (int64_t p = 0; p < places; p++)
        if (t->sources[p] >= 0) t->ends[t->sources[p]]++;
    for (int64_t i = 0; i < t->num_tokens; i++) t->ends[i + 1] += t->ends[i];
    for (int64_t p = places - 1; p >= 0; p--) /* the last one first: ends become beginnings */
        if (t->sources[p] >= 0) t->readers[--t->ends[t->sources[p]]] = p;
}

/* `count` numbers of a row, where they lie if they are floats, else widened into `room`. */
INLINE const float *read(const void *from, int64_t at, int64_t count, int64_t half, float *room) {
    if (!half) return (const float *)from + at;
    for (int64_t c = 0; c < count; c++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)from)[at + c] << 16;
        memcpy(room + c, &bits, sizeof bits);
    }
    return room;
}

INLINE const float *source(const Conv *t, int64_t place, int64_t c, int64_t count, float *room) {
    const int64_t from = t->sources[place];
    if (from >= 0) return read(t->x, from * t->stride + c, count, t->half, room);
    return read(t->held, (NOTHING - 1 - from) * t->channels + c, count, t->half_held, room);
}

INLINE void give(void *to, int64_t at, int64_t count, int64_t half, const float *from) {
    if (half)
        for (int64_t c = 0; c < count; c++) ((uint16_t *)to)[at + c] = rounded(from[c]);
    else memcpy((float *)to + at, from, 4 * count);
}

/* Sums of one token before silu. */
INLINE void convolve(const Conv *t, int64_t token, int64_t c, int64_t count, float *restrict sum) {
    float room[PIECE];
    if (t->bias) memcpy(sum, t->bias + c, 4 * count);
    else memset(sum, 0, 4 * count);
    for (int64_t w = 0; w < t->width; w++) {
        if (t->sources[token * t->width + w] == NOTHING) continue;
        const float *x = source(t, token * t->width + w, c, count, room), *weight = t->weight + w * t->channels + c;
        for (int64_t i = 0; i < count; i++) sum[i] += x[i] * weight[i];
    }
}

/* Ends of less than a PIECE are computed in full: every number goes through the same instructions. */
INLINE void apply_silu(float *x) {
    for (int i = 0; i < PIECE; i++) {
        const float e = exponential(-fabsf(x[i]));
        x[i] *= (x[i] < 0.0f ? e : 1.0f) / (1.0f + e);
    }
}

/* gradient *= s * (1 + x * (1 - s)), where s is the sigmoid of x. */
INLINE void differentiate_silu(const float *x, float *gradient) {
    for (int i = 0; i < PIECE; i++) {
        const float e = exponential(-fabsf(x[i])), most = 1.0f / (1.0f + e), least = e * most;
        const float s = x[i] < 0.0f ? least : most, rest = x[i] < 0.0f ? most : least;
        gradient[i] *= s * (1.0f + x[i] * rest);
    }
}

/* The newest inputs of a segment to its holder. Those that it has of the holder itself move forward. */
static void keep(const Conv *t, int64_t segment) {
    if (t->write[segment] < 0) return;
    const int64_t last = t->rows[3 * segment] + t->rows[3 * segment + 1] - 1;
    for (int64_t w = 1; w < t->width; w++)
        for (int64_t c = 0; c < t->channels; c += PIECE) {
            const int64_t count = smaller(PIECE, t->channels - c), place = last * t->width + w;
            float room[PIECE] = {0}, nothing[PIECE] = {0};
            const float *from = t->sources[place] == NOTHING ? nothing : source(t, place, c, count, room);
            give(t->kept, (t->write[segment] * (t->width - 1) + w - 1) * t->channels + c, count, t->half_held, from);
        }
}

void covey_conv(const Conv *t) {
#pragma omp parallel num_threads(t->num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < t->num_tokens; block += BLOCK)
            for (int64_t c = 0; c < t->channels; c += PIECE)
                for (int64_t token = block; token < smaller(block + BLOCK, t->num_tokens); token++) {
                    const int64_t count = smaller(PIECE, t->channels - c);
                    float sum[PIECE] = {0};
                    convolve(t, token, c, count, sum);
                    if (t->has_silu) apply_silu(sum);
                    give(t->out, token * t->channels + c, count, t->half, sum);
                }
#pragma omp for schedule(static)
        for (int64_t segment = 0; segment < (t->write ? t->num_segments : 0); segment++) keep(t, segment);
    }
}

/* Gradients before silu of one token, and its share of the weight's. */
INLINE void backward_token(const Conv *t, int64_t token, int64_t c, int64_t count, float *sums) {
    float gradient[PIECE] = {0}, sum[PIECE] = {0}, room[PIECE];
    memcpy(gradient, read(t->out_gradient, token * t->channels + c, count, t->half, room), 4 * count);
    if (t->has_silu) {
        convolve(t, token, c, count, sum);
        differentiate_silu(sum, gradient);
    }
    memcpy(t->inner + token * t->channels + c, gradient, 4 * count);
    for (int64_t w = 0; w < t->width; w++) {
        if (t->sources[token * t->width + w] == NOTHING) continue;
        const float *x = source(t, token * t->width + w, c, count, room);
        float *restrict of_weight = sums + w * t->channels + c;
        for (int64_t i = 0; i < count; i++) of_weight[i] += x[i] * gradient[i];
    }
    for (int64_t i = 0; i < count; i++) sums[t->width * t->channels + c + i] += gradient[i];
}

/* The gradient of a token's input: what all that see it have for it. */
INLINE void gather_token(const Conv *t, int64_t token, int64_t c, int64_t count) {
    float sum[PIECE] = {0};
    for (int64_t r = t->ends[token]; r < t->ends[token + 1]; r++) {
        const int64_t reader = t->readers[r] / t->width, w = t->readers[r] % t->width;
        const float *gradient = t->inner + reader * t->channels + c, *weight = t->weight + w * t->channels + c;
        for (int64_t i = 0; i < count; i++) sum[i] += gradient[i] * weight[i];
    }
    give(t->of_x, token * t->channels + c, count, t->half, sum);
}

void covey_conv_backward(const Conv *t) {
    const int64_t blocks = (t->num_tokens + BLOCK - 1) / BLOCK, size = (t->width + 1) * t->channels;
#pragma omp parallel num_threads(t->num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            memset(t->sums + block * size, 0, 4 * size);
            for (int64_t c = 0; c < t->channels; c += PIECE)
                for (int64_t token = block * BLOCK; token < smaller((block + 1) * BLOCK, t->num_tokens); token++)
                    backward_token(t, token, c, smaller(PIECE, t->channels - c), t->sums + block * size);
        }
#pragma omp for schedule(static)
        for (int64_t block = 0; block < t->num_tokens; block += BLOCK)
            for (int64_t c = 0; c < t->channels; c += PIECE)
                for (int64_t token = block; token < smaller(block + BLOCK, t->num_tokens); token++)
                    gather_token(t, token, c, smaller(PIECE, t->channels - c));
#pragma omp for schedule(static)
        for (int64_t c = 0; c < size; c++) {
            float sum = 0.0f;
            for (int64_t block = 0; block < blocks; block++) sum += t->sums[block * size + c];
            t->of_weight[c] = sum;
        }
    }
}
