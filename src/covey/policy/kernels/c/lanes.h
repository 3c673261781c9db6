/* What all sources here compute with: vectors of floats, sixteen or eight as the processor has them, and numbers stored
   as float32 or bfloat16.

   `half` says which of the two; it is a constant wherever it matters, so that nothing is decided in a loop. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVX2__
#error "the processor must have vectors of eight floats (AVX2): through narrower ones torch is faster"
#endif
#include <immintrin.h> /* not before: other processors have none, and are to read why they are refused */

#ifdef __AVX512BW__
#define LANES 16 /* with 32 registers; without, 16 registers are counted on */
#else
#define LANES 8
#endif
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

/* Four bytes in every lane, whatever they are. */
INLINE lanes everywhere(const void *from) {
    float bits;
    memcpy(&bits, from, sizeof bits);
#if LANES == 16
    return (lanes)_mm512_set1_ps(bits);
#else
    return (lanes)_mm256_set1_ps(bits);
#endif
}

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

/* Two vectors are cut into parts of so many numbers: LOWER takes the first of each two parts, of a and of b in turn, UPPER
   the second. TURNED changes the places of each two parts of one vector. */
#if LANES == 16
#define LOWER_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define UPPER_8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOWER_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define UPPER_4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOWER_2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define UPPER_2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOWER_1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define UPPER_1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define TURNED_8(a) SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define TURNED_4(a) SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define TURNED_2(a) SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define TURNED_1(a) SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#else
#define LOWER_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define UPPER_4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#define LOWER_2(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define UPPER_2(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOWER_1(a, b) SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define UPPER_1(a, b) SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define TURNED_4(a) SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3)
#define TURNED_2(a) SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5)
#define TURNED_1(a) SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6)
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7}
#endif

/* The first `num` of twice as many vectors become sums over each two parts of so many numbers. */
#define ADD_PARTS(a, size, num)                                                                                       \
    for (int i = 0; i < num; i++) a[i] = LOWER_##size(a[i], a[i + num]) + UPPER_##size(a[i], a[i + num])

/* The sums of LANES vectors as one vector: pairs of halves, of quarters, and so on. */
INLINE lanes sums(lanes a[LANES]) {
#if LANES == 16
    ADD_PARTS(a, 8, 8);
#endif
    ADD_PARTS(a, 4, 4);
    ADD_PARTS(a, 2, 2);
    ADD_PARTS(a, 1, 1);
    return a[0];
}

/* Of each two of the vectors, parts of so many numbers change places. */
#define EXCHANGE_PARTS(a, size)                                                                                       \
    _Pragma("GCC unroll 8") for (int n = 0; n < LANES / 2; n++) {                                                     \
        const int i = n / size * 2 * size + n % size;                                                                 \
        const lanes lower = LOWER_##size(a[i], a[i + size]), upper = UPPER_##size(a[i], a[i + size]);                 \
        a[i] = lower;                                                                                                 \
        a[i + size] = upper;                                                                                          \
    }

/* Rows become columns. */
INLINE void transpose(lanes a[LANES]) {
#if LANES == 16
    EXCHANGE_PARTS(a, 8)
#endif
    EXCHANGE_PARTS(a, 4)
    EXCHANGE_PARTS(a, 2)
    EXCHANGE_PARTS(a, 1)
}

INLINE float sum_of(lanes a) {
#if LANES == 16
    a += TURNED_8(a);
#endif
    a += TURNED_4(a);
    a += TURNED_2(a);
    a += TURNED_1(a);
    return a[0];
}

INLINE lanes chosen(ints mask, lanes yes, lanes no) { return (lanes)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE lanes larger_of(lanes a, lanes b) { return chosen(a > b, a, b); }

/* The sum of numbers, LANES sums side by side and then the rest: the order is the same wherever it is inlined. */
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
#if LANES == 16
    found = larger_of(found, TURNED_8(found));
#endif
    found = larger_of(found, TURNED_4(found));
    found = larger_of(found, TURNED_2(found));
    most = found[0] > found[1] ? found[0] : found[1];
    for (; c < count; c++) most = x[c] > most ? x[c] : most;
    return most;
}

/* A bfloat16 is the upper half of a float. Compilers widen vectors of sixteen in halves. */
INLINE lanes widened(halves value) {
#if LANES == 16
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)value), 16);
#else
    return (lanes)(__builtin_convertvector(value, words) << 16);
#endif
}

/* To the nearest bfloat16, the even one of two; NaN stays NaN. */
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

INLINE float nearest(float value) {
    const uint32_t bits = (uint32_t)rounded(value) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The same of a vector, in the upper halves. */
INLINE words rounded_lanes(lanes value) {
    const words bits = (words)value, near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    const words is_number = (words)(value == value);
    return (near & is_number) | (0x7fc00000 & ~is_number);
}

/* Keep a vector in a register, and nothing else that was read: compilers read it again in each product, which waits for
   reads, or fill registers with what could be read again. */
#define KEEP(vector) __asm__ volatile("" : "+v"(vector) : : "memory")

/* How many bfloat16 of a word are multiplied at a time. */
#ifdef __AVX512BF16__
#define PAIR 2
#else
#define PAIR 1
#endif

/* sum + a * b of floats, or of pairs where there is an instruction for them. */
INLINE lanes plus_product(lanes sum, lanes a, lanes b, const int half) {
#ifdef __AVX512BF16__
    if (half) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)half;
    return sum + a * b;
}

/* Numbers as bfloat16, one vector's behind the other's. */
INLINE lanes narrowed(lanes first, lanes second) {
#ifdef __AVX512BF16__
    return (lanes)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    const halves both[2] = {__builtin_convertvector(rounded_lanes(first) >> 16, halves),
                            __builtin_convertvector(rounded_lanes(second) >> 16, halves)};
    return load((const float *)both);
#endif
}

/* Numbers `at` .. of an array of floats or bfloat16. */
INLINE lanes load_at(const void *from, int64_t at, const int half) {
    if (!half) return load((const float *)from + at);
    halves value;
    memcpy(&value, (const uint16_t *)from + at, sizeof value);
    return widened(value);
}

INLINE float number_at(const void *from, int64_t at, const int half) {
    if (!half) return ((const float *)from)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void put(void *to, int64_t at, float value, const int half) {
    if (half)
        ((uint16_t *)to)[at] = rounded(value);
    else
        ((float *)to)[at] = value;
}

/* Numbers as they enter a product: rounded, and in pairs where pairs are multiplied. */
INLINE void put_operand(void *to, int64_t at, float value, const int half) {
    put(to, at, half && PAIR == 1 ? nearest(value) : value, half && PAIR == 2);
}

/* out = x / sqrt(mean(x^2) + eps) * weight, as it enters a product */
INLINE void norm(const float *x, const float *weight, void *out, int64_t at, int64_t width, float eps, const int half) {
    const float scale = 1.0f / sqrtf(total_of_squares(x, width) / (float)width + eps);
    for (int64_t c = 0; c < width; c++) put_operand(out, at + c, x[c] * scale * weight[c], half);
}

/* Begin to read `count` numbers: what comes next is somewhere else in memory, where the processor does not look ahead. */
INLINE void fetch(const void *from, int64_t at, int64_t count, const int half) {
    const int64_t size = half ? 2 : 4;
    for (int64_t c = 0; c < count * size; c += 64) __builtin_prefetch((const char *)from + at * size + c, 0, 2);
}
