/* Attention of the training pass over a packed stream, forward and backward, of float32 or bfloat16: this is widened
   where it is read, and what comes out is rounded once. compiled.py calls the two functions at the end and mirrors
   struct Attention.

   Scores live for a tile of queries and keys only (arXiv 2205.14135, 2307.08691): of the forward pass the outputs
   and each query's logarithm of its sum of exponentials stay, from which the backward pass makes the weights anew. A
   task is a chunk of consecutive tokens that share a prefix, and a head; it goes through the keys tile by tile.
   Every number is written by one task in an order that follows from the segment alone, so that neither the number of
   threads nor what else is in the stream changes a bit. What several tasks add to the keys of a prefix lies apart
   until all are done.

   Products are sums of outer products: a few rows by a few vectors are held in registers while the sum goes on. Heads
   are multiples of LANES wide, up to MAX_WIDTH. */

#include "outer_products.h"

#define MAX_WIDTH 256
#define TILE 64   /* keys, and in the backward pass queries, of a tile */
#define CHUNK 256 /* most tokens of a task of the forward pass */
#define SLICES 8  /* into which the sums over a prefix are shared out */
#define PADDED (TILE + ROWS) /* the last rows may go beyond a tile */
#define NOTHING -3e38f       /* the score of a key that isn't seen: its exponential is 0 */
#define AHEAD 12             /* tokens that are fetched before they are read */
#define ALIGNED __attribute__((aligned(4 * LANES)))

static const float ALL[ROWS] = {[0 ... ROWS - 1] = 1.0f}; /* keep as it is */

typedef struct {
    void *at;
    int64_t head, token; /* strides */
    int64_t half;        /* bfloat16 */
} Heads;

typedef struct {
    Heads query, key, value, out;                       /* heads x tokens x width; what is computed is float */
    Heads out_gradient, query_gradient, key_gradient, value_gradient;
    Heads out_rounded, query_rounded, key_rounded, value_rounded; /* the same, where bfloat16 is asked for, or NULL */
    float *log_sum;                                     /* heads x tokens, to the base 2 */
    float *product;                                     /* heads x tokens, room for the backward pass */
    float *partial;                                     /* key heads x 2 x partial_tokens x width, room as well */
    const int64_t *branch;                              /* of tokens: where its own stretch of the stream begins */
    const int64_t *chunks;                              /* struct Chunk each */
    int64_t num_chunks, num_tokens, partial_tokens, num_heads, queries_per_key, width, window, num_threads;
    float scaling;
} Attention;

typedef struct {
    int64_t first, length, prefix, prefix_length; /* tokens of the stream */
    int64_t partial;                              /* where its sums over the prefix lie */
} Chunk;

/* Keys of a tile: those from `first` on in the stream, whose positions begin at `position`. */
typedef struct {
    int64_t first, count, position;
} Keys;

/* ---------------------------------------------------------------------------------------------------- vectors */

/* 2^x for x <= 0, to 2e-7, and 0 below 2^-126; a polynomial with the least largest relative error. NaN stays NaN. */
INLINE lanes power_of_two(lanes x) {
    const ints whole = __builtin_convertvector(x - 0.5f, ints);
    const lanes r = x - __builtin_convertvector(whole, lanes);
    lanes y = 9.6715126882e-3f + r * 1.3264727247e-3f;
    y = y * r + 5.5507337436e-2f;
    y = y * r + 2.4022242085e-1f;
    y = y * r + 6.9314697760e-1f;
    y = y * r + 1.0f;
    return (lanes)((ints)(y * (lanes)((whole + 127) << 23)) & ~(x < -126.0f));
}

#define LARGEST_PARTS(a, size, num)                                                                                   \
    _Pragma("GCC unroll 4") for (int i = 0; i < num; i++) a[i] =                                                      \
        larger_of(LOWER_##size(a[i], a[i + num]), UPPER_##size(a[i], a[i + num]))

/* The largest number of each of 8 vectors, which change: pairs of halves, of quarters, and so on. */
INLINE lanes largest_of_each(lanes a[8]) {
#if LANES == 16
    LARGEST_PARTS(a, 8, 4);
    LARGEST_PARTS(a, 4, 2);
    LARGEST_PARTS(a, 2, 1);
    a[0] = larger_of(a[0], TURNED_1(a[0]));
    return SHUFFLE(a[0], a[0], 0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
#else
    LARGEST_PARTS(a, 4, 4);
    LARGEST_PARTS(a, 2, 2);
    LARGEST_PARTS(a, 1, 1);
    return a[0];
#endif
}

/* Products of ROWS queries with the first keys of a tile, so many vectors of them. */
INLINE void with_keys(float *to, const float *rows, const float *columns, int64_t vectors, int64_t width) {
    multiply(to, TILE, ROWS, NULL, (Terms){rows, columns, width, 1, TILE, width}, vectors);
}

/* ---------------------------------------------------------------------------------------------------- tiles */

INLINE int64_t place_of(const Heads *heads, int64_t head, int64_t token) {
    return head * heads->head + token * heads->token;
}

INLINE float *row_of(const Heads *floats, int64_t head, int64_t token) {
    return (float *)floats->at + place_of(floats, head, token);
}

/* Begin to read a token AHEAD of one. */
INLINE void fetch_row(const Heads *heads, int64_t head, int64_t token, int64_t width) {
    fetch(heads->at, place_of(heads, head, token + AHEAD), width, (int)heads->half);
}

INLINE lanes part_of(const Heads *heads, int64_t head, int64_t token, int64_t d) {
    return load_at(heads->at, place_of(heads, head, token) + d, (int)heads->half);
}

INLINE void round_row(const Heads *to, const float *sums, int64_t head, int64_t token, int64_t width) {
    for (int64_t d = 0; to->at && d < width; d += LANES) {
        const words near = rounded_lanes(load(sums + d)) >> 16;
        const halves value = __builtin_convertvector(near, halves);
        memcpy((uint16_t *)to->at + place_of(to, head, token) + d, &value, sizeof value);
    }
}

/* Rows of a head one after the other, and zeros up to a multiple of ROWS. */
INLINE void gather(float *to, const Heads *heads, int64_t head, int64_t first, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; i++) {
        fetch_row(heads, head, first + i, width);
        for (int64_t d = 0; d < width; d += LANES) store(to + i * width + d, part_of(heads, head, first + i, d));
    }
    memset(to + count * width, 0, ROWS * 4 * width);
}

/* The same as columns of a tile, times a factor; zeros up to a multiple of LANES. */
INLINE void gather_columns(float *to, const Heads *heads, int64_t head, int64_t first, int64_t count, float factor,
                           int64_t width) {
    for (int64_t key = 0; key < count; key += LANES)
        for (int64_t d = 0; d < width; d += LANES) {
            lanes block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                block[i] = key + i < count ? part_of(heads, head, first + key + i, d) * factor : (lanes){0};
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(to + (d + i) * TILE + key, block[i]);
        }
}

/* What some rows see of a tile of keys. */
typedef struct {
    int64_t vectors; /* of keys, up to the last one that any row sees; 0: none is seen */
    int is_masked;   /* not all rows see all of them */
} Sight;

INLINE Sight sight(const int64_t *position, int64_t num, Keys keys, int64_t window) {
    int64_t latest = -1, earliest = INT64_MAX;
    for (int64_t i = 0; i < num; i++) {
        latest = larger(latest, position[i]);
        earliest = smaller(earliest, position[i]);
    }
    const int64_t seen = smaller(keys.count, latest + 1 - keys.position);
    if (seen <= 0 || earliest - window >= keys.position + keys.count - 1) return (Sight){0, 0};
    const int64_t vectors = (seen + LANES - 1) / LANES, end = keys.position + vectors * LANES;
    return (Sight){vectors, vectors * LANES > keys.count || earliest + 1 < end || latest - window >= keys.position};
}

/* A row's scores with NOTHING where it doesn't see the key. */
INLINE void hide(float *score, int64_t position, Keys keys, int64_t window, int64_t vectors) {
    const int32_t end = (int32_t)larger(0, smaller(keys.count, position + 1 - keys.position));
    const int32_t begin = (int32_t)smaller(TILE, larger(0, position + 1 - window - keys.position));
    const ints place = PLACES;
    for (int32_t j = 0; j < vectors; j++) {
        const ints key = place + LANES * j;
        store(score + LANES * j, chosen((key >= begin) & (key < end), load(score + LANES * j), (lanes){0} + NOTHING));
    }
}

/* The end of the stretch that a token belongs to, or of its chunk. */
INLINE int64_t end_of(const Attention *t, int64_t token, int64_t end) {
    const int64_t branch = t->branch[token];
    while (token < end && t->branch[token] == branch) token++;
    return token;
}

/* ---------------------------------------------------------------------------------------------------- forward */

typedef struct {
    float query[(CHUNK + ROWS) * MAX_WIDTH] ALIGNED, out[CHUNK * MAX_WIDTH] ALIGNED;
    float columns[MAX_WIDTH * TILE] ALIGNED, value[(TILE + ROWS) * MAX_WIDTH] ALIGNED;
    lanes sum[CHUNK];          /* of exponentials, in LANES parts */
    float most[CHUNK + LANES]; /* largest score so far */
    int64_t position[CHUNK];
} Forward;

/* Take the scores of ROWS rows, of which `num` count, into their softmaxes. What was summed before is to be multiplied
   by `shrink`. */
INLINE void absorb(Forward *f, int64_t row, int64_t num, float *score, float shrink[LANES], int64_t vectors) {
    lanes all[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) all[i] = i < ROWS ? load(score + i * TILE) : (lanes){0};
    for (int64_t j = LANES; j < LANES * vectors; j += LANES)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) all[i] = larger_of(all[i], load(score + i * TILE + j));
    const lanes before = load(f->most + row), most = larger_of(largest_of_each(all), before);
    store(shrink, power_of_two(before - most));
    memcpy(f->most + row, &most, 4 * num);
    for (int64_t i = 0; i < num; i++) {
        lanes added = {0};
        for (int64_t j = i * TILE; j < i * TILE + LANES * vectors; j += LANES) {
            const lanes weight = power_of_two(load(score + j) - f->most[row + i]);
            store(score + j, weight);
            added += weight;
        }
        f->sum[row + i] = f->sum[row + i] * shrink[i] + added;
    }
}

/* Rows from..to of a chunk look at a tile of keys. */
INLINE void look(const Attention *t, Forward *f, int64_t key_head, int64_t from, int64_t to, Keys keys,
                 int64_t width) {
    float score[ROWS * TILE] ALIGNED, shrink[LANES];
    gather_columns(f->columns, &t->key, key_head, keys.first, keys.count, t->scaling * 1.44269504089f, width);
    gather(f->value, &t->value, key_head, keys.first, keys.count, width);
    for (int64_t row = from; row < to; row += ROWS) {
        const int64_t num = smaller(ROWS, to - row);
        const Sight seen = sight(f->position + row, num, keys, t->window);
        if (!seen.vectors) continue;
        with_keys(score, f->query + row * width, f->columns, seen.vectors, width);
        for (int64_t i = 0; seen.is_masked && i < num; i++)
            hide(score + i * TILE, f->position[row + i], keys, t->window, seen.vectors);
        absorb(f, row, num, score, shrink, seen.vectors);
        const Terms terms = {score, f->value, TILE, 1, width, smaller(seen.vectors * LANES, keys.count)};
        multiply(f->out + row * width, width, num, shrink, terms, width / LANES);
    }
}

INLINE void attend(const Attention *t, Chunk chunk, int64_t head, int64_t width) {
    Forward f;
    const int64_t key_head = head / t->queries_per_key, end = chunk.first + chunk.length;
    gather(f.query, &t->query, head, chunk.first, chunk.length, width);
    memset(f.out, 0, chunk.length * 4 * width);
    for (int64_t i = 0; i < chunk.length; i++) {
        f.position[i] = chunk.prefix_length + chunk.first + i - t->branch[chunk.first + i];
        f.most[i] = -1e30f;
        f.sum[i] = (lanes){0};
    }
    for (int64_t p = 0; p < chunk.prefix_length; p += TILE)
        look(t, &f, key_head, 0, chunk.length, (Keys){chunk.prefix + p, smaller(TILE, chunk.prefix_length - p), p},
             width);
    for (int64_t from = chunk.first, to; from < end; from = to) {
        to = end_of(t, from, end);
        const int64_t branch = t->branch[from];
        for (int64_t p = 0; branch + p < to; p += TILE)
            look(t, &f, key_head, larger(from, branch + p) - chunk.first, to - chunk.first,
                 (Keys){branch + p, smaller(TILE, to - branch - p), chunk.prefix_length + p}, width);
    }
    for (int64_t i = 0; i < chunk.length; i++) {
        const float sum = sum_of(f.sum[i]);
        float *out = f.out + i * width;
        fetch_row(&t->out, head, chunk.first + i, width);
        for (int64_t d = 0; d < width; d += LANES) store(out + d, load(out + d) * (1.0f / sum));
        memcpy(row_of(&t->out, head, chunk.first + i), out, 4 * width);
        round_row(&t->out_rounded, out, head, chunk.first + i, width);
        t->log_sum[head * t->num_tokens + chunk.first + i] = f.most[i] + log2f(sum);
    }
}

/* ---------------------------------------------------------------------------------------------------- backward */

typedef struct {
    float key[PADDED * MAX_WIDTH] ALIGNED, columns[MAX_WIDTH * TILE] ALIGNED, value_columns[MAX_WIDTH * TILE] ALIGNED;
    float key_gradient[PADDED * MAX_WIDTH] ALIGNED, value_gradient[PADDED * MAX_WIDTH] ALIGNED;
    float query[PADDED * MAX_WIDTH] ALIGNED, out_gradient[PADDED * MAX_WIDTH] ALIGNED;
    float weight[PADDED * TILE + LANES] ALIGNED, score_gradient[PADDED * TILE + LANES] ALIGNED;
    int64_t position[PADDED];
} Backward;

/* Weights of ROWS rows, in place of their scores, and the gradients of these, in place of those of the weights. */
INLINE void differentiate(const Attention *t, Backward *b, int64_t at, int64_t row, int64_t num, Keys keys,
                          Sight seen) {
    for (int64_t i = 0; i < num; i++) {
        float *weight = b->weight + (row + i) * TILE, *gradient = b->score_gradient + (row + i) * TILE;
        const float log_sum = t->log_sum[at + row + i], product = t->product[at + row + i];
        if (seen.is_masked) hide(weight, b->position[row + i], keys, t->window, seen.vectors);
        for (int64_t j = 0; j < LANES * seen.vectors; j += LANES) {
            const lanes w = power_of_two(load(weight + j) - log_sum);
            store(weight + j, w);
            store(gradient + j, w * (load(gradient + j) - product));
        }
        memset(weight + LANES * seen.vectors, 0, 4 * (TILE - LANES * seen.vectors));
        memset(gradient + LANES * seen.vectors, 0, 4 * (TILE - LANES * seen.vectors));
    }
}

/* What the queries of a tile and the keys that lie ready give each other. */
INLINE void exchange(const Attention *t, Backward *b, int64_t head, int64_t first, int64_t count, Keys keys,
                     int64_t prefix_length, int64_t width) {
    for (int64_t i = 0; i < count; i++) b->position[i] = prefix_length + first + i - t->branch[first + i];
    if (!sight(b->position, count, keys, t->window).vectors) return;
    gather(b->query, &t->query, head, first, count, width);
    gather(b->out_gradient, &t->out_gradient, head, first, count, width);
    for (int64_t row = 0; row < count; row += ROWS) {
        const int64_t num = smaller(ROWS, count - row);
        const Sight seen = sight(b->position + row, num, keys, t->window);
        float *weight = b->weight + row * TILE, *gradient = b->score_gradient + row * TILE;
        with_keys(weight, b->query + row * width, b->columns, seen.vectors, width);
        with_keys(gradient, b->out_gradient + row * width, b->value_columns, seen.vectors, width);
        differentiate(t, b, head * t->num_tokens + first, row, num, keys, seen);
        const Terms terms = {gradient, b->key, TILE, 1, width, smaller(seen.vectors * LANES, keys.count)};
        multiply(row_of(&t->query_gradient, head, first + row), t->query_gradient.token, num, ALL, terms,
                 width / LANES);
    }
    for (int64_t key = 0; key < keys.count; key += ROWS) {
        /* Within a stretch the first rows don't see the last keys. */
        const int64_t skipped = smaller(count, larger(0, keys.position + key - b->position[0]));
        const int64_t from = keys.first + key >= t->branch[first] ? skipped : 0;
        const int64_t at = from * TILE + key, left = count - from;
        const Terms of_values = {b->weight + at, b->out_gradient + from * width, 1, TILE, width, left};
        const Terms of_keys = {b->score_gradient + at, b->query + from * width, 1, TILE, width, left};
        multiply(b->value_gradient + key * width, width, ROWS, ALL, of_values, width / LANES);
        multiply(b->key_gradient + key * width, width, ROWS, ALL, of_keys, width / LANES);
    }
}

INLINE void take_keys(const Attention *t, Backward *b, int64_t key_head, Keys keys, int64_t width) {
    gather(b->key, &t->key, key_head, keys.first, keys.count, width);
    gather_columns(b->columns, &t->key, key_head, keys.first, keys.count, t->scaling * 1.44269504089f, width);
    gather_columns(b->value_columns, &t->value, key_head, keys.first, keys.count, t->scaling, width);
    memset(b->key_gradient, 0, PADDED * 4 * width);
    memset(b->value_gradient, 0, PADDED * 4 * width);
}

/* Queries first..end, of all heads that share the keys. */
INLINE void exchange_all(const Attention *t, Backward *b, int64_t key_head, int64_t first, int64_t end, Keys keys,
                         int64_t prefix_length, int64_t width) {
    for (int64_t head = key_head * t->queries_per_key; head < (key_head + 1) * t->queries_per_key; head++)
        for (int64_t from = first; from < end; from += TILE)
            exchange(t, b, head, from, smaller(TILE, end - from), keys, prefix_length, width);
}

/* Gradients of a chunk's queries begin at 0; products of outputs and their gradients are scaled as the values are. */
INLINE void prepare(const Attention *t, Chunk chunk, int64_t head, int64_t width) {
    for (int64_t token = chunk.first; token < chunk.first + chunk.length; token++) {
        fetch_row(&t->out, head, token, width);
        fetch_row(&t->out_gradient, head, token, width);
        lanes sum = {0};
        for (int64_t d = 0; d < width; d += LANES)
            sum += load(row_of(&t->out, head, token) + d) * part_of(&t->out_gradient, head, token, d);
        t->product[head * t->num_tokens + token] = sum_of(sum) * t->scaling;
        memset(row_of(&t->query_gradient, head, token), 0, 4 * width);
    }
}

INLINE float *partial_of(const Attention *t, int64_t key_head, int64_t of_values, int64_t token, int64_t width) {
    return t->partial + ((2 * key_head + of_values) * t->partial_tokens + token) * width;
}

INLINE void give_back(const Attention *t, Chunk chunk, int64_t key_head, int64_t width) {
    Backward b;
    const int64_t end = chunk.first + chunk.length;
    memset(b.weight, 0, sizeof b.weight);
    memset(b.score_gradient, 0, sizeof b.score_gradient);
    for (int64_t head = key_head * t->queries_per_key; head < (key_head + 1) * t->queries_per_key; head++)
        prepare(t, chunk, head, width);
    for (int64_t p = 0; p < chunk.prefix_length; p += TILE) {
        const Keys keys = {chunk.prefix + p, smaller(TILE, chunk.prefix_length - p), p};
        take_keys(t, &b, key_head, keys, width);
        exchange_all(t, &b, key_head, chunk.first, end, keys, chunk.prefix_length, width);
        memcpy(partial_of(t, key_head, 0, chunk.partial + p, width), b.key_gradient, keys.count * 4 * width);
        memcpy(partial_of(t, key_head, 1, chunk.partial + p, width), b.value_gradient, keys.count * 4 * width);
    }
    for (int64_t from = chunk.first, to; from < end; from = to) {
        to = end_of(t, from, end);
        for (int64_t p = 0; from + p < to; p += TILE) {
            const Keys keys = {from + p, smaller(TILE, to - from - p), chunk.prefix_length + p};
            take_keys(t, &b, key_head, keys, width);
            exchange_all(t, &b, key_head, from + p, to, keys, chunk.prefix_length, width);
            for (int64_t i = 0; i < keys.count; i++) {
                memcpy(row_of(&t->key_gradient, key_head, keys.first + i), b.key_gradient + i * width, 4 * width);
                memcpy(row_of(&t->value_gradient, key_head, keys.first + i), b.value_gradient + i * width, 4 * width);
            }
        }
    }
    for (int64_t head = key_head * t->queries_per_key; head < (key_head + 1) * t->queries_per_key; head++)
        for (int64_t token = chunk.first; token < end; token++)
            round_row(&t->query_rounded, row_of(&t->query_gradient, head, token), head, token, width);
}

/* Add up what the chunks have for a slice of the keys of their prefixes, chunk after chunk. */
INLINE void add_partials(const Attention *t, int64_t key_head, int64_t slice) {
    const Chunk *chunks = (const Chunk *)t->chunks;
    for (int64_t c = 0; c < t->num_chunks; c++) {
        const int64_t length = chunks[c].prefix_length;
        for (int64_t p = length * slice / SLICES; p < length * (slice + 1) / SLICES; p++)
            for (int of_values = 0; of_values < 2; of_values++) {
                const float *partial = partial_of(t, key_head, of_values, chunks[c].partial + p, t->width);
                const Heads *heads = of_values ? &t->value_gradient : &t->key_gradient;
                float *sum = row_of(heads, key_head, chunks[c].prefix + p);
                for (int64_t d = 0; d < t->width; d++) sum[d] += partial[d];
            }
    }
}

/* ---------------------------------------------------------------------------------------------------- calls */

void covey_attention(const Attention *t) {
    const Chunk *chunks = (const Chunk *)t->chunks;
#pragma omp parallel for schedule(dynamic, 1) num_threads(t->num_threads)
    for (int64_t task = 0; task < t->num_chunks * t->num_heads; task++) {
        const Chunk chunk = chunks[task / t->num_heads];
        const int64_t head = task % t->num_heads;
        attend(t, chunk, head, t->width);
    }
}

void covey_attention_backward(const Attention *t) {
    const Chunk *chunks = (const Chunk *)t->chunks;
    const int64_t num_key_heads = t->num_heads / t->queries_per_key;
#pragma omp parallel num_threads(t->num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < t->num_chunks * num_key_heads; task++) {
            const Chunk chunk = chunks[task / num_key_heads];
            const int64_t key_head = task % num_key_heads;
            give_back(t, chunk, key_head, t->width);
        }
#pragma omp for
        for (int64_t task = 0; task < num_key_heads * SLICES; task++) add_partials(t, task / SLICES, task % SLICES);
#pragma omp for
        for (int64_t token = 0; token < t->num_tokens; token++)
            for (int64_t head = 0; head < num_key_heads; head++) {
                round_row(&t->key_rounded, row_of(&t->key_gradient, head, token), head, token, t->width);
                round_row(&t->value_rounded, row_of(&t->value_gradient, head, token), head, token, t->width);
            }
    }
}
