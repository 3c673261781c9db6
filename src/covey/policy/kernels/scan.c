/* The gated recurrence of recurrence/base.py over a forest of segments, forward and backward, float32. recurrence/compiled.py
   calls the functions at the end and mirrors struct Scan.

   A segment is cut into chunks from its own beginning. Within a chunk tokens meet each other through products of two rows,
   with what comes before through the state (arXiv 2406.06484); a decay between two tokens is made of just the steps
   between them, so nothing overflows and no small decay is lost beside a large one. Of the forward pass nothing is kept:
   the backward pass computes the states before a segment's chunks again, goes down to its children and comes back. A
   segment of one token is a step over the state, which is read once from memory.

   A task is a tree and a head, in the backward pass the heads of a slice, one after the other. Every number follows from
   its tree alone, so neither the number of threads nor what else is in the stream changes a bit.

   Shapes: N key width (`wide`: rounded up to whole vectors, zeros behind), P value width, a multiple of LANES. Rows of
   keys (k) and of queries (q) of a chunk lie one behind the other; without the delta rule those of keys are skipped. */

#include <omp.h>

#include "outer_products.h"

#define CHUNK 32
#define PADDED (2 * CHUNK + ROWS) /* the last rows may go beyond */
#define LEAST -1e4f               /* logarithm of a decay to nothing */

static const float ONES[PADDED] = {[0 ... PADDED - 1] = 1.0f}; /* add to what is there */

typedef struct {
    const void *at;
    int64_t token, head, half; /* strides; half: bfloat16 */
} Heads;

typedef struct {
    int64_t first, length, parent, read, write; /* tokens; a segment; holders. -1 for none */
    int64_t child, next, room; /* its first one, its next sibling, -1 for none; numbers of room from the root to here */
} Segment;

typedef struct {
    Heads query, key, value, decay, beta; /* tokens x heads x width; beta: no delta rule where it is NULL */
    Heads out_gradient;                   /* backward */
    float *out;                           /* tokens x heads x P */
    float *of_query, *of_key;             /* backward: slices x tokens x key heads x N */
    float *of_value, *of_decay, *of_beta; /* backward: as out; tokens x heads x decay_width; tokens x heads */
    const float *held;                    /* holders x heads x N x P: those that are read */
    float *kept;                          /* and those that are written */
    const int64_t *rows, *read, *write;   /* of segments: first token, length, parent; holders or NULL */
    Segment *segments;
    int64_t *roots;
    float *room;                          /* of each thread */
    int64_t room_size, num_segments, num_roots, num_tokens, num_heads, shared, slices;
    int64_t key_width, value_width, decay_width, num_threads, is_backward;
    int64_t has_chunks;                   /* told by the plan, as roots and room_size are */
} Scan;

/* A chunk's numbers, and its gradients with of_ before them. */
typedef struct {
    float *rows, *first, *last, *begun, *ending, *step, *whole; /* k and q; decays since the start and to the end, and rows
                                                                  times them; decays of tokens; that of the chunk */
    float *columns, *between, *score;  /* k as columns; decays between tokens; products of rows with k, -1 times those of k */
    float *both, *residual, *value;    /* rows times the state; (value - what is remembered); times beta */
    float *of_both, *of_value, *of_residual, *of_score, *of_rows, *of_begun, *of_ending, *of_decay, *ended, *turned, *turned_value, *turned_rows;
    float beta[CHUNK];
    int64_t count, skip, num, wide; /* tokens; rows that are skipped, and that are left */
    int has_beta;
} Work;

/* ---------------------------------------------------------------------------------------------------- parts */

static int64_t rounded_up(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

INLINE void read_row(float *to, const Heads *heads, int64_t head, int64_t token, int64_t width) {
    const int64_t at = token * heads->token + head * heads->head;
    if (!heads->half) {
        memcpy(to, (const float *)heads->at + at, 4 * width);
        return;
    }
    const uint16_t *from = (const uint16_t *)heads->at + at;
    for (int64_t c = 0; c < width; c++) {
        const uint32_t bits = (uint32_t)from[c] << 16;
        memcpy(to + c, &bits, sizeof bits);
    }
}

/* exp for x <= 0, as in lanes.h, and 0 where a float has no such number. NaN stays NaN. */
INLINE lanes power(lanes x) {
    const ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    const lanes n = __builtin_convertvector(whole, lanes);
    const lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (lanes)((ints)(y * (lanes)((whole + 127) << 23)) & ~(x < -87.0f));
}

INLINE lanes limited(lanes x) { return chosen(x < LEAST, (lanes){0} + LEAST, x); }

INLINE void add_product(float *to, const float *x, float factor, int64_t width) {
    for (int64_t c = 0; c < width; c += LANES) store(to + c, load(to + c) + load(x + c) * factor);
}

INLINE float product_of(const float *x, const float *y, int64_t width) {
    lanes sum = {0};
    for (int64_t c = 0; c < width; c += LANES) sum += load(x + c) * load(y + c);
    return sum_of(sum);
}

/* Rows become columns, in whole blocks. */
static void turn(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            lanes block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = load(from + (r + i) * from_row + c);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(to + (c + i) * to_row + r, block[i]);
        }
}

/* Which terms of a row count: all, those up to the row, or those from the row on. */
enum { FULL, LOWER, UPPER };

/* to = keep to + sums of so many rows of `width` numbers; without `keep` to = the sums. */
static void product(float *to, int64_t to_row, int64_t rows, const float *keep, Terms terms, int64_t width, int shape) {
    for (int64_t c = 0; c < width; c += VECTORS * LANES)
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t from = shape == UPPER ? r : 0;
            Terms part = terms;
            part.a += r * terms.a_row + from * terms.a_step;
            part.b += c + from * terms.b_step;
            part.count = (shape == LOWER ? smaller(terms.count, r + ROWS) : terms.count) - from;
            multiply(to + r * to_row + c, to_row, smaller(ROWS, rows - r), keep ? keep + r : NULL, part,
                     smaller(VECTORS, (width - c + LANES - 1) / LANES));
        }
}

/* ---------------------------------------------------------------------------------------------------- chunks */

/* Decays of a head, the same for all its channels. */
INLINE void fade_head(const Scan *t, Work *w, int64_t head, int64_t first) {
    float until[CHUNK] = {0}, since[CHUNK] = {0}, apart[CHUNK];
    double sums[CHUNK], sum = 0.0;
    for (int64_t i = 0; i < w->count; i++) {
        float decay;
        read_row(&decay, &t->decay, head, first + i, 1);
        sums[i] = sum += decay < LEAST ? LEAST : decay;
        since[i] = (float)sum;
    }
    for (int64_t i = 0; i < w->count; i++) {
        until[i] = (float)(sum - sums[i]);
        for (int64_t j = 0; j < CHUNK; j++) apart[j] = j < i ? (float)(sums[i] - sums[j]) : 0.0f;
        for (int64_t j = 0; j < CHUNK; j += LANES) store(w->between + i * CHUNK + j, power(load(apart + j)));
    }
    for (int64_t j = 0; j < CHUNK; j += LANES) {
        store(since + j, power(load(since + j)));
        store(until + j, power(load(until + j)));
    }
    for (int64_t i = 0; i < w->count; i++)
        for (int64_t c = 0; c < w->wide; c += LANES) {
            store(w->first + i * w->wide + c, since[i] - (lanes){0});
            store(w->last + i * w->wide + c, until[i] - (lanes){0});
        }
}

/* Decays of each channel. */
INLINE void fade_channels(const Scan *t, Work *w, int64_t head, int64_t first) {
    const int64_t wide = w->wide;
    for (int64_t i = 0; i < w->count; i++) read_row(w->step + i * wide, &t->decay, head, first + i, t->key_width);
    for (int64_t c = 0; c < wide; c += LANES) {
        lanes since = {0}, until = {0};
        for (int64_t i = 0; i < w->count; i++)
            store(w->first + i * wide + c, power(since += limited(load(w->step + i * wide + c))));
        for (int64_t i = w->count - 1; i >= 0; i--) {
            const lanes step = limited(load(w->step + i * wide + c));
            store(w->last + i * wide + c, power(until));
            store(w->step + i * wide + c, power(step));
            until += step;
        }
    }
}

/* Read a chunk's keys, queries, rates and decays. */
static void take(const Scan *t, Work *w, int64_t head, int64_t first, int64_t count) {
    const int64_t width = t->key_width, wide = w->wide, key_head = head / t->shared;
    w->count = count;
    w->skip = w->has_beta ? 0 : count;
    w->num = 2 * count - w->skip;
    for (int64_t i = 0; i < count; i++) {
        read_row(w->rows + i * wide, &t->key, key_head, first + i, width);
        read_row(w->rows + (count + i) * wide, &t->query, key_head, first + i, width);
        if (w->has_beta) read_row(w->beta + i, &t->beta, head, first + i, 1);
    }
    if (t->decay_width > 1) fade_channels(t, w, head, first);
    else fade_head(t, w, head, first);
    memcpy(w->whole, w->first + (count - 1) * wide, 4 * wide);
    for (int64_t at = 0; at < count * wide; at += LANES) {
        const lanes key = load(w->rows + at), query = load(w->rows + count * wide + at), since = load(w->first + at);
        store(w->begun + at, key * since);
        store(w->begun + count * wide + at, query * since);
        store(w->ending + at, key * load(w->last + at));
    }
}

INLINE void score_channels(Work *w) {
    const int64_t count = w->count, wide = w->wide;
    for (int64_t j = 0; j < count; j++) {
        lanes of_key[CHUNK] = {0}, of_query[CHUNK] = {0};
        for (int64_t c = 0; c < wide; c += LANES) {
            lanes key = load(w->rows + j * wide + c);
            of_query[j] += load(w->rows + (count + j) * wide + c) * key;
            for (int64_t i = j + 1; i < count; i++) {
                key *= load(w->step + i * wide + c);
                of_key[i] += load(w->rows + i * wide + c) * key;
                of_query[i] += load(w->rows + (count + i) * wide + c) * key;
            }
        }
        for (int64_t i = 0; i < count; i++) {
            w->score[i * CHUNK + j] = i > j ? -sum_of(of_key[i]) : 0.0f;
            w->score[(count + i) * CHUNK + j] = i < j ? 0.0f : sum_of(of_query[i]);
        }
    }
}

INLINE void score_head(const Scan *t, Work *w) {
    const int64_t count = w->count, wide = w->wide;
    turn(w->columns, CHUNK, w->rows, wide, rounded_up(count), wide);
    const Terms terms = {w->rows + w->skip * wide, w->columns, wide, 1, CHUNK, t->key_width};
    product(w->score + w->skip * CHUNK, CHUNK, w->num, NULL, terms, count, FULL);
    for (int64_t i = 0; i < count; i++) {
        float *of_key = w->score + i * CHUNK, *of_query = w->score + (count + i) * CHUNK;
        const float *between = w->between + i * CHUNK;
        for (int64_t j = 0; j < CHUNK; j++) {
            of_key[j] = j < i ? -of_key[j] * between[j] : 0.0f;
            of_query[j] = j <= i ? of_query[j] * between[j] : 0.0f;
        }
    }
}

INLINE void make_scores(const Scan *t, Work *w) {
    if (t->decay_width > 1) score_channels(w);
    else score_head(t, w);
}

/* Values that are added to the state, given what the state remembers: each token subtracts what those before it added. */
INLINE void solve(const Scan *t, Work *w, int64_t head, int64_t first) {
    const int64_t count = w->count, width = t->value_width;
    float *residual = w->residual, *value = w->value;
    for (int64_t i = 0; i < count; i++) {
        read_row(residual + i * width, &t->value, head, first + i, width);
        add_product(residual + i * width, w->both + i * width, -1.0f, width);
    }
    for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t end = smaller(count, r + ROWS);
        const Terms earlier = {w->score + r * CHUNK, value, CHUNK, 1, width, r};
        product(residual + r * width, width, end - r, ONES, earlier, width, FULL);
        for (int64_t i = r; i < end; i++) {
            for (int64_t j = r; j < i; j++)
                add_product(residual + i * width, value + j * width, w->score[i * CHUNK + j], width);
            for (int64_t c = 0; c < width; c += LANES)
                store(value + i * width + c, load(residual + i * width + c) * w->beta[i]);
        }
    }
}

/* Lead a state over a chunk: to its end where that is asked for, with outputs in the forward pass. */
static void advance(const Scan *t, Work *w, int64_t head, int64_t first, int64_t count, float *state, int is_kept) {
    const int64_t width = t->value_width, wide = w->wide, has_out = !t->is_backward;
    take(t, w, head, first, count);
    if (!has_out) w->num = w->has_beta ? count : 0;
    if (w->num) {
        make_scores(t, w);
        const Terms terms = {w->begun + w->skip * wide, state, wide, 1, width, t->key_width};
        product(w->both + w->skip * width, width, w->num, NULL, terms, width, FULL);
    }
    if (w->has_beta) solve(t, w, head, first);
    else
        for (int64_t i = 0; i < count; i++) read_row(w->value + i * width, &t->value, head, first + i, width);
    if (has_out) {
        float *out = w->both + count * width;
        const Terms own = {w->score + count * CHUNK, w->value, CHUNK, 1, width, count};
        product(out, width, count, ONES, own, width, LOWER);
        for (int64_t i = 0; i < count; i++)
            memcpy(t->out + ((first + i) * t->num_heads + head) * width, out + i * width, 4 * width);
    }
    if (is_kept) product(state, width, t->key_width, w->whole, (Terms){w->ending, w->value, 1, wide, width, count}, width, FULL);
}

/* ---------------------------------------------------------------------------------------------------- steps */

typedef struct {
    const float *query, *key, *recall, *decay, *value; /* recall: key times decay */
    float beta;
} Token;

/* One token over so many columns of a state; without `to` the state is not kept. */
INLINE void step_columns(const Token *token, const float *from, float *to, float *out, int64_t keys, int64_t width,
                         const int has_beta, const int vectors) {
    lanes value[8], sum[8] = {0};
    for (int64_t n = 0; has_beta && n < keys; n++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sum[j] += token->recall[n] * load(from + n * width + LANES * j);
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) {
        value[j] = (load(token->value + LANES * j) - sum[j]) * token->beta;
        sum[j] = (lanes){0};
    }
    for (int64_t n = 0; n < keys; n++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            const lanes state = load(from + n * width + LANES * j) * token->decay[n] + value[j] * token->key[n];
            if (to) store(to + n * width + LANES * j, state);
            sum[j] += state * token->query[n];
        }
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) store(out + LANES * j, sum[j]);
}

#define STEP(vectors)                                                                                                 \
    static __attribute__((noinline)) void step_##vectors(const Token *token, const float *from, float *to, float *out, \
                                                         int64_t keys, int64_t width, int has_beta) {                 \
        if (has_beta) step_columns(token, from, to, out, keys, width, 1, vectors);                                    \
        else step_columns(token, from, to, out, keys, width, 0, vectors);                                             \
    }
STEP(1)
STEP(4)
#if LANES == 16
#define MOST 8
STEP(8)
#else
#define MOST 4
#define step_8 step_4
#endif

static void step(const Scan *t, int64_t head, int64_t at, const float *from, float *to) {
    const int64_t keys = t->key_width, width = t->value_width, key_head = head / t->shared;
    float query[keys], key[keys], recall[keys], decay[rounded_up(keys)], value[width];
    Token token = {query, key, recall, decay, value, 1.0f};
    read_row(query, &t->query, key_head, at, keys);
    read_row(key, &t->key, key_head, at, keys);
    read_row(value, &t->value, head, at, width);
    read_row(decay, &t->decay, head, at, t->decay_width);
    if (t->beta.at) read_row(&token.beta, &t->beta, head, at, 1);
    if (t->decay_width == 1)
        for (int64_t n = keys - 1; n >= 0; n--) decay[n] = decay[0];
    for (int64_t n = 0; n < keys; n += LANES) store(decay + n, power(load(decay + n)));
    for (int64_t n = 0; n < keys; n++) recall[n] = key[n] * decay[n];
    float *out = t->out + (at * t->num_heads + head) * width;
    for (int64_t c = 0, vectors; c < width; c += vectors * LANES) {
        const int64_t left = (width - c) / LANES;
        vectors = left >= MOST ? MOST : left >= 4 ? 4 : 1;
        (vectors == 1 ? step_1 : vectors == 4 ? step_4 : step_8)(&token, from + c, to ? to + c : NULL, out + c, keys, width, t->beta.at != NULL);
        token.value += vectors * LANES;
    }
}

/* ---------------------------------------------------------------------------------------------------- backward */

/* Gradients of the values before beta, from those of what was added to the state: the last token's reach all others. */
INLINE void solve_backward(const Scan *t, Work *w, int64_t head, int64_t first) {
    const int64_t count = w->count, width = t->value_width;
    float *gradient = w->of_value, *residual = w->of_residual;
    for (int64_t r = (count - 1) / ROWS * ROWS; r >= 0; r -= ROWS) {
        const int64_t end = smaller(count, r + ROWS);
        const Terms later = {w->score + end * CHUNK + r, residual + end * width, 1, CHUNK, width, count - end};
        product(gradient + r * width, width, end - r, ONES, later, width, FULL);
        for (int64_t i = end - 1; i >= r; i--) {
            for (int64_t l = i + 1; l < end; l++)
                add_product(gradient + i * width, residual + l * width, w->score[l * CHUNK + i], width);
            t->of_beta[(first + i) * t->num_heads + head] = product_of(gradient + i * width, w->residual + i * width, width);
            for (int64_t c = 0; c < width; c += LANES) {
                const lanes own = load(gradient + i * width + c) * w->beta[i];
                store(residual + i * width + c, own);
                store(w->of_both + i * width + c, -own);
            }
        }
    }
}

/* What scores give to keys, queries and to decays of each channel between two tokens. */
INLINE void unscore_channels(Work *w) {
    const int64_t count = w->count, wide = w->wide;
    for (int64_t c = 0; c < wide; c += LANES)
        for (int64_t j = 0; j < count; j++) {
            lanes key[CHUNK], carried = {0};
            key[j] = load(w->rows + j * wide + c);
            for (int64_t i = j + 1; i < count; i++) key[i] = key[i - 1] * load(w->step + i * wide + c);
            for (int64_t i = count - 1; i >= j; i--) {
                const float of_key = i > j && w->has_beta ? w->of_score[i * CHUNK + j] : 0.0f;
                const float of_query = w->of_score[(count + i) * CHUNK + j];
                float *to_key = w->of_rows + i * wide + c, *to_query = to_key + count * wide;
                carried += load(w->rows + i * wide + c) * of_key + load(w->rows + (count + i) * wide + c) * of_query;
                store(to_query, load(to_query) + key[i] * of_query);
                if (i == j) {
                    store(to_key, load(to_key) + carried);
                    continue;
                }
                store(to_key, load(to_key) + key[i] * of_key);
                store(w->of_decay + i * wide + c, load(w->of_decay + i * wide + c) + key[i] * carried);
                carried *= load(w->step + i * wide + c);
            }
        }
}

/* The same where a head has one decay: its gradient is the first number of a row. */
INLINE void unscore_head(Work *w) {
    const int64_t count = w->count, wide = w->wide;
    float reached[CHUNK] = {0}; /* of each token: products that span the current decay */
    for (int64_t i = count - 1; i >= 0; i--) {
        float *of_key = w->of_score + i * CHUNK, *of_query = w->of_score + (count + i) * CHUNK, sum = 0.0f;
        const float *key = w->score + i * CHUNK, *query = w->score + (count + i) * CHUNK, *between = w->between + i * CHUNK;
        for (int64_t j = 0; j < CHUNK; j++) {
            if (j < i) reached[j] += of_query[j] * query[j] - (w->has_beta ? of_key[j] * key[j] : 0.0f);
            of_key[j] = j < i ? of_key[j] * between[j] : 0.0f;
            of_query[j] = j <= i ? of_query[j] * between[j] : 0.0f;
        }
        for (int64_t j = 0; j < i; j++) sum += reached[j];
        w->of_decay[i * wide] += sum;
    }
    const float *of_score = w->of_score + w->skip * CHUNK;
    const Terms forth = {of_score, w->rows, CHUNK, 1, wide, count};
    const Terms back = {of_score, w->rows + w->skip * wide, 1, CHUNK, wide, w->num};
    product(w->of_rows + w->skip * wide, wide, w->num, ONES, forth, wide, FULL);
    product(w->of_rows, wide, count, ONES, back, wide, FULL);
}

/* Gradients of rows and decays from those of rows times decays. Sums over decays only add, so none is lost. */
INLINE void unfade(const Scan *t, Work *w) {
    const int64_t count = w->count, wide = w->wide, is_head = t->decay_width == 1;
    lanes spanned[wide / LANES], passed[wide / LANES];
    memcpy(spanned, w->ended, sizeof spanned);
    memset(passed, 0, sizeof passed);
    for (int64_t i = count - 1; i >= 0; i--)
        for (int64_t c = 0, at = i * wide; c < wide; c += LANES, at += LANES) {
            const lanes of_key = w->has_beta ? load(w->of_begun + at) : (lanes){0};
            const lanes of_query = load(w->of_begun + count * wide + at), since = load(w->first + at);
            spanned[c / LANES] += load(w->begun + at) * of_key + load(w->begun + count * wide + at) * of_query;
            store(w->of_decay + at, spanned[c / LANES]);
            store(w->of_rows + at, of_key * since + load(w->of_ending + at) * load(w->last + at));
            store(w->of_rows + count * wide + at, of_query * since);
        }
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0, at = i * wide; c < wide; c += LANES, at += LANES) {
            store(w->of_decay + at, load(w->of_decay + at) + passed[c / LANES]);
            passed[c / LANES] += load(w->ending + at) * load(w->of_ending + at);
        }
    for (int64_t i = 0; is_head && i < count; i++) w->of_decay[i * wide] = total(w->of_decay + i * wide, wide);
}

INLINE void give_rows(const Scan *t, const Work *w, int64_t head, int64_t first) {
    const int64_t width = t->key_width, key_heads = t->num_heads / t->shared, each = t->shared / t->slices;
    const int64_t slice = head % t->shared / each, is_first = head % each == 0;
    for (int64_t i = 0; i < w->count; i++) {
        const int64_t at = ((slice * t->num_tokens + first + i) * key_heads + head / t->shared) * width;
        for (int of_queries = 0; of_queries < 2; of_queries++) {
            const float *from = w->of_rows + (of_queries * w->count + i) * w->wide;
            float *to = (of_queries ? t->of_query : t->of_key) + at;
            if (is_first) memcpy(to, from, 4 * width);
            else
                for (int64_t c = 0; c < width; c++) to[c] += from[c];
        }
        memcpy(t->of_decay + ((first + i) * t->num_heads + head) * t->decay_width, w->of_decay + i * w->wide,
               4 * t->decay_width);
    }
}

/* Gradients of a chunk, from that of the state after it, which becomes that of the state before. */
static void retreat(const Scan *t, Work *w, int64_t head, int64_t first, int64_t count, const float *state, float *of_state) {
    const int64_t keys = t->key_width, width = t->value_width, wide = w->wide;
    take(t, w, head, first, count);
    make_scores(t, w);
    for (int64_t i = 0; i < count; i++) {
        float *value = w->value + i * width;
        if (w->has_beta)
            for (int64_t c = 0; c < width; c += LANES) store(value + c, load(w->residual + i * width + c) * w->beta[i]);
        else read_row(value, &t->value, head, first + i, width);
        read_row(w->of_both + (count + i) * width, &t->out_gradient, head, first + i, width);
    }
    const float *of_out = w->of_both + count * width, *of_both = w->of_both + w->skip * width;
    product(w->of_value, width, count, NULL, (Terms){w->score + count * CHUNK, of_out, 1, CHUNK, width, count}, width, UPPER);
    product(w->of_value, width, count, ONES, (Terms){w->ending, of_state, wide, 1, width, keys}, width, FULL);
    if (w->has_beta) solve_backward(t, w, head, first);
    const float *of_value = w->has_beta ? w->of_residual : w->of_value;
    for (int64_t i = 0; i < count; i++)
        memcpy(t->of_value + ((first + i) * t->num_heads + head) * width, of_value + i * width, 4 * width);
    turn(w->turned, 2 * CHUNK, of_both, width, rounded_up(w->num), width);
    turn(w->turned_value, CHUNK, w->value, width, rounded_up(count), width);
    product(w->of_score + w->skip * CHUNK, CHUNK, w->num, NULL, (Terms){of_both, w->turned_value, width, 1, CHUNK, width}, count, FULL);
    product(w->turned_rows, 2 * CHUNK, keys, NULL, (Terms){state, w->turned, width, 1, 2 * CHUNK, width}, w->num, FULL);
    turn(w->of_begun + w->skip * wide, wide, w->turned_rows, 2 * CHUNK, wide, rounded_up(w->num));
    product(w->turned_rows, 2 * CHUNK, keys, NULL, (Terms){of_state, w->turned_value, width, 1, CHUNK, width}, count, FULL);
    turn(w->of_ending, wide, w->turned_rows, 2 * CHUNK, wide, rounded_up(count));
    for (int64_t n = 0; n < keys; n++) w->ended[n] = w->whole[n] * product_of(state + n * width, of_state + n * width, width);
    product(of_state, width, keys, w->whole, (Terms){w->begun + w->skip * wide, of_both, 1, wide, width, w->num}, width, FULL);
    unfade(t, w);
    if (t->decay_width > 1) unscore_channels(w);
    else unscore_head(w);
    give_rows(t, w, head, first);
}

/* ---------------------------------------------------------------------------------------------------- trees */

/* Lead a state from a segment to all that continue it; `free` is room for more states. */
static void follow(const Scan *t, Work *w, int64_t head, int64_t place, float *state, float *free) {
    const int64_t size = t->key_width * t->value_width;
    for (;;) {
        const Segment *s = t->segments + place;
        const float *from = s->read < 0 ? state : t->held + (s->read * t->num_heads + head) * size;
        float *to = s->write < 0 ? NULL : t->kept + (s->write * t->num_heads + head) * size;
        if (s->length == 1) step(t, head, s->first, from, s->child < 0 ? to : state);
        else {
            if (from != state) memcpy(state, from, 4 * size);
            for (int64_t at = 0; at < s->length; at += CHUNK)
                advance(t, w, head, s->first + at, smaller(CHUNK, s->length - at), state, to || s->child >= 0 || at + CHUNK < s->length);
        }
        if (to && (s->length > 1 || s->child >= 0)) memcpy(to, state, 4 * size);
        if (s->child < 0) return;
        for (place = s->child; t->segments[place].next >= 0; place = t->segments[place].next) {
            memcpy(free, state, 4 * size);
            follow(t, w, head, place, free, free + size);
        }
    }
}

/* Gradients of a segment and all that continue it; that of the state before it is added to `of_before`. */
static void come_back(const Scan *t, Work *w, int64_t head, int64_t place, const float *before, float *of_before, float *free) {
    const Segment *s = t->segments + place;
    const int64_t size = t->key_width * t->value_width, chunks = (s->length + CHUNK - 1) / CHUNK;
    float *states = free, *of_state = states + (chunks + 1) * size, *residuals = of_state + size;
    const float *held = s->read < 0 ? before : t->held + (s->read * t->num_heads + head) * size;
    free = residuals + (w->has_beta ? chunks * CHUNK * t->value_width : 0);
    memcpy(states, held, 4 * size);
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t at = c * CHUNK, is_kept = c + 1 < chunks || s->child >= 0;
        if (is_kept) memcpy(states + (c + 1) * size, states + c * size, 4 * size);
        w->residual = residuals + at * t->value_width;
        if (is_kept || w->has_beta)
            advance(t, w, head, s->first + at, smaller(CHUNK, s->length - at), states + (c + is_kept) * size, is_kept);
    }
    memset(of_state, 0, 4 * size);
    for (int64_t child = s->child; child >= 0; child = t->segments[child].next)
        come_back(t, w, head, child, states + chunks * size, of_state, free);
    for (int64_t c = chunks - 1; c >= 0; c--) {
        w->residual = residuals + c * CHUNK * t->value_width;
        retreat(t, w, head, s->first + c * CHUNK, smaller(CHUNK, s->length - c * CHUNK), states + c * size, of_state);
    }
    for (int64_t i = 0; s->read < 0 && i < size; i++) of_before[i] += of_state[i];
}

/* ---------------------------------------------------------------------------------------------------- calls */

/* Lay a chunk's numbers out in room; returns how many there are. */
static int64_t lay_out(Work *w, const Scan *t, float *room) {
    const int64_t wide = rounded_up(t->key_width), width = t->value_width, columns = wide + LANES;
    const int64_t stored = t->is_backward ? 1 : 0;
    int64_t at = 0;
#define PLACE(name, size) w->name = room + at, at += rounded_up(size)
    PLACE(rows, PADDED * wide);
    PLACE(first, PADDED * wide);
    PLACE(last, PADDED * wide);
    PLACE(begun, PADDED * wide);
    PLACE(ending, PADDED * wide);
    PLACE(step, PADDED * wide);
    PLACE(whole, columns);
    PLACE(columns, columns * CHUNK);
    PLACE(between, CHUNK * CHUNK);
    PLACE(score, PADDED * CHUNK);
    PLACE(both, PADDED * width);
    PLACE(residual, PADDED * width);
    PLACE(value, PADDED * width);
    PLACE(of_both, stored * PADDED * width);
    PLACE(of_value, stored * PADDED * width);
    PLACE(of_residual, stored * PADDED * width);
    PLACE(of_score, stored * PADDED * CHUNK);
    PLACE(of_rows, stored * PADDED * wide);
    PLACE(of_begun, stored * PADDED * wide);
    PLACE(of_ending, stored * PADDED * wide);
    PLACE(of_decay, stored * PADDED * wide);
    PLACE(ended, stored * columns);
    PLACE(turned, stored * width * 2 * CHUNK);
    PLACE(turned_value, stored * width * CHUNK);
    PLACE(turned_rows, stored * columns * 2 * CHUNK);
#undef PLACE
    w->wide = wide;
    w->has_beta = t->beta.at != NULL;
    return at;
}

/* A thread's part of the room: a chunk's numbers, the rest is returned. */
INLINE float *thread_room(const Scan *t, Work *w) {
    float *room = t->room + omp_get_thread_num() * t->room_size;
    const int64_t taken = lay_out(w, t, room);
    if (!t->has_chunks) return room;
    memset(room, 0, 4 * taken);
    return room + taken;
}

/* Link the segments of each tree; returns the numbers of room that a thread needs. A segment that reads a holder is a
   root. */
int64_t covey_scan_plan(Scan *t) {
    const int64_t size = t->key_width * t->value_width;
    int64_t most = 0;
    t->has_chunks = t->is_backward;
    for (int64_t i = 0; i < t->num_segments; i++) {
        const int64_t *row = t->rows + 3 * i, read = t->read ? t->read[i] : -1, write = t->write ? t->write[i] : -1;
        t->segments[i] = (Segment){row[0], row[1], read < 0 ? row[2] : -1, read, write, -1, -1, 0};
        t->has_chunks |= row[1] > 1;
    }
    for (int64_t i = t->num_segments - 1; i >= 0; i--) {
        if (t->segments[i].parent < 0) continue;
        Segment *parent = t->segments + t->segments[i].parent;
        t->segments[i].next = parent->child;
        parent->child = i;
    }
    t->num_roots = 0;
    for (int64_t i = 0; i < t->num_segments; i++) {
        Segment *s = t->segments + i;
        const int64_t chunks = (s->length + CHUNK - 1) / CHUNK, before = s->parent < 0 ? 0 : t->segments[s->parent].room;
        if (s->parent < 0) t->roots[t->num_roots++] = i;
        if (t->is_backward) s->room = before + (chunks + 2) * size + chunks * CHUNK * t->value_width;
        else s->room = before + (s->parent < 0 || s->next >= 0 ? size : 0);
        most = larger(most, s->room);
    }
    Work w;
    return (t->has_chunks ? lay_out(&w, t, NULL) : 0) + most + (t->is_backward ? 2 * size : 0);
}

void covey_scan(const Scan *t) {
    const int64_t size = t->key_width * t->value_width;
#pragma omp parallel num_threads(t->num_threads)
    {
        Work w;
        float *room = thread_room(t, &w);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < t->num_roots * t->num_heads; task++) {
            const int64_t root = t->roots[task / t->num_heads];
            if (t->segments[root].read < 0) memset(room, 0, 4 * size);
            follow(t, &w, task % t->num_heads, root, room, room + size);
        }
    }
}

void covey_scan_backward(const Scan *t) {
    const int64_t size = t->key_width * t->value_width, key_heads = t->num_heads / t->shared;
    const int64_t each = t->shared / t->slices, tasks = t->num_heads / each, numbers = key_heads * t->key_width;
#pragma omp parallel num_threads(t->num_threads)
    {
        Work w;
        float *room = thread_room(t, &w);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < t->num_roots * tasks; task++)
            for (int64_t head = task % tasks * each; head < (task % tasks + 1) * each; head++) {
                memset(room, 0, 8 * size);
                come_back(t, &w, head, t->roots[task / tasks], room, room + size, room + 2 * size);
            }
#pragma omp for
        for (int64_t token = 0; token < t->num_tokens; token++)
            for (int64_t slice = 1; slice < t->slices; slice++)
                for (int64_t c = token * numbers; c < (token + 1) * numbers; c++) {
                    t->of_query[c] += t->of_query[slice * t->num_tokens * numbers + c];
                    t->of_key[c] += t->of_key[slice * t->num_tokens * numbers + c];
                }
    }
}
