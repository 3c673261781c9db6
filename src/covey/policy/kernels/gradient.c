/* The gradient of a linear layer's weight, a sum over tokens: out = gradient^T x. Libraries first copy both tensors, so
   that tokens lie side by side; here they are read where they are. Float32. linear.py calls covey_weight_gradient.

   Each number is one sum over the tokens in order, in stretches of DEPTH, whatever the number of threads. */

#include "lanes.h"

#if LANES == 16
#define ROWS 8 /* outputs by vectors of inputs that are summed in registers */
#else
#define ROWS 6
#endif
#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define DEPTH 512 /* tokens that are summed before the next outputs: their part of a panel stays in the cache */
#define WIDTH 2048 /* outputs that lie ready at a time */

/* Add the products of `depth` tokens, ROWS outputs by a panel of inputs, to rows of `out`, `stride` apart. */
INLINE void add(const float *gradient, const float *x, int64_t depth, int is_first, float *out, int64_t stride) {
    lanes sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = is_first ? (lanes){0} : load(out + r * stride + v * LANES);
    for (int64_t t = 0; t < depth; t++) {
        lanes line[VECTORS];
        for (int v = 0; v < VECTORS; v++) line[v] = load(x + t * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] += gradient[t * ROWS + r] * line[v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(out + r * stride + v * LANES, sum[r][v]);
}

/* Columns first .. of some tokens, `count` side by side, one token after the other; zeros where there are no more. */
INLINE void gather(float *restrict to, const float *from, int64_t width, int64_t first, int64_t depth, const int64_t count) {
    const int64_t here = smaller(count, width - first);
    for (int64_t t = 0; t < depth; t++) {
        if (here == count) {
            for (int64_t c = 0; c < count; c++) to[t * count + c] = from[t * width + first + c];
        } else {
            for (int64_t c = 0; c < count; c++) to[t * count + c] = c < here ? from[t * width + first + c] : 0.0f;
        }
    }
}

/* The same at the edge, where only some outputs and inputs are there. */
INLINE void add_some(const float *gradient, const float *x, int64_t depth, int is_first, float *out, int64_t stride,
                     int64_t num_outputs, int64_t num_inputs) {
    float whole[ROWS * PANEL] = {0};
    for (int64_t r = 0; r < num_outputs && !is_first; r++) memcpy(whole + r * PANEL, out + r * stride, 4 * num_inputs);
    add(gradient, x, depth, is_first, whole, PANEL);
    for (int64_t r = 0; r < num_outputs; r++) memcpy(out + r * stride, whole + r * PANEL, 4 * num_inputs);
}

/* Outputs first_output .. last_output, by all threads of a parallel region. */
INLINE void sum_up(const float *gradient, const float *x, float *out, float *room, int64_t tokens, int64_t outer,
                   int64_t inner, int64_t first_output, int64_t last_output) {
    const int64_t tiles = (last_output - first_output + ROWS - 1) / ROWS, panels = (inner + PANEL - 1) / PANEL;
    float *columns = room, *lines = room + tiles * ROWS * DEPTH;
    for (int64_t first = 0; first < tokens; first += DEPTH) {
        const int64_t depth = smaller(DEPTH, tokens - first);
#pragma omp for schedule(static) nowait
        for (int64_t o = 0; o < tiles; o++)
            gather(columns + o * ROWS * DEPTH, gradient + first * outer, outer, first_output + o * ROWS, depth, ROWS);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < panels; i++)
            gather(lines + i * PANEL * DEPTH, x + first * inner, inner, i * PANEL, depth, PANEL);
#pragma omp for schedule(static) collapse(2)
        for (int64_t i = 0; i < panels; i++)
            for (int64_t o = 0; o < tiles; o++) {
                const float *column = columns + o * ROWS * DEPTH, *line = lines + i * PANEL * DEPTH;
                const int64_t output = first_output + o * ROWS, num_outputs = smaller(ROWS, last_output - output);
                const int64_t num_inputs = smaller(PANEL, inner - i * PANEL);
                float *place = out + output * inner + i * PANEL;
                if (num_outputs == ROWS && num_inputs == PANEL)
                    add(column, line, depth, first == 0, place, inner);
                else
                    add_some(column, line, depth, first == 0, place, inner, num_outputs, num_inputs);
            }
    }
}

/* Numbers that `room` must hold. */
int64_t covey_weight_gradient_room(int64_t tokens, int64_t outer, int64_t inner, int64_t num_threads) {
    return DEPTH * (smaller(outer, WIDTH) + ROWS + inner + PANEL);
}

/* out (outer x inner) = gradient^T (outer x tokens) x (tokens x inner). */
void covey_weight_gradient(const float *gradient, const float *x, float *out, float *room, int64_t tokens,
                           int64_t outer, int64_t inner, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (int64_t first = 0; first < outer; first += WIDTH)
        sum_up(gradient, x, out, room, tokens, outer, inner, first, smaller(outer, first + WIDTH));
}
