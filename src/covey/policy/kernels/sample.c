/* Drawing one token a row from its logits, by inverting the cumulative distribution: what sampling.py does in some
   twenty operations of torch, in two passes over the logits and a look into one block. compiled.py calls covey_sample.

   A row's token depends on its logits and its uniform number only. */

#include "lanes.h"

#define BLOCK 512 /* tokens whose weights are added up in float32; sums over blocks are float64 */

/* exp, but exactly 0 where it is next to nothing: what cannot be drawn must have no weight at all. */
INLINE float weight(float logit, float most, float temperature) {
    const float x = (logit - most) / temperature;
    return x < -87.0f ? 0.0f : exponential(x);
}

INLINE float block_sum(const float *logits, int64_t count, float most, float temperature) {
    float weights[BLOCK];
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

INLINE void draw(const float *logits, int64_t num_tokens, float temperature, double uniform, int64_t *token,
                 float *logprob) {
    const float most = largest(logits, num_tokens, logits[0]);
    const int64_t num_blocks = (num_tokens + BLOCK - 1) / BLOCK;
    float sums[num_blocks];
    double total = 0.0;
    for (int64_t b = 0; b < num_blocks; b++) {
        sums[b] = block_sum(logits + b * BLOCK, smaller(BLOCK, num_tokens - b * BLOCK), most, temperature);
        total += sums[b];
    }
    const double target = uniform * total;
    double before = 0.0;
    int64_t block = 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        if (sums[b] == 0.0f) continue;
        block = b * BLOCK;
        if (before + sums[b] > target) break;
        before += sums[b];
    }
    *token = block + find(logits + block, smaller(BLOCK, num_tokens - block), most, temperature, target - before);
    *logprob = (float)((logits[*token] - most) / temperature - log(total));
}

/* Tokens and natural log-probabilities of rows of logits over a temperature > 0, given a number in [0, 1) for each. */
void covey_sample(const float *logits, const double *uniforms, int64_t *tokens, float *logprobs, int64_t rows,
                  int64_t num_tokens, float temperature, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < rows; row++)
        draw(logits + row * num_tokens, num_tokens, temperature, uniforms[row], tokens + row, logprobs + row);
}
