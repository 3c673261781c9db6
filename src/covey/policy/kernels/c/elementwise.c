/* What the training pass does between its products, forward and backward: norms and gates. Computed in float32, on tensors
   of float32 or bfloat16: a row of these is widened in the cache, and rounded once.

   Each function is one pass over its tensors where torch makes several, and what is cheap is computed again in the
   backward pass, not kept. A row's numbers depend on nothing but the row; the gradient of a norm's weight is a sum over
   rows in a fixed order. So no bit depends on the number of threads. elementwise.py calls these functions and
   mirrors the structs. */

#include "lanes.h"

#define PIECE 512 /* numbers of a gate that are computed together */
#define WORTH_THREADS 65536 /* numbers from which work is shared among threads */

/* The next numbers, as many as there are; zeros after them. */
INLINE lanes load_some(const float *from, int64_t count) {
    lanes value = {0};
    if (count >= LANES) memcpy(&value, from, sizeof value);
    else memcpy(&value, from, 4 * (size_t)count);
    return value;
}

INLINE void store_some(float *to, lanes value, int64_t count) {
    if (count >= LANES) memcpy(to, &value, sizeof value);
    else memcpy(to, &value, 4 * (size_t)count);
}

/* `count` numbers from `at` on: where they lie if they are floats, else widened into `room`. */
INLINE const float *read(const void *from, int64_t at, int64_t count, int64_t half, float *room) {
    if (!half) return (const float *)from + at;
    const uint16_t *numbers = (const uint16_t *)from + at;
    for (int64_t c = 0; c < count; c++) {
        const uint32_t bits = (uint32_t)numbers[c] << 16;
        memcpy(room + c, &bits, sizeof bits);
    }
    return room;
}

/* Where `count` numbers are to be computed: `room`, if they are to be rounded from there. */
INLINE float *place(void *to, int64_t at, int64_t half, float *room) { return half ? room : (float *)to + at; }

INLINE void round_off(void *to, int64_t at, int64_t count, int64_t half, const float *room) {
    if (!half) return;
    for (int64_t c = 0; c < count; c++) ((uint16_t *)to)[at + c] = rounded(room[c]);
}

/* -------------------------------------------------------------------------------------------------- norms */

typedef struct {
    const void *x;                /* rows x width */
    const float *weight;          /* width */
    float *scales;                /* of rows: 1 / sqrt(mean(x^2) + eps) */
    void *out;                    /* forward: rows x width */
    const void *delta;            /* forward: rows x width, added to x before, or NULL */
    void *sum;                    /* forward: x + delta, of x's type, where there is a delta */
    const void *gradient;         /* backward: of out */
    const void *of_sum;           /* backward: what reaches x otherwise, of x's type, or NULL */
    void *of_x, *of_delta;        /* backward: rows x width; the same in bfloat16, or NULL */
    float *sums, *of_weight;      /* backward: rows / block, rounded up, x width; width. NULL where nobody asks. */
    int64_t rows, width, block;   /* block: rows whose share of of_weight is one sum */
    int64_t num_threads;
    int64_t half_x, half_out;     /* bfloat16: x and its gradient; out and its gradient */
    int64_t half_delta;
    float eps;
} Norm;

/* The sum of x and delta, stored: where it is rounded, what is read of it. */
INLINE const float *add_delta(const Norm *n, int64_t row, const float *x, const int64_t width, float *room) {
    const float *delta = read(n->delta, row * width, width, n->half_delta, room);
    float *sum = place(n->sum, row * width, n->half_x, room);
    for (int64_t c = 0; c < width; c++) sum[c] = x[c] + delta[c];
    round_off(n->sum, row * width, width, n->half_x, sum);
    return read(n->sum, row * width, width, n->half_x, room);
}

/* out = x * scale * weight, x with its delta. */
INLINE void norm_row(const Norm *n, int64_t row, const int64_t width, float *room) {
    const float *x = read(n->x, row * width, width, n->half_x, room);
    if (n->delta) x = add_delta(n, row, x, width, room + width);
    float *out = place(n->out, row * width, n->half_out, room + width);
    lanes squares = {0};
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c);
        squares += a * a;
    }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + n->eps);
    n->scales[row] = scale;
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), w = load_some(n->weight + c, width - c);
        store_some(out + c, a * scale * w, width - c);
    }
    round_off(n->out, row * width, width, n->half_out, out);
}

void covey_norm_forward(const Norm *n) {
    const int is_whole = n->width % LANES == 0;
#pragma omp parallel for schedule(dynamic, 32) num_threads(n->num_threads) if (n->rows * n->width > WORTH_THREADS)
    for (int64_t row = 0; row < n->rows; row++) {
        float room[2 * n->width];
        if (is_whole) norm_row(n, row, n->width / LANES * LANES, room); /* no ends to look after */
        else norm_row(n, row, n->width, room);
    }
}

/* of_x = of_sum + scale * gradient * weight - x * scale^3 * mean(gradient * weight * x); of_weight += gradient * x *
   scale. */
INLINE void norm_backward(const Norm *n, int64_t row, float *of_weight, const int64_t width, float *room) {
    const float *x = read(n->x, row * width, width, n->half_x, room);
    const float *gradient = read(n->gradient, row * width, width, n->half_out, room + width), scale = n->scales[row];
    float *of_x = place(n->of_x, row * width, n->half_x, room + 2 * width);
    lanes products = {0};
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), g = load_some(gradient + c, width - c);
        products += a * g * load_some(n->weight + c, width - c);
        if (of_weight) store_some(of_weight + c, load_some(of_weight + c, width - c) + a * g * scale, width - c);
    }
    const float along = sum_of(products) / (float)width * scale * scale * scale;
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), g = load_some(gradient + c, width - c);
        store_some(of_x + c, g * load_some(n->weight + c, width - c) * scale - a * along, width - c);
    }
    const float *of_sum = n->of_sum ? read(n->of_sum, row * width, width, n->half_x, room + width) : NULL;
    for (int64_t c = 0; of_sum && c < width; c++) of_x[c] = of_sum[c] + of_x[c];
    round_off(n->of_x, row * width, width, n->half_x, of_x);
    if (n->of_delta) round_off(n->of_delta, row * width, width, 1, of_x);
}

void covey_norm_backward(const Norm *n) {
    const int is_whole = n->width % LANES == 0;
    const int64_t blocks = (n->rows + n->block - 1) / n->block;
#pragma omp parallel for schedule(dynamic, 1) num_threads(n->num_threads) if (n->rows * n->width > WORTH_THREADS)
    for (int64_t block = 0; block < blocks; block++) {
        float *sum = n->sums ? n->sums + block * n->width : NULL, room[3 * n->width];
        if (sum) memset(sum, 0, 4 * (size_t)n->width);
        for (int64_t row = block * n->block; row < smaller((block + 1) * n->block, n->rows); row++) {
            if (is_whole) norm_backward(n, row, sum, n->width / LANES * LANES, room);
            else norm_backward(n, row, sum, n->width, room);
        }
    }
    if (!n->sums) return;
    memset(n->of_weight, 0, 4 * (size_t)n->width);
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < n->width; c++) n->of_weight[c] += n->sums[block * n->width + c];
}

/* -------------------------------------------------------------------------------------------------- gates */

typedef struct {
    const void *gate, *up;        /* count each */
    void *out;                    /* backward: may be NULL */
    const void *gradient;         /* backward: of out */
    void *of_gate, *of_up;        /* backward */
    int64_t count, num_threads;
    int64_t half;                 /* all bfloat16 */
} Gate;

/* silu(gate) * up, where `e` is exp(-|gate|). */
INLINE float gated(float gate, float up, float e) { return gate * up * (gate < 0.0f ? e : 1.0f) / (1.0f + e); }

/* out = silu(gate) * up, for PIECE numbers. */
INLINE void gate_piece(const float *restrict gate, const float *restrict up, float *restrict out) {
    for (int i = 0; i < PIECE; i++) out[i] = gated(gate[i], up[i], exponential(-fabsf(gate[i])));
}

/* Ends of less than a PIECE are computed in full, on copies: every number goes through the same instructions. */
INLINE const float *piece(const void *from, int64_t at, int64_t count, int64_t half, float *room) {
    const float *found = read(from, at, count, half, room);
    if (half || count == PIECE) return found;
    memcpy(room, found, 4 * (size_t)count);
    return room;
}

INLINE void give(void *to, int64_t at, int64_t count, int64_t half, const float *room) {
    if (half) round_off(to, at, count, half, room);
    else if (count < PIECE) memcpy((float *)to + at, room, 4 * (size_t)count);
}

void covey_gate_forward(const Gate *g) {
#pragma omp parallel for schedule(dynamic, 64) num_threads(g->num_threads) if (g->count > WORTH_THREADS)
    for (int64_t at = 0; at < g->count; at += PIECE) {
        const int64_t count = smaller(PIECE, g->count - at);
        float room[3][PIECE];
        if (count < PIECE) memset(room, 0, sizeof room);
        const float *gate = piece(g->gate, at, count, g->half, room[0]), *up = piece(g->up, at, count, g->half, room[1]);
        gate_piece(gate, up, place(g->out, at, g->half || count < PIECE, room[2]));
        give(g->out, at, count, g->half, room[2]);
    }
}

/* silu' = s * (1 + gate * (1 - s)), where s is the sigmoid of gate. */
INLINE void gate_piece_backward(const float *restrict gate, const float *restrict up, const float *restrict gradient,
                                float *restrict of_gate, float *restrict of_up, float *restrict out) {
    for (int i = 0; i < PIECE; i++) {
        const float e = exponential(-fabsf(gate[i])), most = 1.0f / (1.0f + e), least = e * most;
        const float s = gate[i] < 0.0f ? least : most, rest = gate[i] < 0.0f ? most : least;
        of_up[i] = gradient[i] * gate[i] * s;
        out[i] = gated(gate[i], up[i], e);
        of_gate[i] = gradient[i] * up[i] * s * (1.0f + gate[i] * rest);
    }
}

void covey_gate_backward(const Gate *g) {
#pragma omp parallel for schedule(dynamic, 64) num_threads(g->num_threads) if (g->count > WORTH_THREADS)
    for (int64_t at = 0; at < g->count; at += PIECE) {
        const int64_t count = smaller(PIECE, g->count - at), apart = g->half || count < PIECE;
        float room[6][PIECE];
        if (count < PIECE) memset(room, 0, sizeof room);
        const float *gate = piece(g->gate, at, count, g->half, room[0]), *up = piece(g->up, at, count, g->half, room[1]);
        const float *gradient = piece(g->gradient, at, count, g->half, room[2]);
        gate_piece_backward(gate, up, gradient, place(g->of_gate, at, apart, room[3]), place(g->of_up, at, apart, room[4]),
                            place(g->out, at, apart || !g->out, room[5]));
        give(g->of_gate, at, count, g->half, room[3]);
        give(g->of_up, at, count, g->half, room[4]);
        if (g->out) give(g->out, at, count, g->half, room[5]);
    }
}

/* -------------------------------------------------------------------------------------------------- rotary positions */

typedef struct {
    const void *x;                /* sequences x tokens x heads x width, strides below but the last, which is 1 */
    const float *cosines, *sines; /* sequences x tokens x width */
    void *out;                    /* dense */
    int64_t strides[3], sequences, tokens, heads, width, num_threads;
    int64_t is_backward;          /* turn the gradient back */
    int64_t half;                 /* x and out are bfloat16 */
} Rotate;

/* Halves of a head turn against each other. `lower` and `upper` belong to the sines of the first and second half. */
INLINE void turn(const float *restrict x, const float *cosine, const float *lower, const float *upper,
                 float *restrict out, int64_t half) {
    for (int64_t c = 0; c < half; c++) {
        out[c] = x[c] * cosine[c] - x[half + c] * lower[c];
        out[half + c] = x[half + c] * cosine[half + c] + x[c] * upper[c];
    }
}

INLINE void turn_back(const float *restrict x, const float *cosine, const float *lower, const float *upper,
                      float *restrict out, int64_t half) {
    for (int64_t c = 0; c < half; c++) {
        out[c] = x[c] * cosine[c] + x[half + c] * upper[c];
        out[half + c] = x[half + c] * cosine[half + c] - x[c] * lower[c];
    }
}

INLINE void rotate_row(const Rotate *r, int64_t row) {
    const int64_t half = r->width / 2;
    int64_t from = row / r->tokens * r->strides[0] + row % r->tokens * r->strides[1], to = row * r->heads * r->width;
    const float *cosine = r->cosines + row * r->width, *sine = r->sines + row * r->width;
    float room[2 * r->width];
    for (int64_t head = 0; head < r->heads; head++, from += r->strides[2], to += r->width) {
        const float *x = read(r->x, from, r->width, r->half, room);
        float *out = place(r->out, to, r->half, room + r->width);
        if (r->is_backward) turn_back(x, cosine, sine, sine + half, out, half);
        else turn(x, cosine, sine, sine + half, out, half);
        round_off(r->out, to, r->width, r->half, out);
    }
}

/* Queries and keys, or whatever else has the same positions. */
void covey_rotate_heads(const Rotate *calls, int64_t count) {
    const int64_t rows = calls->sequences * calls->tokens, num_threads = calls->num_threads;
#pragma omp parallel for schedule(dynamic, 32) num_threads(num_threads) if (rows * calls->heads > WORTH_THREADS / 64)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t n = 0; n < count; n++) rotate_row(calls + n, row);
}
