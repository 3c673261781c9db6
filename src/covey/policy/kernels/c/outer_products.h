/* Products as sums of outer products: a few rows by a few vectors are held in registers while the sum goes on. */

#pragma once

#include "lanes.h"

#define ROWS 6 /* rows by vectors that are summed in registers */
#if LANES == 16
#define VECTORS 4
#else
#define VECTORS 2
#endif

/* The sum over k of a[i, k] b[k]: steps lead from one term to the next, b's are a few vectors. */
typedef struct {
    const float *a, *b;
    int64_t a_row, a_step, b_step, count;
} Terms;

/* to = keep to + the sum, for ROWS rows of `vectors` vectors, of which `num` rows are stored. Without `keep` to = the
   sum. */
INLINE void sum_up(float *to, int64_t to_row, int64_t num, const float *keep, const Terms *t, const int vectors) {
    const float *a = t->a, *b = t->b;
    const int64_t a_row = t->a_row, a_step = t->a_step, b_step = t->b_step;
    lanes sum[ROWS][VECTORS] = {0};
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        if (keep && i < num)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] = load(to + i * to_row + LANES * j) * keep[i];
    for (int64_t k = t->count; k > 0; k--, a += a_step, b += b_step) {
        lanes line[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) line[j] = load(b + LANES * j);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += a[i * a_row] * line[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        if (i < num)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) store(to + i * to_row + LANES * j, sum[i][j]);
}

/* Functions of their own: what is inlined into much else doesn't stay in registers. */
#define SUM_UP(vectors)                                                                                               \
    static __attribute__((noinline)) void sum_up_##vectors(float *to, int64_t to_row, int64_t num, const float *keep, \
                                                           const Terms *terms) {                                      \
        sum_up(to, to_row, num, keep, terms, vectors);                                                                \
    }
SUM_UP(1)
SUM_UP(2)
#if VECTORS > 2
SUM_UP(3)
SUM_UP(4)
#endif

/* The same for any number of vectors. */
INLINE void multiply(float *to, int64_t to_row, int64_t num, const float *keep, Terms terms, int64_t vectors) {
    for (; vectors > 0; vectors -= VECTORS, to += VECTORS * LANES, terms.b += VECTORS * LANES)
        switch (smaller(vectors, VECTORS)) {
        case 1: sum_up_1(to, to_row, num, keep, &terms); break;
#if VECTORS == 2
        default: sum_up_2(to, to_row, num, keep, &terms);
#else
        case 2: sum_up_2(to, to_row, num, keep, &terms); break;
        case 3: sum_up_3(to, to_row, num, keep, &terms); break;
        default: sum_up_4(to, to_row, num, keep, &terms);
#endif
        }
}
