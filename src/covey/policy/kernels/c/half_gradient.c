/* The gradient of a linear layer's weight where products are bfloat16: out = gradient^T x in tiles (Intel's AMX), its
   factors bfloat16, its sums float32 and nowhere rounded. Libraries first turn both tensors, so that tokens lie side by
   side, and round what comes out. blocks.py calls covey_weight_gradient.

   Each number is one sum over the tokens in order, whatever the number of threads. */

#include "lanes.h"
#include "tiles.h"
#include <omp.h>

#ifndef TILE_ROWS
int64_t covey_has_tiles(void) { return 0; }
#else
int64_t covey_has_tiles(void) { return may_use_tiles; }

#define STEP 32 /* tokens of a tile */
#define SIDE 32 /* outputs by inputs that are summed at a time: two tiles by two */
#define TILE 256 /* pairs of a tile */
#define DEPTH 12 /* steps that are summed before the next outputs: their tiles of inputs stay in the cache */
#define GROUP 128 /* inputs whose sums stay in the cache */
#define WIDTH 384 /* outputs that lie ready at a time, of a thread */

INLINE int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

/* Sixteen columns of two tokens as pairs; zeros for what is not there. */
INLINE ints pairs_of(const uint16_t *from, int64_t stride, int64_t tokens, int64_t columns) {
    halves first = {0}, second = {0};
    const size_t bytes = 2 * (size_t)smaller(columns, LANES);
    if (columns >= LANES) {
        if (tokens > 0) memcpy(&first, from, sizeof first);
        if (tokens > 1) memcpy(&second, from + stride, sizeof second);
    } else {
        if (tokens > 0) memcpy(&first, from, bytes);
        if (tokens > 1) memcpy(&second, from + stride, bytes);
    }
    return (ints)(__builtin_convertvector(first, words) | __builtin_convertvector(second, words) << 16);
}

/* A tile of sixteen columns and STEP tokens: rows are pairs of tokens, or columns where they are `turned`. */
INLINE void gather(uint32_t *to, const uint16_t *from, int64_t stride, int64_t tokens, int64_t columns, const int turned) {
    lanes rows[LANES];
    for (int p = 0; p < LANES; p++) rows[p] = (lanes)pairs_of(from + 2 * p * stride, stride, tokens - 2 * p, columns);
    if (turned) transpose(rows);
    for (int p = 0; p < LANES; p++) memcpy(to + p * LANES, &rows[p], sizeof rows[p]);
}

/* Tokens first .. of columns from .. from + count, panel after panel of sixteen columns, `steps` tiles each. */
INLINE void gather_step(uint32_t *to, const uint16_t *x, int64_t tokens, int64_t width, int64_t first, int64_t from,
                        int64_t count, int64_t steps, const int turned) {
    for (int64_t c = 0; c < count; c += LANES) {
        if (c % (2 * LANES) == 0 && first + 2 * STEP <= tokens) /* the next tokens' columns are rows apart in memory */
            for (int r = 0; r < STEP; r++) __builtin_prefetch(x + (first + STEP + r) * width + from + c, 0, 2);
        gather(to + (c / LANES * steps + first / STEP) * TILE, x + first * width + smaller(from + c, width), width,
               tokens - first, larger(width - from - c, 0), turned);
    }
}

/* Add `steps` steps to a block of sums, SIDE x SIDE; panels of sixteen columns are `apart`. The sums so far are at
   `before`, SIDE a line, or 0 where it is NULL. */
static __attribute__((noinline)) void add(const uint32_t *gradient, const uint32_t *x, int64_t apart, int64_t steps,
                                          const uint32_t *ahead, const float *before, float *after, int64_t stride) {
    if (before) {
        _tile_loadd(0, before, SIDE * 4);
        _tile_loadd(1, before + LANES, SIDE * 4);
        _tile_loadd(2, before + LANES * SIDE, SIDE * 4);
        _tile_loadd(3, before + LANES * SIDE + LANES, SIDE * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s++, gradient += TILE, x += TILE, ahead += TILE) {
        for (int p = 0; p < 2; p++)
            for (int line = 0; line < 2; line++) __builtin_prefetch(ahead + p * apart + line * LANES, 0, 1);
        _tile_loadd(4, gradient, 64);
        _tile_loadd(6, x, 64);
        _tile_loadd(7, x + apart, 64);
        _tile_loadd(5, gradient + apart, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, after, stride * 4);
    _tile_stored(1, after + LANES, stride * 4);
    _tile_stored(2, after + LANES * stride, stride * 4);
    _tile_stored(3, after + LANES * stride + LANES, stride * 4);
}

/* Outputs of one thread, whose columns lie ready, times inputs from `lines` on. `sums` has room for them, block after
   block. */
static void sum_up(const uint32_t *columns, const uint32_t *lines, float *sums, float *out, int64_t steps, int64_t count,
                   int64_t inputs, int64_t stride) {
    const int64_t depth = rounded_up(steps, rounded_up(steps, DEPTH)), apart = steps * TILE;
    for (int64_t from = 0; from < steps; from += depth) {
        const int64_t here = smaller(depth, steps - from), is_last = from + depth >= steps;
        float *block = sums;
        for (int64_t i = 0; i < inputs; i += SIDE)
            for (int64_t o = 0; o < count; o += SIDE, block += SIDE * SIDE) {
                const uint32_t *column = columns + (o / LANES * steps + from) * TILE;
                const uint32_t *line = lines + (i / LANES * steps + from) * TILE;
                const int64_t num_outputs = smaller(SIDE, count - o), num_inputs = smaller(SIDE, inputs - i);
                const int is_done = is_last && num_outputs == SIDE && num_inputs == SIDE;
                float *place = out + o * stride + i;
                add(column, line, apart, here, line + 2 * apart + (o / SIDE) * 2 * LANES, from ? block : NULL, is_done ? place : block, is_done ? stride : SIDE);
                for (int64_t r = 0; is_last && !is_done && r < num_outputs; r++)
                    memcpy(place + r * stride, block + r * SIDE, 4 * (size_t)num_inputs);
            }
    }
}

/* Outputs that a thread takes at a time. */
INLINE int64_t share(int64_t outer, int64_t num_threads) {
    return smaller(WIDTH, rounded_up(outer, num_threads * SIDE) * SIDE);
}

/* Pairs, or floats, that `room` must hold: all inputs, and of each thread some outputs and their sums. */
int64_t covey_weight_gradient_room(int64_t tokens, int64_t outer, int64_t inner, int64_t num_threads) {
    const int64_t wide = rounded_up(inner, SIDE) * SIDE, width = share(outer, num_threads), steps = rounded_up(tokens, STEP);
    return steps * STEP / 2 * wide + num_threads * width * (steps * STEP / 2 + GROUP);
}

/* out (outer x inner) = gradient^T (outer x tokens) x (tokens x inner). */
void covey_weight_gradient(const uint16_t *gradient, const uint16_t *x, float *out, uint32_t *room, int64_t tokens,
                         int64_t outer, int64_t inner, int64_t num_threads) {
    const int64_t steps = rounded_up(tokens, STEP), wide = rounded_up(inner, SIDE) * SIDE;
    const int64_t width = share(outer, num_threads), tasks = rounded_up(outer, width);
#pragma omp parallel num_threads(num_threads)
    {
        uint32_t *columns = room + steps * STEP / 2 * wide + omp_get_thread_num() * width * (steps * STEP / 2 + GROUP);
        float *sums = (float *)(columns + width * steps * STEP / 2);
#pragma omp for schedule(static)
        for (int64_t step = 0; step < steps; step++)
            gather_step(room, x, tokens, inner, step * STEP, 0, wide, steps, 0);
        shape_tiles();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t first = task * width, count = smaller(width, outer - first);
            for (int64_t step = 0; step < steps; step++)
                gather_step(columns, gradient, tokens, outer, step * STEP, first, rounded_up(count, SIDE) * SIDE, steps, 1);
            for (int64_t i = 0; i < inner; i += GROUP)
                sum_up(columns, room + i / LANES * steps * TILE, sums, out + first * inner + i, steps, count,
                       smaller(GROUP, inner - i), inner);
        }
        release_tiles();
    }
}
#endif
