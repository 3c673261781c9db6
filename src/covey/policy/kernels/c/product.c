/* Matrix products of the training pass: out = a b, or a sum of such products, each factor lying either way, float32 or
   bfloat16, sums float32 and rounded once. blocks.py calls covey_products and mirrors the structs.

   Lines of both factors (rows of a, columns of b) are laid out in groups of LANES, step after step of the sum; a step is
   a number, or of bfloat16 a pair of numbers; without an instruction for pairs a bfloat16 becomes a float there. Each
   number of `out` is one sum in order, in stretches of at most DEPTH
   steps: no bit depends on the number of threads, nor a row's on the rows beside it. */

#include "lanes.h"
#include <omp.h>

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
#define SIZE ((DEPTH + 2 * LANES + 1) * LANES) /* words of a group, at most */
#define AHEAD 16    /* numbers of a line that are fetched before they are laid out */
#define PIECES 32   /* of a stretch, at most */

const int64_t covey_pair = PAIR; /* numbers of bfloat16 in a step */

typedef struct {
    const void *a, *b;               /* rows x depth, depth x columns */
    int64_t depth, a_stride, b_stride; /* strides: from one line in memory to the next */
    int64_t a_turned, b_turned;      /* whether they lie as depth x rows and columns x depth */
    int64_t a_wide, b_wide;          /* factors of bfloat16 products that are float32, to be rounded as they are laid out */
} Part;

typedef struct {
    const Part *parts;               /* products whose sum is made */
    float *sums;                     /* rows x columns; NULL where only `out` is asked for, and one stretch suffices */
    uint16_t *out;                   /* the same rounded to bfloat16, or NULL */
    const void *added;               /* rows x columns, where the sums begin, or NULL; may be `sums` or `out` */
    int64_t added_stride;            /* from one row to the next; 0: the same for all rows */
    int64_t num_parts, rows, columns, stride; /* stride: of `sums` and `out`, from one row to the next */
    int64_t half, half_added;        /* factors are bfloat16; `added` is */
} Product;

/* Numbers start .. end of the lines of a part. */
typedef struct {
    const Part *part;
    int64_t start, end;
} Piece;

INLINE int64_t divided(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

/* ---------------------------------------------------------------------------------------------------- laying out */

/* How numbers lie: alone, as bfloat16, or alone and to become bfloat16. */
enum { WHOLE, HALF, WIDE };

INLINE int64_t numbers_of(const int form) { return form == WHOLE ? 1 : PAIR; }

/* A step of some lines that lie side by side: numbers at `from`, of pairs also those one line on. */
INLINE lanes across(const void *from, int64_t at, int64_t stride, int64_t count, int64_t left, const int form) {
    if (form != HALF) {
        lanes value = {0}, next = {0};
        memcpy(&value, (const float *)from + at, 4 * (size_t)count);
        if (form == WHOLE) return value;
        if (PAIR == 1) return (lanes)rounded_lanes(value);
        if (left > 1) memcpy(&next, (const float *)from + at + stride, 4 * (size_t)count);
        return (lanes)(rounded_lanes(value) >> 16 | rounded_lanes(next));
    }
    halves first = {0}, second = {0};
    memcpy(&first, (const uint16_t *)from + at, 2 * (size_t)count);
    if (PAIR == 1) return widened(first);
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
    if (PAIR == 1 && form == HALF) {
        halves value = {0};
        memcpy(&value, (const uint16_t *)from + at, 2 * (size_t)larger(0, smaller(left, LANES)));
        return widened(value);
    }
    const lanes first = along_of(from, at, left, form == HALF ? 2 : 4);
    if (form != WIDE) return first;
    return PAIR == 1 ? (lanes)rounded_lanes(first) : narrowed(first, along_of(from, at + LANES, left - LANES, 4));
}

/* Lines first .. last of a factor, of `num`, and numbers start .. end of each: group after group, `apart` words; zeros where
   nothing is. */
typedef struct {
    const void *from;
    int64_t stride, num, start, end, apart;
} Lines;

/* Lines that lie side by side: a step is read of all of them, as memory has them, before the next. */
INLINE void lay_across(uint32_t *to, Lines l, int64_t first, int64_t last, int64_t steps, const int form) {
    const int64_t size = form == HALF ? 2 : 4;
    for (int64_t k = 0; k < steps; k++) {
        const int64_t place = l.start + k * numbers_of(form), at = place * l.stride, left = l.end - place;
        for (int64_t next = AHEAD; next < AHEAD + numbers_of(form); next++)
            for (int64_t line = first; line < last; line += 64 / size)
                __builtin_prefetch((const char *)l.from + (at + next * l.stride + line) * size, 0, 2);
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
    const int64_t size = form == HALF ? 2 : 4;
    for (int64_t line = first; line < last; line += LANES, to += l.apart)
        for (int64_t k = 0; k < steps; k += LANES) {
            lanes rows[LANES];
            const int64_t place = l.start + k * numbers_of(form);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                const char *next = (const char *)l.from + ((line + LANES + r) * l.stride + place) * size;
                __builtin_prefetch(next, 0, 2);
                if (form == WIDE) __builtin_prefetch(next + 64, 0, 2);
                rows[r] = line + r < l.num ? along(l.from, (line + r) * l.stride + place, l.end - place, form) : (lanes){0};
            }
            transpose(rows);
            for (int r = 0; r < LANES; r++) memcpy(to + (k + r) * LANES, &rows[r], sizeof rows[r]);
        }
}

static __attribute__((noinline)) void lay(uint32_t *to, Lines l, int64_t first, int64_t last, int is_along, int form) {
    const int64_t steps = divided(l.end - l.start, numbers_of(form));
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

/* ROWS rows by `vectors` groups of columns, `apart` from one another. */
INLINE void sum_up(const uint32_t *a, const uint32_t *b, int64_t apart, int64_t steps, float *tile, const uint32_t *ahead,
                   const int vectors, const int half) {
    lanes sum[ROWS][VECTORS] = {0};
    for (int64_t k = 0; k < steps; k++, a += LANES, b += LANES) {
        if (k % 4 == 0) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += LANES;
        }
        lanes line[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            line[v] = load((const float *)b + v * apart);
            KEEP(line[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sum[r][v] = plus_product(sum[r][v], everywhere(a + r), line[v], half);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) store(tile + r * TILE + v * LANES, sum[r][v]);
}

/* Functions of their own: what is inlined into much else doesn't stay in registers. */
#define SUM_UP(name, vectors, half)                                                                                   \
    static __attribute__((noinline)) void name(const uint32_t *a, const uint32_t *b, int64_t apart, int64_t steps,    \
                                               float *tile, const uint32_t *ahead) {                                  \
        sum_up(a, b, apart, steps, tile, ahead, vectors, half);                                                       \
    }
SUM_UP(sum_1, 1, 0)
SUM_UP(sum_2, 2, 0)
SUM_UP(sum_3, 3, 0)
SUM_UP(half_1, 1, 1)
SUM_UP(half_2, 2, 1)
SUM_UP(half_3, 3, 1)

static void (*const SUMS[2][VECTORS])(const uint32_t *, const uint32_t *, int64_t, int64_t, float *, const uint32_t *) = {
    {sum_1, sum_2, sum_3}, {half_1, half_2, half_3}};

/* Add a row of a tile to what was summed before. */
INLINE void put_row(float *to, const float *before, const float *restrict tile, int64_t width,
                    uint16_t *restrict rounded_to) {
    for (int64_t c = 0; before && c < width; c++) to[c] = before[c] + tile[c];
    for (int64_t c = 0; !before && c < width; c++) to[c] = tile[c];
    for (int64_t c = 0; rounded_to && c < width; c++) rounded_to[c] = rounded(to[c]);
}

/* Where the sums of a row begin, widened into `room` if need be; NULL: at 0. */
INLINE const float *beginning(const Product *p, int64_t row, int64_t column, int64_t width, float *room) {
    const int64_t at = row * p->added_stride + column;
    if (!p->added || !p->half_added) return p->added ? (const float *)p->added + at : NULL;
    for (int64_t c = 0; c < width; c++) room[c] = number_at(p->added, at + c, 1);
    return room;
}

INLINE void put_tile(const Product *p, const float *tile, int64_t row, int64_t column, int64_t width, int is_first,
                     int is_last) {
    for (int64_t r = row; r < smaller(row + ROWS, p->rows); r++, tile += TILE) {
        float whole[TILE], room[TILE], *to = p->sums ? p->sums + r * p->stride + column : whole;
        const float *before = is_first ? beginning(p, r, column, width, room) : to;
        put_row(to, before, tile, width, p->out && is_last ? p->out + r * p->stride + column : NULL);
    }
}

/* Fetch where a tile will be put while it is summed: stores wait for one another's places. */
INLINE void fetch_places(const Product *p, int64_t row, int64_t column, int is_last) {
    for (int64_t r = row; r < smaller(row + ROWS, p->rows); r++)
        for (int64_t c = column; c < column + TILE; c += LANES) {
            if (p->out && is_last) __builtin_prefetch(p->out + r * p->stride + c, 1, 3);
            if (p->sums) __builtin_prefetch(p->sums + r * p->stride + c, 1, 3);
        }
}

/* What a stretch of the sum is made of. */
typedef struct {
    Piece pieces[PIECES];
    int64_t num, steps, apart; /* apart: words from one group of lines to the next */
    int is_first, is_last;
} Stretch;

/* Rows of a block, laid out at `a`, by columns from .. to, laid out at `b`. */
static void multiply_block(const Product *p, const Stretch *s, const uint32_t *a, const uint32_t *b, int64_t row,
                           int64_t end, int64_t from, int64_t to) {
    float tile[ROWS * TILE];
    for (int64_t c = from; c < to; c += TILE) {
        const int64_t width = smaller(TILE, to - c);
        const uint32_t *columns = b + (c - from) / LANES * s->apart;
        const int64_t share = divided(VECTORS * s->apart, divided(end - row, ROWS) * LANES) * LANES;
        const uint32_t *ahead = columns + VECTORS * s->apart; /* the next columns are fetched, a part by each few rows */
        for (int64_t r = row; r < end; r += ROWS, ahead += share) {
            const uint32_t *rows = a + (r - row) / LANES * s->apart + (r - row) % LANES;
            fetch_places(p, r, c, s->is_last);
            SUMS[p->half][divided(width, LANES) - 1](rows, columns, s->apart, s->steps, tile, ahead);
            put_tile(p, tile, r, c, width, s->is_first, s->is_last);
        }
    }
}

INLINE int64_t num_blocks(int64_t groups, int64_t num_threads) {
    return smaller(groups, divided(divided(groups, BLOCK), num_threads) * num_threads);
}

/* Words of columns that lie ready. */
INLINE int64_t columns_room(int64_t columns) { return divided(smaller(columns, WIDTH), LANES) * SIZE; }

/* Words that `room` must hold: the columns of a product and of the one before, and a block of rows of each thread. */
int64_t covey_product_room(int64_t columns, int64_t num_threads) {
    return 2 * columns_room(columns) + num_threads * (BLOCK + 1) * SIZE;
}

/* Steps of the sum from number `start` to `end`. */
INLINE int64_t steps_of(int64_t start, int64_t end, int64_t half) { return divided(end - start, half ? PAIR : 1); }

/* The stretch that begins at a number of a part; both are moved behind it. Long parts are cut into like pieces. */
INLINE Stretch next_stretch(const Product *p, int64_t *part, int64_t *start) {
    Stretch s = {.is_first = *part == 0 && *start == 0};
    while (*part < p->num_parts && s.num < PIECES) {
        const int64_t depth = p->parts[*part].depth, cuts = larger(1, divided(depth, DEPTH * (p->half ? PAIR : 1)));
        const int64_t end = smaller(depth, *start + divided(divided(depth, cuts), 2 * LANES) * 2 * LANES);
        if (s.num && s.steps + steps_of(*start, end, p->half) > DEPTH) break;
        s.pieces[s.num++] = (Piece){p->parts + *part, *start, end};
        s.steps += steps_of(*start, end, p->half);
        *start = end < depth ? end : 0;
        *part += end == depth;
    }
    s.is_last = *part == p->num_parts;
    /* Not a power of two: all lines would have the same places in the cache. */
    s.apart = (divided(s.steps, LANES) * LANES + LANES + 1) * LANES;
    return s;
}

/* Lay out lines first .. last of all pieces, rows of `a` or columns of `b`. */
static void lay_pieces(uint32_t *to, const Product *p, const Stretch *s, int64_t first, int64_t last, int of_rows) {
    for (int64_t n = 0; n < s->num; n++) {
        const Piece *piece = s->pieces + n;
        const Part *part = piece->part;
        const Lines lines = of_rows ? (Lines){part->a, part->a_stride, p->rows, piece->start, piece->end, s->apart}
                                    : (Lines){part->b, part->b_stride, p->columns, piece->start, piece->end, s->apart};
        const int is_along = of_rows ? !part->a_turned : (int)part->b_turned;
        lay(to, lines, first, last, is_along, (int)(p->half + (of_rows ? part->a_wide : part->b_wide)));
        to += steps_of(piece->start, piece->end, p->half) * LANES;
    }
}

/* A stretch of the sum for columns from .. to, by all threads of a parallel region. Nobody waits for the end. */
static void multiply_stretch(const Product *p, const Stretch *s, int64_t from, int64_t to, uint32_t *room, uint32_t *own,
                             int64_t num_threads) {
    const int64_t groups = divided(p->rows, LANES), blocks = num_blocks(groups, num_threads), part = 4 * LANES;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = from; c < to; c += part)
        lay_pieces(room + (c - from) / LANES * s->apart, p, s, c, smaller(to, c + part), 0);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = groups * block / blocks * LANES, last = groups * (block + 1) / blocks * LANES;
        lay_pieces(own, p, s, first, last, 1);
        multiply_block(p, s, own, room, first, smaller(last, p->rows), from, to);
    }
}

/* Products in order, at most `columns` wide; `b` of none is what the one right before it makes. */
void covey_products(const Product *products, int64_t count, uint32_t *room, int64_t columns, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        uint32_t *own = room + 2 * columns_room(columns) + omp_get_thread_num() * (BLOCK + 1) * SIZE;
        int64_t number = 0;
        for (const Product *p = products; p < products + count; p++)
            for (int64_t from = 0; from < p->columns; from += WIDTH)
                for (int64_t part = 0, start = 0; part < p->num_parts; number++) {
                    const Stretch s = next_stretch(p, &part, &start);
                    uint32_t *columns_here = room + number % 2 * columns_room(columns);
                    multiply_stretch(p, &s, from, smaller(p->columns, from + WIDTH), columns_here, own, num_threads);
                }
    }
}
