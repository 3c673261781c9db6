/* What decoding does between products of matrices: norms, rotary positions, attention. Float32.

   A row's numbers depend on nothing but the row: not on its neighbours, the number of threads, or the order of the
   work. compiled.py calls covey_decode_attention and mirrors struct Decode, fused.py calls the other two.

   Attention is that of one new token a row, to its prompt, which the rows of a group share, and to the row's own tokens:
   what layouts.py does in some twenty operations of torch, in one pass over keys and values. The softmax is computed as
   blocks of keys go by (arXiv 1805.02867), so scores are never stored. Heads are multiples of LANES wide, up to
   MAX_WIDTH. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define MAX_WIDTH 256
#define TILE 8   /* queries that read the keys of a prompt together */
#define BLOCK 64 /* keys between two looks at the largest score */
#define WORTH_THREADS 65536 /* numbers from which small work is shared among threads */
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *query, *new_key, *new_value;         /* rows x heads x width, strides below */
    const float *prompt_keys, *prompt_values;         /* groups x key heads x prompt_slots x width */
    float *row_keys, *row_values;                     /* rows x key heads x row_slots x width */
    float *out;                                       /* rows x heads x width */
    const int64_t *row_of_cell;                       /* groups x group_width; -1: no row */
    const int64_t *prompt_lengths;                    /* of groups */
    const int64_t *own_lengths;                       /* of rows, without the new token */
    int64_t query_strides[2], key_strides[2], value_strides[2]; /* of rows and heads */
    int64_t num_groups, group_width, num_key_heads, queries_per_key, width, prompt_slots, row_slots;
    int64_t window;                                   /* tokens seen, the new one included */
    int64_t num_threads;
    float scaling;
} Decode;

typedef struct {
    float most, sum; /* largest score so far; sum of exp(score - most) */
    float out[MAX_WIDTH];
} Softmax;

typedef struct {
    int64_t row, head, first; /* first position that its window shows */
    float query[MAX_WIDTH];
    Softmax softmax;
} Query;

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Begin to read so many floats: what comes next is somewhere else in memory, where the processor does not look ahead. */
INLINE void fetch(const float *from, int64_t count) {
    for (int64_t c = 0; c < count; c += LANES) __builtin_prefetch(from + c, 0, 2);
}

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
        b[i] = __builtin_shufflevector(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        c[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        d[i] = __builtin_shufflevector(c[i], c[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(c[i], c[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(d[0], d[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(d[0], d[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

INLINE lanes products(const float *a, const float *b, const int64_t width) {
    lanes sum = load(a) * load(b);
    for (int64_t d = LANES; d < width; d += LANES) sum += load(a + d) * load(b + d);
    return sum;
}

/* Scores of one query with `count` keys; blocks of scores are written in full sixteens. */
INLINE void score_own(const float *query, const float *keys, int64_t count, float *score, const int64_t width) {
    for (int64_t p = 0; p < count; p += LANES) {
        lanes part[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) part[j] = products(query, keys + smaller(p + j, count - 1) * width, width);
        store(score + p, sums(part));
    }
}

/* The same for a tile of queries, four queries by four keys at a time: each key is read once for four queries. */
INLINE void score_tile(const Query *tile, int64_t num, const float *keys, int64_t count, float score[TILE][BLOCK],
                       const int64_t width) {
    for (int64_t p = 0; p < count; p += 4)
        for (int64_t i = 0; i < num; i += 4) {
            lanes part[LANES];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                for (int m = 0; m < 4; m++)
                    part[4 * m + j] = products(tile[i + m].query, keys + smaller(p + j, count - 1) * width, width);
            lanes all = sums(part);
            for (int m = 0; m < 4; m++) memcpy(score[i + m] + p, (const float *)&all + 4 * m, 4 * sizeof(float));
        }
}

/* Take `count` more scores, and the values they weigh, into the softmax. */
INLINE void absorb(Softmax *softmax, float *score, const float *values, int64_t count, const int64_t width) {
    float most = softmax->most, sum = 0.0f;
    for (int64_t p = 0; p < count; p++) most = score[p] > most ? score[p] : most;
    const float shrink = exponential(softmax->most - most);
    for (int64_t p = 0; p < count; p++) {
        score[p] = exponential(score[p] - most);
        sum += score[p];
    }
    for (int64_t from = 0; from < width; from += 4 * LANES) {
        const int64_t num = smaller((width - from) / LANES, 4);
        lanes even[4] = {0}, odd[4] = {0}; /* two sums: the next product need not wait for the last one */
#pragma GCC unroll 4
        for (int j = 0; j < num; j++) even[j] = load(softmax->out + from + LANES * j) * shrink;
        int64_t p = 0;
        for (; p + 1 < count; p += 2)
#pragma GCC unroll 4
            for (int j = 0; j < num; j++) {
                even[j] += score[p] * load(values + p * width + from + LANES * j);
                odd[j] += score[p + 1] * load(values + (p + 1) * width + from + LANES * j);
            }
#pragma GCC unroll 4
        for (int j = 0; j < num; j++) {
            if (p < count) even[j] += score[p] * load(values + p * width + from + LANES * j);
            store(softmax->out + from + LANES * j, even[j] + odd[j]);
        }
    }
    softmax->sum = softmax->sum * shrink + sum;
    softmax->most = most;
}

/* The queries of a tile; the last ones are empty where the group is smaller. */
INLINE int64_t gather(const Decode *d, int64_t group, int64_t key_head, int64_t first, Query tile[TILE]) {
    memset(tile, 0, TILE * sizeof(Query));
    int64_t num = 0, last = smaller(first + TILE, d->group_width * d->queries_per_key);
    for (int64_t i = first; i < last; i++) {
        int64_t row = d->row_of_cell[group * d->group_width + i / d->queries_per_key];
        if (row < 0) continue;
        Query *query = &tile[num++];
        query->row = row;
        query->head = key_head * d->queries_per_key + i % d->queries_per_key;
        query->first = larger(0, d->prompt_lengths[group] + d->own_lengths[row] + 1 - d->window);
        query->softmax.most = -1e30f;
        const float *from = d->query + row * d->query_strides[0] + query->head * d->query_strides[1];
        for (int64_t c = 0; c < d->width; c++) query->query[c] = from[c] * d->scaling;
    }
    return num;
}

INLINE void attend_to_prompt(const Decode *d, int64_t group, int64_t key_head, Query tile[TILE], int64_t num,
                             const int64_t width) {
    const int64_t length = d->prompt_lengths[group], at = (group * d->num_key_heads + key_head) * d->prompt_slots;
    float score[TILE][BLOCK];
    for (int64_t from = 0; from < length; from += BLOCK) {
        const int64_t here = smaller(length - from, BLOCK);
        score_tile(tile, num, d->prompt_keys + (at + from) * width, here, score, width);
        for (int64_t i = 0; i < num; i++) {
            const int64_t hidden = larger(0, tile[i].first - from);
            if (hidden < here)
                absorb(&tile[i].softmax, score[i] + hidden, d->prompt_values + (at + from + hidden) * width,
                       here - hidden, width);
        }
    }
}

INLINE void attend_to_own(const Decode *d, int64_t group, int64_t key_head, Query *query, const int64_t width) {
    const int64_t row = query->row, own = d->own_lengths[row];
    float *keys = d->row_keys + (row * d->num_key_heads + key_head) * d->row_slots * width;
    float *values = d->row_values + (row * d->num_key_heads + key_head) * d->row_slots * width;
    /* Written anew for each of its queries, with the same bits. */
    memcpy(keys + own * width, d->new_key + row * d->key_strides[0] + key_head * d->key_strides[1], 4 * width);
    memcpy(values + own * width, d->new_value + row * d->value_strides[0] + key_head * d->value_strides[1], 4 * width);
    fetch(values, smaller(own, BLOCK) * width);
    float score[BLOCK];
    for (int64_t from = larger(0, query->first - d->prompt_lengths[group]); from <= own; from += BLOCK) {
        const int64_t here = smaller(own + 1 - from, BLOCK);
        score_own(query->query, keys + from * width, here, score, width);
        absorb(&query->softmax, score, values + from * width, here, width);
    }
    float *out = d->out + (row * d->num_key_heads * d->queries_per_key + query->head) * width;
    for (int64_t c = 0; c < width; c++) out[c] = query->softmax.out[c] / query->softmax.sum;
}

INLINE void attend(const Decode *d, int64_t group, int64_t key_head, int64_t first, const int64_t width) {
    Query tile[TILE];
    const int64_t num = gather(d, group, key_head, first, tile);
    attend_to_prompt(d, group, key_head, tile, num, width);
    for (int64_t i = 0; i < num; i++) {
        if (i + 1 < num) {
            const int64_t next = tile[i + 1].row;
            fetch(d->row_keys + (next * d->num_key_heads + key_head) * d->row_slots * width,
                  smaller(d->own_lengths[next], BLOCK) * width);
        }
        attend_to_own(d, group, key_head, &tile[i], width);
    }
}

void covey_decode_attention(const Decode *d) {
    const int64_t tiles = (d->group_width * d->queries_per_key + TILE - 1) / TILE;
    const int64_t total = d->num_groups * d->num_key_heads * tiles;
#pragma omp parallel for schedule(dynamic, 1) num_threads(d->num_threads)
    for (int64_t task = 0; task < total; task++) {
        const int64_t group = task / (d->num_key_heads * tiles), key_head = task / tiles % d->num_key_heads;
        const int64_t first = task % tiles * TILE;
        switch (d->width) { /* known widths are unrolled */
        case 32: attend(d, group, key_head, first, 32); break;
        case 64: attend(d, group, key_head, first, 64); break;
        case 128: attend(d, group, key_head, first, 128); break;
        default: attend(d, group, key_head, first, d->width);
        }
    }
}

INLINE void norm(const float *x, const float *weight, float *out, int64_t width, float eps) {
    float sum = 0.0f;
    for (int64_t c = 0; c < width; c++) sum += x[c] * x[c];
    const float scale = 1.0f / sqrtf(sum / (float)width + eps);
    for (int64_t c = 0; c < width; c++) out[c] = x[c] * scale * weight[c];
}

/* out = x / sqrt(mean(x^2) + eps) * weight, row by row. */
void covey_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps,
                    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) norm(x + row * width, weight, out + row * width, width, eps);
}

typedef struct {
    float *heads;                          /* rows x (num_rotated + others) x width, changed in place */
    const float *cosines, *sines;          /* rows x width */
    const float *query_norm, *key_norm;    /* width each, or NULL for none */
    int64_t rows, num_heads, num_queries, num_rotated, width, num_threads;
    float eps;
} Rotation;

/* Norms of queries and keys, where there are any, and their rotary positions: halves of a head turn against each other. */
void covey_rotate(const Rotation *r) {
    const int64_t half = r->width / 2;
#pragma omp parallel for num_threads(r->num_threads) if (r->rows * r->num_rotated * r->width > WORTH_THREADS)
    for (int64_t row = 0; row < r->rows; row++) {
        const float *cosine = r->cosines + row * r->width, *sine = r->sines + row * r->width;
        for (int64_t head = 0; head < r->num_rotated; head++) {
            float *x = r->heads + (row * r->num_heads + head) * r->width;
            const float *weight = head < r->num_queries ? r->query_norm : r->key_norm;
            if (weight) norm(x, weight, x, r->width, r->eps);
            for (int64_t c = 0; c < half; c++) {
                const float a = x[c], b = x[half + c];
                x[c] = a * cosine[c] - b * sine[c];
                x[half + c] = b * cosine[half + c] + a * sine[half + c];
            }
        }
    }
}
