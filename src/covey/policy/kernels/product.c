/* Matrix products of the training pass: out = a b, each factor lying either way, float32 or bfloat16, sums float32 and
   rounded once. linear.py calls covey_product and mirrors the struct.

   Lines of both factors (rows of a, columns of b) are laid out in groups of LANES, step after step of the sum; a step is
   a number, or of bfloat16 a pair of numbers. Each number of `out` is one sum in order, in stretches of DEPTH steps: no
   bit depends on the number of threads, nor a row's on the rows beside it. */

#include "lanes.h"
#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if LANES == 16
#define ROWS 8 /* rows by vectors that are summed in registers */
#else
#define ROWS 4
#endif
#define VECTORS 3
#define TILE (VECTORS * LANES)
#define DEPTH 1024  /* steps that are summed before the next: a block of rows stays in the cache */
#define BLOCK 7     /* groups of rows of a block, about */
#define WIDTH 2048  /* columns that lie ready at a time */
#define SIZE ((DEPTH + 1) * LANES)

typedef struct {
    const void *a, *b;               /* rows x depth, depth x columns */
    void *out;                       /* rows x columns */
    float *sums;                     /* the same in float32, where `out` is not and the depth has several stretches */
    uint32_t *room;
    int64_t rows, columns, depth;
    int64_t a_stride, b_stride;      /* from one line in memory to the next */
    int64_t a_turned, b_turned;      /* whether they lie as depth x rows and columns x depth */
    int64_t half, half_out;          /* bfloat16 */
    int64_t a_wide, b_wide;          /* factors of a half product that are float32, to be rounded as they are laid out */
    int64_t keep;                    /* add to what `out` holds, which is float32 */
    int64_t num_threads;
    const float *bias;               /* columns, or NULL */
} Product;

INLINE int64_t divided(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

/* ---------------------------------------------------------------------------------------------------- laying out */

/* Numbers as bfloat16, one vector's behind the other's; of processors without such products no one asks. */
INLINE lanes narrowed(lanes first, lanes second) {
#ifdef __AVX512BF16__
    return (lanes)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    return first + second;
#endif
}

/* How numbers lie: alone, as bfloat16, or alone and to become bfloat16. */
enum { WHOLE, HALF, WIDE };

/* A step of some lines that lie side by side: numbers at `from`, of bfloat16 also those one line on. */
INLINE lanes across(const void *from, int64_t at, int64_t stride, int64_t count, int64_t left, const int form) {
    if (form != HALF) {
        lanes value = {0}, next = {0};
        memcpy(&value, (const float *)from + at, 4 * (size_t)count);
        if (form == WHOLE) return value;
        if (left > 1) memcpy(&next, (const float *)from + at + stride, 4 * (size_t)count);
        return (lanes)(rounded_lanes(value) >> 16 | rounded_lanes(next));
    }
    halves first = {0}, second = {0};
    memcpy(&first, (const uint16_t *)from + at, 2 * (size_t)count);
    if (left > 1) memcpy(&second, (const uint16_t *)from + at + stride, 2 * (size_t)count);
    return (lanes)(__builtin_convertvector(first, words) | __builtin_convertvector(second, words) << 16);
}

/* A vector of a line from number `at` on, of `size` bytes; `left` are there. */
INLINE lanes along_of(const void *from, int64_t at, int64_t left, const int64_t size) {
    lanes value = {0};
    const char *place = (const char *)from + at * size;
    if (left * size >= (int64_t)sizeof value) memcpy(&value, place, sizeof value);
    else if (left > 0) memcpy(&value, place, (size_t)(left * size));
    return value;
}

/* LANES steps of a line; `left` numbers are there. */
INLINE lanes along(const void *from, int64_t at, int64_t left, const int form) {
    if (form == WIDE) return narrowed(along_of(from, at, left, 4), along_of(from, at + LANES, left - LANES, 4));
    return along_of(from, at, left, form == HALF ? 2 : 4);
}

/* Lines first .. last of a factor, of `num`, and numbers start .. end of each: group after group, `apart` words; zeros where
   nothing is. */
typedef struct {
    const void *from;
    int64_t stride, num, start, end, apart;
} Lines;

/* Lines that lie side by side: a step is read of all of them, as memory has them, before the next. */
INLINE void lay_across(uint32_t *to, Lines l, int64_t first, int64_t last, int64_t steps, const int form) {
    for (int64_t k = 0; k < steps; k++) {
        const int64_t place = l.start + k * (form == WHOLE ? 1 : 2), at = place * l.stride, left = l.end - place;
        uint32_t *group = to + k * LANES;
        int64_t line = first;
        for (; line + LANES <= smaller(last, l.num); line += LANES, group += l.apart) {
            const lanes step = across(l.from, at + line, l.stride, LANES, left, form);
            memcpy(group, &step, sizeof step);
        }
        for (; line < last; line += LANES, group += l.apart) {
            const lanes step = across(l.from, at + line, l.stride, larger(0, l.num - line), left, form);
            memcpy(group, &step, sizeof step);
        }
    }
}

/* Lines that lie one after the other. */
INLINE void lay_along(uint32_t *to, Lines l, int64_t first, int64_t last, int64_t steps, const int form) {
    for (int64_t line = first; line < last; line += LANES, to += l.apart)
        for (int64_t k = 0; k < steps; k += LANES) {
            lanes rows[LANES];
            const int64_t place = l.start + k * (form == WHOLE ? 1 : 2);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                rows[r] = line + r < l.num ? along(l.from, (line + r) * l.stride + place, l.end - place, form) : (lanes){0};
            transpose(rows);
            for (int r = 0; r < LANES; r++) memcpy(to + (k + r) * LANES, &rows[r], sizeof rows[r]);
        }
}

static __attribute__((noinline)) void lay(uint32_t *to, Lines l, int64_t first, int64_t last, int is_along, int form) {
    const int64_t steps = divided(l.end - l.start, form == WHOLE ? 1 : 2);
    switch (2 * form + is_along) {
    case 2 * WHOLE: lay_across(to, l, first, last, steps, WHOLE); break;
    case 2 * WHOLE + 1: lay_along(to, l, first, last, steps, WHOLE); break;
    case 2 * HALF: lay_across(to, l, first, last, steps, HALF); break;
    case 2 * HALF + 1: lay_along(to, l, first, last, steps, HALF); break;
    case 2 * WIDE: lay_across(to, l, first, last, steps, WIDE); break;
    default: lay_along(to, l, first, last, steps, WIDE);
    }
}

/* ---------------------------------------------------------------------------------------------------- summing */

INLINE lanes plus_product(lanes sum, const uint32_t *a, lanes b, const int half) {
#ifdef __AVX512BF16__
    if (half) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)*a), (__m512bh)b);
#endif
    float value;
    memcpy(&value, a, sizeof value);
    return sum + value * b;
}

/* ROWS rows by `vectors` groups of columns, `apart` from one another. */
INLINE void sum_up(const uint32_t *a, const uint32_t *b, int64_t apart, int64_t steps, float *tile, const int vectors,
                   const int half) {
    lanes sum[ROWS][VECTORS] = {0};
    for (int64_t k = 0; k < steps; k++, a += LANES, b += LANES) {
        lanes line[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) memcpy(&line[v], b + v * apart, sizeof line[v]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sum[r][v] = plus_product(sum[r][v], a + r, line[v], half);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) store(tile + r * TILE + v * LANES, sum[r][v]);
}

/* Functions of their own: what is inlined into much else doesn't stay in registers. */
#define SUM_UP(name, vectors, half)                                                                                   \
    static __attribute__((noinline)) void name(const uint32_t *a, const uint32_t *b, int64_t apart, int64_t steps,    \
                                               float *tile) {                                                         \
        sum_up(a, b, apart, steps, tile, vectors, half);                                                              \
    }
SUM_UP(sum_1, 1, 0)
SUM_UP(sum_2, 2, 0)
SUM_UP(sum_3, 3, 0)
SUM_UP(half_1, 1, 1)
SUM_UP(half_2, 2, 1)
SUM_UP(half_3, 3, 1)

static void (*const SUMS[2][VECTORS])(const uint32_t *, const uint32_t *, int64_t, int64_t, float *) = {
    {sum_1, sum_2, sum_3}, {half_1, half_2, half_3}};

/* Add a row of a tile to what was summed before; the last stretch is rounded. */
INLINE void put_row(float *to, const float *before, const float *restrict tile, int64_t width,
                    uint16_t *restrict rounded_to) {
    for (int64_t c = 0; before && c < width; c++) to[c] = before[c] + tile[c];
    for (int64_t c = 0; !before && c < width; c++) to[c] = tile[c];
    for (int64_t c = 0; rounded_to && c < width; c++) rounded_to[c] = rounded(to[c]);
}

INLINE void put_tile(const Product *p, const float *tile, int64_t row, int64_t column, int64_t width, int is_first,
                     int is_last) {
    for (int64_t r = row; r < smaller(row + ROWS, p->rows); r++, tile += TILE) {
        float *sums = p->half_out ? p->sums : (float *)p->out, whole[TILE];
        float *to = sums ? sums + r * p->columns + column : whole;
        const float *before = !is_first || p->keep ? to : p->bias ? p->bias + column : NULL;
        put_row(to, before, tile, width, p->half_out && is_last ? (uint16_t *)p->out + r * p->columns + column : NULL);
    }
}

/* Rows of a block, laid out at `a`, by columns from .. to, laid out at `b`. */
static void multiply_block(const Product *p, const uint32_t *a, const uint32_t *b, int64_t row, int64_t end,
                           int64_t from, int64_t to, int64_t steps, int64_t apart, int is_first, int is_last) {
    float tile[ROWS * TILE];
    for (int64_t c = from; c < to; c += TILE) {
        const int64_t width = smaller(TILE, to - c);
        const uint32_t *columns = b + (c - from) / LANES * apart;
        for (int64_t r = row; r < end; r += ROWS) {
            const uint32_t *rows = a + (r - row) / LANES * apart + (r - row) % LANES;
            SUMS[p->half][divided(width, LANES) - 1](rows, columns, apart, steps, tile);
            put_tile(p, tile, r, c, width, is_first, is_last);
        }
    }
}

INLINE int64_t num_blocks(int64_t groups, int64_t num_threads) {
    return smaller(groups, divided(divided(groups, BLOCK), num_threads) * num_threads);
}

/* Words that `room` must hold: the columns that lie ready, and a block of rows of each thread. */
int64_t covey_product_room(int64_t rows, int64_t columns, int64_t num_threads) {
    return (divided(smaller(columns, WIDTH), LANES) + num_threads * (BLOCK + 1)) * SIZE;
}

/* A stretch of the sum for columns from .. to, by all threads of a parallel region. */
static void multiply_stretch(const Product *p, int64_t from, int64_t to, int64_t start, int64_t end) {
    const int64_t steps = divided(end - start, p->half ? 2 : 1), groups = divided(p->rows, LANES);
    const int64_t blocks = num_blocks(groups, p->num_threads), part = 4 * LANES;
    const int64_t apart = (divided(steps, LANES) * LANES + 1) * LANES; /* not a power of two: lines would share their places in the cache */
    const Lines rows = {p->a, p->a_stride, p->rows, start, end, apart};
    const Lines columns = {p->b, p->b_stride, p->columns, start, end, apart};
    uint32_t *own = p->room + (divided(smaller(p->columns, WIDTH), LANES) + omp_get_thread_num() * (BLOCK + 1)) * SIZE;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = from; c < to; c += part)
        lay(p->room + (c - from) / LANES * apart, columns, c, smaller(to, c + part), p->b_turned, p->half + p->b_wide);
#pragma omp for schedule(dynamic, 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = groups * block / blocks * LANES, last = groups * (block + 1) / blocks * LANES;
        lay(own, rows, first, last, !p->a_turned, p->half + p->a_wide);
        multiply_block(p, own, p->room, first, smaller(last, p->rows), from, to, steps, apart, start == 0, end == p->depth);
    }
}

int64_t covey_multiplies_half(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

void covey_product(const Product *p) {
    const int64_t most = DEPTH * (p->half ? 2 : 1), stretches = divided(p->depth, most);
    const int64_t depth = divided(divided(p->depth, stretches), 2 * LANES) * 2 * LANES;
#pragma omp parallel num_threads(p->num_threads)
    for (int64_t from = 0; from < p->columns; from += WIDTH)
        for (int64_t start = 0; start < p->depth; start += depth)
            multiply_stretch(p, from, smaller(p->columns, from + WIDTH), start, smaller(p->depth, start + depth));
}
