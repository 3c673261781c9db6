/* What the training pass does between its products, forward and backward: norms and gates. Float32.

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

/* -------------------------------------------------------------------------------------------------- norms */

typedef struct {
    const float *x, *weight;      /* rows x width; width */
    float *scales;                /* of rows: 1 / sqrt(mean(x^2) + eps) */
    float *out;                   /* forward: rows x width */
    const float *gradient;        /* backward: of out */
    float *of_x;                  /* backward: rows x width */
    float *sums, *of_weight;      /* backward: rows / block, rounded up, x width; width. NULL where nobody asks. */
    int64_t rows, width, block;   /* block: rows whose share of of_weight is one sum */
    int64_t num_threads;
    float eps;
} Norm;

/* out = x * scale * weight. */
INLINE void norm(const Norm *n, int64_t row, const int64_t width) {
    const float *x = n->x + row * width;
    lanes squares = {0};
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c);
        squares += a * a;
    }
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)width + n->eps);
    n->scales[row] = scale;
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), w = load_some(n->weight + c, width - c);
        store_some(n->out + row * width + c, a * scale * w, width - c);
    }
}

void covey_norm_forward(const Norm *n) {
    const int is_whole = n->width % LANES == 0;
#pragma omp parallel for num_threads(n->num_threads) if (n->rows * n->width > WORTH_THREADS)
    for (int64_t row = 0; row < n->rows; row++) {
        if (is_whole) norm(n, row, n->width / LANES * LANES); /* no ends to look after */
        else norm(n, row, n->width);
    }
}

/* of_x = scale * gradient * weight - x * scale^3 * mean(gradient * weight * x); of_weight += gradient * x * scale. */
INLINE void norm_backward(const Norm *n, int64_t row, float *of_weight, const int64_t width) {
    const float *x = n->x + row * width, *gradient = n->gradient + row * width, scale = n->scales[row];
    lanes products = {0};
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), g = load_some(gradient + c, width - c);
        products += a * g * load_some(n->weight + c, width - c);
        if (of_weight) store_some(of_weight + c, load_some(of_weight + c, width - c) + a * g * scale, width - c);
    }
    const float along = sum_of(products) / (float)width * scale * scale * scale;
    for (int64_t c = 0; c < width; c += LANES) {
        const lanes a = load_some(x + c, width - c), g = load_some(gradient + c, width - c);
        store_some(n->of_x + row * width + c, g * load_some(n->weight + c, width - c) * scale - a * along, width - c);
    }
}

void covey_norm_backward(const Norm *n) {
    const int is_whole = n->width % LANES == 0;
    const int64_t blocks = (n->rows + n->block - 1) / n->block;
#pragma omp parallel for num_threads(n->num_threads) if (n->rows * n->width > WORTH_THREADS)
    for (int64_t block = 0; block < blocks; block++) {
        float *sum = n->sums ? n->sums + block * n->width : NULL;
        if (sum) memset(sum, 0, 4 * (size_t)n->width);
        for (int64_t row = block * n->block; row < smaller((block + 1) * n->block, n->rows); row++) {
            if (is_whole) norm_backward(n, row, sum, n->width / LANES * LANES);
            else norm_backward(n, row, sum, n->width);
        }
    }
    if (!n->sums) return;
    memset(n->of_weight, 0, 4 * (size_t)n->width);
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < n->width; c++) n->of_weight[c] += n->sums[block * n->width + c];
}

/* -------------------------------------------------------------------------------------------------- gates */

typedef struct {
    const float *gate, *up;       /* count each */
    float *out;                   /* forward */
    const float *gradient;        /* backward: of out */
    float *of_gate, *of_up;       /* backward */
    int64_t count, num_threads;
} Gate;

/* out = silu(gate) * up, for PIECE numbers. */
INLINE void gate_piece(const float *restrict gate, const float *restrict up, float *restrict out) {
    for (int i = 0; i < PIECE; i++) {
        const float e = exponential(-fabsf(gate[i]));
        out[i] = gate[i] * up[i] * (gate[i] < 0.0f ? e : 1.0f) / (1.0f + e);
    }
}

/* Ends of less than a PIECE are computed in full, on copies: every number goes through the same instructions. */
void covey_gate_forward(const Gate *g) {
#pragma omp parallel for num_threads(g->num_threads) if (g->count > WORTH_THREADS)
    for (int64_t at = 0; at < g->count; at += PIECE) {
        const size_t bytes = 4 * (size_t)smaller(PIECE, g->count - at);
        if (bytes == 4 * PIECE) {
            gate_piece(g->gate + at, g->up + at, g->out + at);
            continue;
        }
        float gate[PIECE] = {0}, up[PIECE] = {0}, out[PIECE];
        memcpy(gate, g->gate + at, bytes);
        memcpy(up, g->up + at, bytes);
        gate_piece(gate, up, out);
        memcpy(g->out + at, out, bytes);
    }
}

/* silu' = s * (1 + gate * (1 - s)), where s is the sigmoid of gate. */
INLINE void gate_piece_backward(const float *restrict gate, const float *restrict up, const float *restrict gradient,
                                float *restrict of_gate, float *restrict of_up) {
    for (int i = 0; i < PIECE; i++) {
        const float e = exponential(-fabsf(gate[i])), most = 1.0f / (1.0f + e), least = e * most;
        const float s = gate[i] < 0.0f ? least : most, rest = gate[i] < 0.0f ? most : least;
        of_up[i] = gradient[i] * gate[i] * s;
        of_gate[i] = gradient[i] * up[i] * s * (1.0f + gate[i] * rest);
    }
}

void covey_gate_backward(const Gate *g) {
#pragma omp parallel for num_threads(g->num_threads) if (g->count > WORTH_THREADS)
    for (int64_t at = 0; at < g->count; at += PIECE) {
        const size_t bytes = 4 * (size_t)smaller(PIECE, g->count - at);
        if (bytes == 4 * PIECE) {
            gate_piece_backward(g->gate + at, g->up + at, g->gradient + at, g->of_gate + at, g->of_up + at);
            continue;
        }
        float gate[PIECE] = {0}, up[PIECE] = {0}, gradient[PIECE] = {0}, of_gate[PIECE], of_up[PIECE];
        memcpy(gate, g->gate + at, bytes);
        memcpy(up, g->up + at, bytes);
        memcpy(gradient, g->gradient + at, bytes);
        gate_piece_backward(gate, up, gradient, of_gate, of_up);
        memcpy(g->of_gate + at, of_gate, bytes);
        memcpy(g->of_up + at, of_up, bytes);
    }
}

/* -------------------------------------------------------------------------------------------------- rotary positions */

typedef struct {
    const float *x;               /* sequences x tokens x heads x width, strides below but the last, which is 1 */
    const float *cosines, *sines; /* sequences x tokens x width */
    float *out;                   /* dense */
    int64_t strides[3], sequences, tokens, heads, width, num_threads;
    int64_t is_backward;          /* turn the gradient back */
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

void covey_rotate_heads(const Rotate *r) {
    const int64_t rows = r->sequences * r->tokens, half = r->width / 2;
#pragma omp parallel for num_threads(r->num_threads) if (rows * r->heads * r->width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = r->x + row / r->tokens * r->strides[0] + row % r->tokens * r->strides[1];
        const float *cosine = r->cosines + row * r->width, *sine = r->sines + row * r->width;
        float *out = r->out + row * r->heads * r->width;
        for (int64_t head = 0; head < r->heads; head++, x += r->strides[2], out += r->width) {
            if (r->is_backward) turn_back(x, cosine, sine, sine + half, out, half);
            else turn(x, cosine, sine, sine + half, out, half);
        }
    }
}
