/* The gated recurrence of recurrence/base.py over a forest of segments, float32: what its forward pass (scan.c) and its
   backward pass (scan_gradient.c) share. recurrence/compiled.py mirrors struct Scan.

   A segment is cut into chunks from its own beginning. Within a chunk tokens meet each other through products of two
   rows, with what comes before through the state (arXiv 2406.06484). A decay between two tokens is made of just the
   steps between them, so nothing overflows and a small decay is not lost beside a large one. Every number follows from
   its tree alone, so neither the number of threads nor what else is in the stream changes a bit.

   Shapes: N key width (`wide`: rounded up to whole vectors, zeros behind), P value width, a multiple of LANES. Rows of
   keys (k) and of queries (q) of a chunk lie one behind the other; without the delta rule those of keys are skipped. */

#pragma once

#include <omp.h>

#include "../kernels/c/outer_products.h"

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
    float *rows;                           /* k and q */
    float *first, *last, *step, *whole;    /* decays since the start, to the end, of tokens, and of the chunk */
    float *begun, *ending;                 /* rows times `first`, k times `last` */
    float *columns, *between, *score;      /* k as columns; decays between tokens; decayed products of q, and -1 times
                                              those of k, with k */
    float *both, *residual, *value;        /* rows times the state; value without what is remembered; times beta */
    float *of_both, *of_value, *of_residual, *of_score, *of_rows, *of_begun, *of_ending, *of_decay;
    float *ended;                          /* products of the states before and after, decayed, with the gradient */
    float *turned, *turned_value, *turned_rows;
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
            store(w->first + i * wide + c, power(since += load(w->step + i * wide + c)));
        for (int64_t i = w->count - 1; i >= 0; i--) {
            const lanes step = load(w->step + i * wide + c);
            store(w->last + i * wide + c, power(until));
            store(w->step + i * wide + c, power(step));
            until += step;
        }
    }
}

/* Begin to read tokens of a chunk that comes next. */
INLINE void fetch_rows(const Heads *heads, int64_t head, int64_t first, int64_t count, int64_t width) {
    for (int64_t i = first; i < first + count; i++)
        fetch(heads->at, i * heads->token + head * heads->head, width, (int)heads->half);
}

static void fetch_chunk(const Scan *t, int64_t head, int64_t first, int64_t count) {
    fetch_rows(&t->key, head / t->shared, first, count, t->key_width);
    fetch_rows(&t->query, head / t->shared, first, count, t->key_width);
    fetch_rows(&t->value, head, first, count, t->value_width);
    fetch_rows(&t->decay, head, first, count, t->decay_width);
    if (t->is_backward) fetch_rows(&t->out_gradient, head, first, count, t->value_width);
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

/* Values that are added to the state, given what it remembers: a token subtracts what those before it added. */
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
    const Terms added = {w->ending, w->value, 1, wide, width, count};
    if (is_kept) product(state, width, t->key_width, w->whole, added, width, FULL);
}

/* ---------------------------------------------------------------------------------------------------- room */

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
