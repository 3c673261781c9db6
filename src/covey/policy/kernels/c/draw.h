/* Drawing one token a row from its logits, by inverting the cumulative distribution: what sampling.py does in some
   twenty operations of torch. Threads share out blocks of the vocabulary, then rows.

   A row's token depends on its logits, its uniform number and its temperature only. */

#pragma once

#include "lanes.h"

#define VOCABULARY_BLOCK 512 /* tokens whose weights are added up in float32; sums over blocks are float64 */

typedef struct {
    const float *logits;       /* rows x num_tokens */
    const double *uniforms;    /* of rows, in [0, 1), as all below */
    const float *temperatures; /* 0: the likeliest token, with the log-probability of temperature 1 */
    int64_t *tokens;
    float *logprobs;           /* natural ones, over the temperature */
    float *tops, *sums;        /* room for rows x blocks: the largest logit, and the sum of weights */
    int64_t rows, num_tokens;
} Draws;

INLINE int64_t num_blocks(const Draws *d) { return (d->num_tokens + VOCABULARY_BLOCK - 1) / VOCABULARY_BLOCK; }

/* exp, but exactly 0 where it is next to nothing: what cannot be drawn must have no weight at all. */
INLINE float weight(float logit, float most, float temperature) {
    const float x = (logit - most) / temperature;
    return x < -87.0f ? 0.0f : exponential(x);
}

INLINE float block_sum(const float *logits, int64_t count, float most, float temperature) {
    float weights[VOCABULARY_BLOCK];
    for (int64_t v = 0; v < count; v++) weights[v] = weight(logits[v], most, temperature);
    return total(weights, count);
}

/* The token of a block that `rest` of its weight falls on; the last one with any weight where rounding leaves a rest. */
INLINE int64_t find(const float *logits, int64_t count, float most, float temperature, double rest) {
    int64_t found = 0;
    double sum = 0.0;
    for (int64_t v = 0; v < count && (sum <= rest || sum == 0.0); v++) {
        const float own = weight(logits[v], most, temperature);
        sum += own;
        if (own > 0.0f) found = v;
    }
    return found;
}

INLINE float top_of(const Draws *d, int64_t row) {
    const float *tops = d->tops + row * num_blocks(d);
    return largest(tops, num_blocks(d), tops[0]);
}

INLINE float temperature_of(const Draws *d, int64_t row) {
    return d->temperatures[row] == 0.0f ? 1.0f : d->temperatures[row];
}

/* A row's token, when the sums of its blocks are there. */
INLINE void draw_row(const Draws *d, int64_t row) {
    const float *logits = d->logits + row * d->num_tokens, *sums = d->sums + row * num_blocks(d);
    const float most = top_of(d, row), temperature = temperature_of(d, row), *tops = d->tops + row * num_blocks(d);
    const int is_greedy = d->temperatures[row] == 0.0f;
    double total = 0.0, before = 0.0;
    for (int64_t b = 0; b < num_blocks(d); b++) total += sums[b];
    const double target = d->uniforms[row] * total;
    int64_t block = 0;
    for (int64_t b = 0; b < num_blocks(d); b++) {
        if (sums[b] == 0.0f) continue;
        block = b * VOCABULARY_BLOCK;
        if (is_greedy ? tops[b] == most : before + sums[b] > target) break;
        before += sums[b];
    }
    const int64_t count = smaller(VOCABULARY_BLOCK, d->num_tokens - block);
    int64_t found = 0;
    if (is_greedy)
        while (found + 1 < count && logits[block + found] != most) found++;
    else
        found = find(logits + block, count, most, temperature, target - before);
    d->tokens[row] = block + found;
    d->logprobs[row] = (float)((logits[d->tokens[row]] - most) / temperature - log(total));
}

/* What `draw_row` reads of all rows; by all threads of a parallel region. */
INLINE void sum_blocks(const Draws *d) {
    const int64_t blocks = num_blocks(d);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < d->rows * blocks; i++) {
        const int64_t first = i % blocks * VOCABULARY_BLOCK;
        const float *logits = d->logits + i / blocks * d->num_tokens + first;
        d->tops[i] = largest(logits, smaller(VOCABULARY_BLOCK, d->num_tokens - first), logits[0]);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < d->rows * blocks; i++) {
        const int64_t row = i / blocks, first = i % blocks * VOCABULARY_BLOCK;
        d->sums[i] = block_sum(d->logits + row * d->num_tokens + first, smaller(VOCABULARY_BLOCK, d->num_tokens - first),
                               top_of(d, row), temperature_of(d, row));
    }
}

/* By all threads of a parallel region. */
INLINE void draw_rows(const Draws *d) {
    sum_blocks(d);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < d->rows; row++) draw_row(d, row);
}
