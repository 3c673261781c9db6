/* Products as sums of outer products: a few rows by a few vectors are held in registers while the sum goes on. */

#pragma once

#include "lanes.h"

#ifdef __AVX512F__
#define ROWS 6 /* rows by vectors that are summed in registers */
#define VECTORS 4
#else
#define ROWS 6
#define VECTORS 1
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
#if VECTORS > 1
SUM_UP(2)
SUM_UP(3)
SUM_UP(4)
#endif

/* The same for any number of vectors. */
INLINE void multiply(float *to, int64_t to_row, int64_t num, const float *keep, Terms terms, int64_t vectors) {
    for (; vectors > 0; vectors -= VECTORS, to += VECTORS * LANES, terms.b += VECTORS * LANES)
        switch (smaller(vectors, VECTORS)) {
        case 1: sum_up_1(to, to_row, num, keep, &terms); break;
#if VECTORS > 1
        case 2: sum_up_2(to, to_row, num, keep, &terms); break;
        case 3: sum_up_3(to, to_row, num, keep, &terms); break;
        default: sum_up_4(to, to_row, num, keep, &terms);
#endif
        }
}

/* Rows become columns: in four rounds, halves, quarters, eighths and sixteenths of two rows change places. */
INLINE void transpose(lanes a[LANES]) {
    lanes b[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[i] = SHUFFLE(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        b[i + 8] =
            SHUFFLE(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
        const int i = n / 4 * 8 + n % 4;
        a[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        a[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
        const int i = n / 2 * 4 + n % 2;
        b[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        b[i + 2] = SHUFFLE(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
        const int i = n * 2;
        a[i] = SHUFFLE(b[i], b[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        a[i + 1] = SHUFFLE(b[i], b[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}
