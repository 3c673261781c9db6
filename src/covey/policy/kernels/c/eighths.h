/* Products of numbers of eight bits: weights have a scale for each output, what they are multiplied with one for each
   SPAN inputs of a row. Sums of a span are whole numbers, the same on any processor; spans are added as floats, in order.

   Weights are stored with 128 added, as the instruction for them wants (VNNI), FOUR inputs of an output side by side.
   What works on panels is for layer.c, which has them. */

#pragma once

#include "lanes.h"

#define FOUR 4
#define SPAN 32 /* inputs of one scale */
#define SHIFT 128
#define MOST 127.0f
#define MOST_ROUNDED 256 /* weights that are rounded together */
#if LANES == 16
#define WHOLE(x) (ints)_mm512_cvtps_epi32(x)
#define PAIRED(a, b) (ints)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#else
#define WHOLE(x) (ints)_mm256_cvtps_epi32(x)
#define PAIRED(a, b) (ints)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#endif
#define EIGHTH_ROWS (LANES / 2) /* rows whose whole sums are in registers */

/* How many inputs are stored. */
INLINE int64_t spanned(int64_t inner) { return (inner + SPAN - 1) / SPAN * SPAN; }

/* Bytes of a row: its numbers, and for each span a scale and what the added 128 make too much. */
INLINE int64_t eighths_stride(int64_t inner) { return spanned(inner) + 2 * FOUR * (spanned(inner) / SPAN); }

/* The scale of numbers; one that is not finite makes it NaN. */
INLINE float scale_of(const float *x, int64_t count) {
    lanes most = {0}, poison = {0};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) {
        const lanes own = load(x + c);
        most = larger_of((lanes)((words)own & 0x7fffffff), most);
        poison += own * 0.0f;
    }
    float tail = 0.0f, not_finite = sum_of(poison);
    for (; c < count; c++) {
        tail = fabsf(x[c]) > tail ? fabsf(x[c]) : tail;
        not_finite += x[c] * 0.0f;
    }
    return largest((const float *)&most, LANES, tail) / MOST + not_finite;
}

typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* to = x / scale, rounded, + shift, for whole vectors; returns the sum of them. */
INLINE int32_t round_numbers(const float *x, int64_t count, float scale, int32_t shift, uint8_t *to) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const lanes most = MOST - (lanes){0};
    ints sum = {0};
    for (int64_t c = 0; c < count; c += LANES) {
        const lanes own = load(x + c) * inverse;
        const ints number = WHOLE(chosen(own > most, most, larger_of(own, -most)));
        const bytes stored = __builtin_convertvector(number + shift, bytes);
        memcpy(to + c, &stored, sizeof stored);
        sum += number;
    }
    return (int32_t)sum_of(__builtin_convertvector(sum, lanes));
}

INLINE void round_row(const float *x, int64_t inner, uint8_t *row) {
    const int64_t stored = spanned(inner), spans = stored / SPAN;
    float *scales = (float *)(row + stored);
    int32_t *surplus = (int32_t *)(row + stored) + spans;
    for (int64_t s = 0; s < spans; s++) {
        float padded[SPAN] = {0};
        memcpy(padded, x + s * SPAN, (size_t)smaller(SPAN, inner - s * SPAN) * sizeof(float));
        scales[s] = scale_of(padded, SPAN);
        surplus[s] = -SHIFT * round_numbers(padded, SPAN, scales[s], 0, row + s * SPAN);
    }
}

/* sum + four weights of each output times four numbers of a row, which all lanes of `four` hold. */
#if defined(__AVX512VNNI__) && LANES == 16
INLINE ints dot(ints sum, ints weights, ints four) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)four);
}
#elif defined(__AVXVNNI__) && LANES == 8
INLINE ints dot(ints sum, ints weights, ints four) {
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)four);
}
#else
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t places __attribute__((vector_size(4 * LANES)));

/* Bytes of even places and of odd ones as numbers of sixteen bits, whose products are added in pairs, exactly. */
INLINE ints dot(ints sum, ints weights, ints four) {
    const shorts even = (shorts)((places)weights & 255), odd = (shorts)((places)weights >> 8);
    return sum + PAIRED(even, (shorts)((places)four << 8) >> 8) + PAIRED(odd, (shorts)four >> 8);
}
#endif

#ifdef PANEL
/* Sums of the first `num` rows at x, `last` + 1 of them, as in layer.c. */
INLINE void multiply_eighths(const uint8_t *x, int64_t inner, int64_t last, const uint8_t *panel, Ahead ahead,
                             lanes out[][VECTORS], const int num) {
    const int64_t stored = spanned(inner), spans = stored / SPAN, stride = eighths_stride(inner);
    const uint8_t *row[EIGHTH_ROWS];
    lanes sum[EIGHTH_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < num; r++) {
        row[r] = x + smaller(r, last) * stride;
        for (int v = 0; v < VECTORS; v++) sum[r][v] = (lanes){0};
    }
    for (int64_t s = 0; s < spans; s++) {
        ints whole[EIGHTH_ROWS][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < num; r++)
            for (int v = 0; v < VECTORS; v++)
                whole[r][v] = ((const int32_t *)(row[r] + stored))[spans + s] - (ints){0};
#pragma GCC unroll 8
        for (int64_t i = 0; i < SPAN / FOUR; i++) {
            const uint8_t *from = panel + (s * SPAN / FOUR + i) * FOUR * PANEL;
            ints weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) memcpy(&weights[v], from + v * FOUR * LANES, sizeof weights[v]);
            fetch_ahead(ahead, s * SPAN / FOUR + i);
#pragma GCC unroll 8
            for (int r = 0; r < num; r++) {
                const ints four = (ints)everywhere(row[r] + s * SPAN + i * FOUR);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) whole[r][v] = dot(whole[r][v], weights[v], four);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < num; r++) {
            const float scale = ((const float *)(row[r] + stored))[s];
            for (int v = 0; v < VECTORS; v++) sum[r][v] += scale * __builtin_convertvector(whole[r][v], lanes);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num; r++)
        for (int v = 0; v < VECTORS; v++) out[r][v] = sum[r][v];
}

#define MULTIPLY_EIGHTHS(num)                                                                                         \
    static __attribute__((noinline)) void multiply_eighths_##num(const uint8_t *x, int64_t inner, int64_t last,       \
                                                                 const uint8_t *panel, Ahead ahead,                   \
                                                                 lanes out[][VECTORS]) {                              \
        multiply_eighths(x, inner, last, panel, ahead, out, num);                                                            \
    }
MULTIPLY_EIGHTHS(1)
MULTIPLY_EIGHTHS(2)
MULTIPLY_EIGHTHS(4)
MULTIPLY_EIGHTHS(EIGHTH_ROWS)

/* Weights (outer x inner) in panels, with the scale of each output. */
INLINE void pack_eighths(const float *weight, uint8_t *panels, float *scales, int64_t inner, int64_t outer,
                         int64_t num_threads) {
    const int64_t stored = spanned(inner);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t first = 0; first < outer; first += PANEL) {
        uint8_t *to = panels + first * stored, rounded[MOST_ROUNDED];
        float padded[MOST_ROUNDED];
        memset(to, SHIFT, (size_t)(PANEL * stored));
        for (int64_t o = first; o < smaller(first + PANEL, outer); o++) {
            const float *from = weight + o * inner;
            scales[o] = scale_of(from, inner);
            for (int64_t i = 0; i < inner; i += MOST_ROUNDED) {
                const int64_t count = smaller(MOST_ROUNDED, inner - i);
                memset(padded, 0, sizeof padded);
                memcpy(padded, from + i, (size_t)count * sizeof(float));
                round_numbers(padded, MOST_ROUNDED, scales[o], SHIFT, rounded);
                for (int64_t c = 0; c < count; c += FOUR)
                    memcpy(to + (i + c) * PANEL + (o - first) * FOUR, rounded + c, FOUR);
            }
        }
    }
}
#endif
