/* Attention in decoding: of one new token a row, to its prompt, which the rows of a group share, and to the row's own
   tokens. What layouts.py does in some twenty operations of torch, in one pass over keys and values.

   A row's numbers depend on nothing but the row: not on its neighbours, the number of threads, or the order of the
   work. Sums are float32; keys and values are float32 or bfloat16. compiled.py mirrors struct Decode.

   The softmax is computed as blocks of keys go by (arXiv 1805.02867), so scores are never stored. Heads are multiples
   of LANES wide, up to MAX_WIDTH. */

#pragma once

#include "lanes.h"

#define MAX_WIDTH 256
#define TILE 12  /* at most so many queries read a prompt together */
#define QUAD 4   /* of them, those that are multiplied together */
#define KEYS (LANES / QUAD) /* whose products with four queries fill a vector */
#define BLOCK 64 /* keys between two looks at the largest score */

typedef struct {
    const float *query, *new_key, *new_value;         /* rows x heads x width, strides below */
    const void *prompt_keys, *prompt_values;          /* groups x key heads x prompt_slots x width */
    void *row_keys, *row_values;                      /* rows x key heads x row_slots x width */
    void *out;                                        /* rows x heads x width, rows `out_stride` apart */
    const int64_t *row_of_cell;                       /* groups x group_width; -1: no row */
    const int64_t *prompt_lengths;                    /* of groups */
    const int64_t *own_lengths;                       /* of rows, without the new token */
    const int64_t *holders;                           /* whose cache each row reads and writes; NULL: its own */
    const float *cosines, *sines;                     /* rows x turned, to which heads are turned here; NULL: they are */
    const int64_t *angle_rows;                        /* which of these rows turn to; NULL: their own */
    const float *query_norm, *key_norm;               /* of a head, before it is turned; or NULL */
    int64_t query_strides[2], key_strides[2], value_strides[2]; /* of rows and heads */
    int64_t num_rows, num_groups, group_width, num_key_heads, queries_per_key, width, prompt_slots, row_slots;
    int64_t window;                                   /* tokens seen, the new one included */
    int64_t out_stride;
    int64_t half;                                     /* whether keys and values are kept as bfloat16 */
    int64_t half_out;
    int64_t turned;
    int64_t num_threads;
    float scaling, head_eps;
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

typedef float Scores[QUAD][BLOCK];

/* Scores of one query with `count` keys, written in full vectors. */
INLINE void score_one(const Query *query, Stretch keys, int64_t count, Scores score, const int64_t width,
                      const int half) {
    for (int64_t p = 0; p < count; p += LANES) {
        lanes part[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            part[j] = products(query->query, token(keys, smaller(p + j, count - 1), width), width, half);
        store(score[0] + p, sums(part));
    }
}

/* The same for four queries: each key is read once. */
INLINE void score_quad(const Query *quad, Stretch keys, int64_t count, Scores score, const int64_t width,
                       const int half) {
    for (int64_t p = 0; p < count; p += KEYS) {
        lanes part[LANES];
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
            for (int m = 0; m < QUAD; m++)
                part[KEYS * m + j] = products(quad[m].query, token(keys, smaller(p + j, count - 1), width), width, half);
        lanes all = sums(part);
        for (int m = 0; m < QUAD; m++) memcpy(score[m] + p, (const float *)&all + KEYS * m, KEYS * sizeof(float));
    }
}

/* Make weights of `count` scores, none for the first `hidden`; returns how much what is there already shrinks. */
INLINE float weigh(Softmax *softmax, float *score, int64_t hidden, int64_t count) {
    const float before = softmax->most, most = largest(score + hidden, count - hidden, before);
    const float shrink = exponential(before - most);
    for (int64_t p = count; p % LANES; p++) score[p] = most;
    for (int64_t p = 0; p < count; p += LANES)
        for (int64_t j = p; j < p + LANES; j++) score[j] = exponential(score[j] - most);
    for (int64_t p = 0; p < hidden; p++) score[p] = 0.0f;
    softmax->sum = softmax->sum * shrink + total(score, count);
    softmax->most = most;
    return shrink;
}

/* Add weighed values to what the first `real` of `num` queries have; the order of a sum is the same for any num. */
INLINE void add_values(Query *quad, const int num, int64_t real, Scores score, const float *shrink, Stretch values,
                       int64_t count, const int64_t width, const int half) {
    const int vectors = num == 1 ? 4 : LANES / 8; /* with two sums each, as many as there are registers for */
    for (int64_t from = 0; from < width; from += vectors * LANES) {
        const int64_t here = smaller((width - from) / LANES, vectors), at = values.at + from;
        lanes even[QUAD][4] = {0}, odd[QUAD][4] = {0}; /* the next product need not wait for the last one */
#pragma GCC unroll 4
        for (int m = 0; m < num; m++)
#pragma GCC unroll 4
            for (int j = 0; j < here; j++) even[m][j] = load(quad[m].softmax.out + from + LANES * j) * shrink[m];
        int64_t p = 0;
        for (; p + 1 < count; p += 2)
#pragma GCC unroll 4
            for (int j = 0; j < here; j++) {
                const lanes first = load_at(values.base, at + p * width + LANES * j, half);
                const lanes second = load_at(values.base, at + (p + 1) * width + LANES * j, half);
#pragma GCC unroll 4
                for (int m = 0; m < num; m++) {
                    even[m][j] += score[m][p] * first;
                    odd[m][j] += score[m][p + 1] * second;
                }
            }
#pragma GCC unroll 4
        for (int m = 0; m < num; m++)
#pragma GCC unroll 4
            for (int j = 0; j < here; j++) {
                if (p < count) even[m][j] += score[m][p] * load_at(values.base, at + p * width + LANES * j, half);
                if (m < real) store(quad[m].softmax.out + from + LANES * j, even[m][j] + odd[m][j]);
            }
    }
}

/* Take a block of keys and values, from position `at` of the sequence on, into the softmax of `num` queries. */
INLINE void absorb(Query *quad, int64_t num, Stretch keys, Stretch values, int64_t at, int64_t count,
                   const int64_t width, const int half) {
    Scores score;
    float shrink[QUAD] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (num == 1)
        score_one(quad, keys, count, score, width, half);
    else
        score_quad(quad, keys, count, score, width, half);
    for (int64_t m = 0; m < num; m++)
        shrink[m] = weigh(&quad[m].softmax, score[m], smaller(count, larger(0, quad[m].first - at)), count);
    for (int64_t m = num; m < QUAD; m++) memset(score[m], 0, sizeof score[m]);
    if (num == 1)
        add_values(quad, 1, 1, score, shrink, values, count, width, half);
    else
        add_values(quad, QUAD, num, score, shrink, values, count, width, half);
}

typedef void Absorb(Query *, int64_t num, Stretch keys, Stretch values, int64_t at, int64_t count, int64_t width);

/* Known widths are unrolled. */
#define ABSORB(name, known_width, half)                                                                               \
    static void name##_##half(Query *quad, int64_t num, Stretch keys, Stretch values, int64_t at, int64_t count,      \
                              int64_t width) {                                                                        \
        (void)width;                                                                                                  \
        absorb(quad, num, keys, values, at, count, known_width, half);                                                \
    }
ABSORB(absorb_32, 32, 0)
ABSORB(absorb_32, 32, 1)
ABSORB(absorb_64, 64, 0)
ABSORB(absorb_64, 64, 1)
ABSORB(absorb_128, 128, 0)
ABSORB(absorb_128, 128, 1)
ABSORB(absorb_any, width, 0)
ABSORB(absorb_any, width, 1)

static Absorb *absorb_for(const Decode *d) {
    switch (d->width) {
    case 32: return d->half ? absorb_32_1 : absorb_32_0;
    case 64: return d->half ? absorb_64_1 : absorb_64_0;
    case 128: return d->half ? absorb_128_1 : absorb_128_0;
    default: return d->half ? absorb_any_1 : absorb_any_0;
    }
}

/* Halves of the numbers that turn, turned against each other. */
INLINE void turn(float *x, const float *cosine, const float *sine, int64_t turned) {
    const int64_t half = turned / 2;
    for (int64_t c = 0; c < half; c++) {
        const float a = x[c], b = x[half + c];
        x[c] = a * cosine[c] - b * sine[c];
        x[half + c] = b * cosine[half + c] + a * sine[half + c];
    }
}

/* A head of a row, normed and turned to its position where that is not done yet. */
INLINE void take_head(const Decode *d, const float *from, const float *weight, int64_t row, float *to) {
    memcpy(to, from, (size_t)d->width * sizeof(float));
    if (weight) norm(from, weight, to, 0, d->width, d->head_eps, 0);
    if (!d->cosines) return;
    const int64_t at = (d->angle_rows ? d->angle_rows[row] : row) * d->turned;
    turn(to, d->cosines + at, d->sines + at, d->turned);
}

/* Queries of a tile: those of whole tokens, if a token's fit in. */
INLINE int64_t tile_size(const Decode *d) {
    return d->queries_per_key > TILE ? TILE : TILE / d->queries_per_key * d->queries_per_key;
}

/* The queries of a tile; the last ones are empty where the group is smaller. */
INLINE int64_t gather(const Decode *d, int64_t group, int64_t key_head, int64_t first, Query *tile) {
    int64_t num = 0, last = smaller(first + tile_size(d), d->group_width * d->queries_per_key);
    for (int64_t i = first; i < last; i++) {
        int64_t row = d->row_of_cell[group * d->group_width + i / d->queries_per_key];
        if (row < 0) continue;
        Query *query = &tile[num++];
        query->row = row;
        query->head = key_head * d->queries_per_key + i % d->queries_per_key;
        query->first = larger(0, d->prompt_lengths[group] + d->own_lengths[row] + 1 - d->window);
        query->softmax.most = -1e30f;
        query->softmax.sum = 0.0f;
        memset(query->softmax.out, 0, (size_t)d->width * sizeof(float));
        take_head(d, d->query + row * d->query_strides[0] + query->head * d->query_strides[1], d->query_norm, row, query->query);
        for (int64_t c = 0; c < d->width; c++) query->query[c] *= d->scaling;
    }
    for (int64_t i = num; i < num + QUAD; i++) {
        tile[i].row = -1;
        memset(tile[i].query, 0, (size_t)d->width * sizeof(float));
        memset(tile[i].softmax.out, 0, (size_t)d->width * sizeof(float));
    }
    return num;
}

static void attend_to_prompt(const Decode *d, Absorb *take, int64_t group, int64_t key_head, Query *tile, int64_t num) {
    const int64_t width = d->width, length = d->prompt_lengths[group];
    const int64_t at = (group * d->num_key_heads + key_head) * d->prompt_slots;
    const Stretch keys = {d->prompt_keys, at * width}, values = {d->prompt_values, at * width};
    int64_t first = length;
    for (int64_t i = 0; i < num; i++) first = smaller(first, tile[i].first);
    for (int64_t from = first / BLOCK * BLOCK; from < length; from += BLOCK)
        for (int64_t i = 0; i < num; i += QUAD)
            take(tile + i, smaller(num - i, QUAD), token(keys, from, width), token(values, from, width), from,
                 smaller(length - from, BLOCK), width);
}

INLINE int64_t holder_of(const Decode *d, int64_t row) { return d->holders ? d->holders[row] : row; }

/* Where the keys and values of a row's own tokens begin. */
INLINE int64_t own_place(const Decode *d, int64_t row, int64_t key_head) {
    return (holder_of(d, row) * d->num_key_heads + key_head) * d->row_slots * d->width;
}

/* Cache a row's new token. */
INLINE void write_new(const Decode *d, int64_t row, int64_t key_head) {
    const int64_t at = own_place(d, row, key_head) + d->own_lengths[row] * d->width;
    float key[MAX_WIDTH];
    take_head(d, d->new_key + row * d->key_strides[0] + key_head * d->key_strides[1], d->key_norm, row, key);
    const float *value = d->new_value + row * d->value_strides[0] + key_head * d->value_strides[1];
    for (int64_t c = 0; c < d->width; c++) {
        put(d->row_keys, at + c, key[c], d->half != 0);
        put(d->row_values, at + c, value[c], d->half != 0);
    }
}

/* Queries of one row. */
static void attend_to_own(const Decode *d, Absorb *take, int64_t group, int64_t key_head, Query *quad, int64_t num) {
    const int64_t row = quad->row, own = d->own_lengths[row], at = own_place(d, row, key_head), width = d->width;
    const int64_t prompt_length = d->prompt_lengths[group];
    const Stretch keys = {d->row_keys, at}, values = {d->row_values, at};
    /* Written anew wherever a row's queries are in several tiles, with the same bits. */
    if (!d->holders) write_new(d, row, key_head);
    fetch(d->row_values, at, smaller(own, BLOCK) * width, d->half != 0);
    for (int64_t from = larger(0, quad->first - prompt_length) / BLOCK * BLOCK; from <= own; from += BLOCK)
        take(quad, num, token(keys, from, width), token(values, from, width), prompt_length + from,
             smaller(own + 1 - from, BLOCK), width);
    for (int64_t m = 0; m < num; m++) {
        const int64_t to = row * d->out_stride + quad[m].head * width;
        for (int64_t c = 0; c < width; c++)
            put_operand(d->out, to + c, quad[m].softmax.out[c] / quad[m].softmax.sum, d->half_out != 0);
    }
}

/* How many queries from `tile` on are of one row, at most four. */
INLINE int64_t of_one_row(const Query *tile, int64_t num) {
    int64_t count = 1;
    while (count < smaller(num, QUAD) && tile[count].row == tile->row) count++;
    return count;
}

static void attend(const Decode *d, Absorb *take, int64_t group, int64_t key_head, int64_t first) {
    Query tile[TILE + QUAD]; /* the last quad may reach beyond */
    const int64_t num = gather(d, group, key_head, first, tile);
    attend_to_prompt(d, take, group, key_head, tile, num);
    for (int64_t i = 0, count; i < num; i += count) {
        count = of_one_row(tile + i, num - i);
        if (i + count < num) {
            const int64_t next = tile[i + count].row;
            const int64_t numbers = smaller(d->own_lengths[next], BLOCK) * d->width;
            fetch(d->row_keys, own_place(d, next, key_head), numbers, d->half != 0);
        }
        attend_to_own(d, take, group, key_head, &tile[i], count);
    }
}

/* Begin to read what is cached, one of so many parts of a thread's share: the first block of each holder, for what comes
   next of it the processor looks ahead. */
INLINE void fetch_part(const Decode *d, int64_t thread, int64_t threads, int64_t part, int64_t parts) {
    const int64_t prompts = d->num_groups * d->num_key_heads, all = prompts + d->num_rows * d->num_key_heads;
    const int64_t from = thread * parts + part;
    for (int64_t i = all * from / (threads * parts); i < all * (from + 1) / (threads * parts); i++) {
        const int is_prompt = i < prompts;
        const int64_t holder = (is_prompt ? i : i - prompts) / d->num_key_heads, key_head = i % d->num_key_heads;
        const int64_t at = is_prompt ? i * d->prompt_slots * d->width : own_place(d, holder, key_head);
        const int64_t length = is_prompt ? d->prompt_lengths[holder] : d->own_lengths[holder];
        fetch(is_prompt ? d->prompt_keys : d->row_keys, at, smaller(length, BLOCK) * d->width, d->half != 0);
        fetch(is_prompt ? d->prompt_values : d->row_values, at, smaller(length, BLOCK) * d->width, d->half != 0);
    }
}

/* By all threads of a parallel region. */
INLINE void decode_attention(const Decode *d) {
    const int64_t size = tile_size(d), tiles = (d->group_width * d->queries_per_key + size - 1) / size;
    const int64_t total = d->num_groups * d->num_key_heads * tiles;
    Absorb *take = absorb_for(d);
    /* Tokens of one holder read each other: all are there before the first is read. */
    if (d->holders) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < d->num_rows; row++)
            for (int64_t key_head = 0; key_head < d->num_key_heads; key_head++) write_new(d, row, key_head);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < total; task++) {
        const int64_t group = task / (d->num_key_heads * tiles), key_head = task / tiles % d->num_key_heads;
        const int64_t first = task % tiles * size;
        attend(d, take, group, key_head, first);
    }
}
