/* AdamW's step in place (arXiv 1711.05101), and the squares of a gradient: one pass over memory each. Float32, sums
   float64. adamw.py calls these functions and mirrors the struct.

   Work is shared out in blocks of a fixed size, and a block has its own sum: no bit depends on the number of threads. */

#include "lanes.h"

#define BLOCK 16384 /* numbers */

typedef struct {
    float *weight, *mean, *square; /* the moments */
    const float *gradient;
    int64_t count, first;                           /* numbers; the place of its first block among all sums */
    float factor, decay, rate, root, eps;           /* of the gradient; of the weight; of the step; of the square's root */
    float beta_1, beta_2, new_1, new_2;             /* of the moments, and of what is new in them */
} Part;

INLINE void step(const Part *given, int64_t from, int64_t to) {
    const Part own = *given, *p = &own;
    float *restrict weight = p->weight, *restrict mean = p->mean, *restrict square = p->square;
    const float *restrict gradient = p->gradient;
    for (int64_t i = from; i < to; i++) {
        const float g = gradient[i] * p->factor;
        mean[i] = mean[i] * p->beta_1 + g * p->new_1;
        square[i] = square[i] * p->beta_2 + g * g * p->new_2;
        weight[i] -= p->rate * mean[i] / (sqrtf(square[i]) * p->root + p->eps) + p->decay * weight[i];
    }
}

void covey_adamw_step(const Part *parts, int64_t num_parts, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (const Part *p = parts; p < parts + num_parts; p++) {
#pragma omp for schedule(static) nowait
        for (int64_t from = 0; from < p->count; from += BLOCK) step(p, from, smaller(from + BLOCK, p->count));
    }
}

INLINE double squares(const float *x, int64_t count) {
    double sums[2 * LANES] = {0}, sum = 0.0;
    int64_t c = 0;
    for (; c + 2 * LANES <= count; c += 2 * LANES)
        for (int i = 0; i < 2 * LANES; i++) sums[i] += (double)x[c + i] * x[c + i];
    for (; c < count; c++) sum += (double)x[c] * x[c];
    for (int i = 0; i < 2 * LANES; i++) sum += sums[i];
    return sum;
}

/* The sum of all gradients' squares; `sums` has room for a number of each block. */
double covey_squares(const Part *parts, int64_t num_parts, double *sums, int64_t num_threads) {
    double sum = 0.0;
    int64_t num_blocks = 0;
#pragma omp parallel num_threads(num_threads)
    for (const Part *p = parts; p < parts + num_parts; p++) {
#pragma omp for schedule(static) nowait
        for (int64_t from = 0; from < p->count; from += BLOCK)
            sums[p->first + from / BLOCK] = squares(p->gradient + from, smaller(BLOCK, p->count - from));
    }
    for (const Part *p = parts; p < parts + num_parts; p++) num_blocks += (p->count + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < num_blocks; block++) sum += sums[block];
    return sum;
}
