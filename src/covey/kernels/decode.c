/* Attention in decoding: of one new token a row, to its prompt, which the rows of a group share, and to the row's own
   tokens. What layouts.py does in some twenty operations of torch, in one pass over keys and values.

   A row's numbers depend on nothing but the row: not on its neighbours, the number of threads, or the order of the
   work. Sums are float32; keys and values are float32 or bfloat16. compiled.py calls covey_decode_attention and mirrors
   struct Decode.

   The softmax is computed as blocks of keys go by (arXiv 1805.02867), so scores are never stored. Heads are multiples
   of LANES wide, up to MAX_WIDTH. */

#include "lanes.h"

#define MAX_WIDTH 256
#define TILE 8   /* queries that read the keys of a prompt together */
#define BLOCK 64 /* keys between two looks at the largest score */

typedef struct {
    const float *query, *new_key, *new_value;         /* rows x heads x width, strides below */
    const void *prompt_keys, *prompt_values;          /* groups x key heads x prompt_slots x width */
    void *row_keys, *row_values;                      /* rows x key heads x row_slots x width */
    float *out;                                       /* rows x heads x width */
    const int64_t *row_of_cell;                       /* groups x group_width; -1: no row */
    const int64_t *prompt_lengths;                    /* of groups */
    const int64_t *own_lengths;                       /* of rows, without the new token */
    int64_t query_strides[2], key_strides[2], value_strides[2]; /* of rows and heads */
    int64_t num_groups, group_width, num_key_heads, queries_per_key, width, prompt_slots, row_slots;
    int64_t window;                                   /* tokens seen, the new one included */
    int64_t half;                                     /* whether keys and values are kept as bfloat16 */
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

/* A stretch of keys or values: numbers `at` .. of an array, `width` for each token. */
typedef struct {
    const void *base;
    int64_t at;
} Stretch;

INLINE lanes products(const float *a, Stretch b, const int64_t width, const int half) {
    lanes sum = load(a) * load_at(b.base, b.at, half);
    for (int64_t d = LANES; d < width; d += LANES) sum += load(a + d) * load_at(b.base, b.at + d, half);
    return sum;
}

INLINE Stretch token(Stretch keys, int64_t index, const int64_t width) {
    return (Stretch){keys.base, keys.at + index * width};
}

/* Scores of one query with `count` keys; blocks of scores are written in full sixteens. */
INLINE void score_own(const float *query, Stretch keys, int64_t count, float *score, const int64_t width,
                      const int half) {
    for (int64_t p = 0; p < count; p += LANES) {
        lanes part[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            part[j] = products(query, token(keys, smaller(p + j, count - 1), width), width, half);
        store(score + p, sums(part));
    }
}

/* The same for a tile of queries, four queries by four keys at a time: each key is read once for four queries. */
INLINE void score_tile(const Query *tile, int64_t num, Stretch keys, int64_t count, float score[TILE][BLOCK],
                       const int64_t width, const int half) {
    for (int64_t p = 0; p < count; p += 4)
        for (int64_t i = 0; i < num; i += 4) {
            lanes part[LANES];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                for (int m = 0; m < 4; m++)
                    part[4 * m + j] =
                        products(tile[i + m].query, token(keys, smaller(p + j, count - 1), width), width, half);
            lanes all = sums(part);
            for (int m = 0; m < 4; m++) memcpy(score[i + m] + p, (const float *)&all + 4 * m, 4 * sizeof(float));
        }
}

/* Take `count` more scores, and the values they weigh, into the softmax. */
INLINE void absorb(Softmax *softmax, float *score, Stretch values, int64_t count, const int64_t width, const int half) {
    float most = softmax->most, sum = 0.0f;
    for (int64_t p = 0; p < count; p++) most = score[p] > most ? score[p] : most;
    const float shrink = exponential(softmax->most - most);
    for (int64_t p = 0; p < count; p++) {
        score[p] = exponential(score[p] - most);
        sum += score[p];
    }
    for (int64_t from = 0; from < width; from += 4 * LANES) {
        const int64_t num = smaller((width - from) / LANES, 4), at = values.at + from;
        lanes even[4] = {0}, odd[4] = {0}; /* two sums: the next product need not wait for the last one */
#pragma GCC unroll 4
        for (int j = 0; j < num; j++) even[j] = load(softmax->out + from + LANES * j) * shrink;
        int64_t p = 0;
        for (; p + 1 < count; p += 2)
#pragma GCC unroll 4
            for (int j = 0; j < num; j++) {
                even[j] += score[p] * load_at(values.base, at + p * width + LANES * j, half);
                odd[j] += score[p + 1] * load_at(values.base, at + (p + 1) * width + LANES * j, half);
            }
#pragma GCC unroll 4
        for (int j = 0; j < num; j++) {
            if (p < count) even[j] += score[p] * load_at(values.base, at + p * width + LANES * j, half);
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
                             const int64_t width, const int half) {
    const int64_t length = d->prompt_lengths[group], at = (group * d->num_key_heads + key_head) * d->prompt_slots;
    const Stretch keys = {d->prompt_keys, at * width}, values = {d->prompt_values, at * width};
    float score[TILE][BLOCK];
    for (int64_t from = 0; from < length; from += BLOCK) {
        const int64_t here = smaller(length - from, BLOCK);
        score_tile(tile, num, token(keys, from, width), here, score, width, half);
        for (int64_t i = 0; i < num; i++) {
            const int64_t hidden = larger(0, tile[i].first - from);
            if (hidden < here)
                absorb(&tile[i].softmax, score[i] + hidden, token(values, from + hidden, width), here - hidden, width,
                       half);
        }
    }
}

/* Where the keys and values of a row's own tokens begin. */
INLINE int64_t own_place(const Decode *d, int64_t row, int64_t key_head, const int64_t width) {
    return (row * d->num_key_heads + key_head) * d->row_slots * width;
}

INLINE void attend_to_own(const Decode *d, int64_t group, int64_t key_head, Query *query, const int64_t width,
                          const int half) {
    const int64_t row = query->row, own = d->own_lengths[row], at = own_place(d, row, key_head, width);
    const Stretch keys = {d->row_keys, at}, values = {d->row_values, at};
    const float *new_key = d->new_key + row * d->key_strides[0] + key_head * d->key_strides[1];
    const float *new_value = d->new_value + row * d->value_strides[0] + key_head * d->value_strides[1];
    /* Written anew for each of its queries, with the same bits. */
    for (int64_t c = 0; c < width; c++) {
        put(d->row_keys, at + own * width + c, new_key[c], half);
        put(d->row_values, at + own * width + c, new_value[c], half);
    }
    fetch(d->row_values, at, smaller(own, BLOCK) * width, half);
    float score[BLOCK];
    for (int64_t from = larger(0, query->first - d->prompt_lengths[group]); from <= own; from += BLOCK) {
        const int64_t here = smaller(own + 1 - from, BLOCK);
        score_own(query->query, token(keys, from, width), here, score, width, half);
        absorb(&query->softmax, score, token(values, from, width), here, width, half);
    }
    float *out = d->out + (row * d->num_key_heads * d->queries_per_key + query->head) * width;
    for (int64_t c = 0; c < width; c++) out[c] = query->softmax.out[c] / query->softmax.sum;
}

INLINE void attend(const Decode *d, int64_t group, int64_t key_head, int64_t first, const int64_t width,
                   const int half) {
    Query tile[TILE];
    const int64_t num = gather(d, group, key_head, first, tile);
    attend_to_prompt(d, group, key_head, tile, num, width, half);
    for (int64_t i = 0; i < num; i++) {
        if (i + 1 < num) {
            const int64_t next = tile[i + 1].row;
            fetch(d->row_keys, own_place(d, next, key_head, width), smaller(d->own_lengths[next], BLOCK) * width, half);
        }
        attend_to_own(d, group, key_head, &tile[i], width, half);
    }
}

/* Known widths are unrolled. */
INLINE void attend_in_width(const Decode *d, int64_t group, int64_t key_head, int64_t first, const int half) {
    switch (d->width) {
    case 32: attend(d, group, key_head, first, 32, half); break;
    case 64: attend(d, group, key_head, first, 64, half); break;
    case 128: attend(d, group, key_head, first, 128, half); break;
    default: attend(d, group, key_head, first, d->width, half);
    }
}

void covey_decode_attention(const Decode *d) {
    const int64_t tiles = (d->group_width * d->queries_per_key + TILE - 1) / TILE;
    const int64_t total = d->num_groups * d->num_key_heads * tiles;
#pragma omp parallel for schedule(dynamic, 1) num_threads(d->num_threads)
    for (int64_t task = 0; task < total; task++) {
        const int64_t group = task / (d->num_key_heads * tiles), key_head = task / tiles % d->num_key_heads;
        const int64_t first = task % tiles * TILE;
        if (d->half)
            attend_in_width(d, group, key_head, first, 1);
        else
            attend_in_width(d, group, key_head, first, 0);
    }
}
