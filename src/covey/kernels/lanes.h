/* What all sources here compute with: vectors of sixteen floats, and numbers stored as float32 or bfloat16.

   `half` says which of the two; it is a constant wherever it matters, so that nothing is decided in a loop. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* exp for x <= 0, to 2e-7; Cephes' polynomial. NaN stays NaN. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* The sums of 16 vectors as one vector: pairs of halves, of quarters, of eighths, of sixteenths. */
INLINE lanes sums(const lanes a[LANES]) {
    lanes b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = SHUFFLE(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        c[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        d[i] = SHUFFLE(c[i], c[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(c[i], c[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(d[0], d[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(d[0], d[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

/* Parts of a vector that change places. */
#define HALVES 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define QUARTERS 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define EIGHTHS 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define SIXTEENTHS 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14

INLINE float sum_of(lanes a) {
    a += SHUFFLE(a, a, HALVES);
    a += SHUFFLE(a, a, QUARTERS);
    a += SHUFFLE(a, a, EIGHTHS);
    a += SHUFFLE(a, a, SIXTEENTHS);
    return a[0];
}

INLINE lanes chosen(ints mask, lanes yes, lanes no) { return (lanes)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE lanes larger_of(lanes a, lanes b) { return chosen(a > b, a, b); }

/* The sum of numbers, sixteen sums side by side and then the rest: the order is the same wherever it is inlined. */
INLINE float total(const float *x, int64_t count) {
    lanes sum = {0};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) sum += load(x + c);
    float rest = 0.0f;
    for (; c < count; c++) rest += x[c];
    return sum_of(sum) + rest;
}

INLINE float total_of_squares(const float *x, int64_t count) {
    lanes sum = {0};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) sum += load(x + c) * load(x + c);
    float rest = 0.0f;
    for (; c < count; c++) rest += x[c] * x[c];
    return sum_of(sum) + rest;
}

/* The largest of numbers and `most`; what is NaN is passed over. */
INLINE float largest(const float *x, int64_t count, float most) {
    lanes found = most - (lanes){0};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) found = larger_of(load(x + c), found);
    found = larger_of(found, SHUFFLE(found, found, HALVES));
    found = larger_of(found, SHUFFLE(found, found, QUARTERS));
    found = larger_of(found, SHUFFLE(found, found, EIGHTHS));
    most = found[0] > found[1] ? found[0] : found[1];
    for (; c < count; c++) most = x[c] > most ? x[c] : most;
    return most;
}

/* A bfloat16 is the upper half of a float. */
INLINE lanes widened(halves value) { return (lanes)(__builtin_convertvector(value, words) << 16); }

/* To the nearest bfloat16, the even one of two; NaN stays NaN. */
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

/* Numbers `at` .. of an array of floats or bfloat16. */
INLINE lanes load_at(const void *from, int64_t at, const int half) {
    if (!half) return load((const float *)from + at);
    halves value;
    memcpy(&value, (const uint16_t *)from + at, sizeof value);
    return widened(value);
}

INLINE void put(void *to, int64_t at, float value, const int half) {
    if (half)
        ((uint16_t *)to)[at] = rounded(value);
    else
        ((float *)to)[at] = value;
}

/* Begin to read `count` numbers: what comes next is somewhere else in memory, where the processor does not look ahead. */
INLINE void fetch(const void *from, int64_t at, int64_t count, const int half) {
    const int64_t size = half ? 2 : 4;
    for (int64_t c = 0; c < count * size; c += 64) __builtin_prefetch((const char *)from + at * size + c, 0, 2);
}
