/* The forward pass of the gated recurrence; see scan.h. compiled.py calls the functions at the end.

   A task is a tree and a head: a state is led from the root through all segments, and copied where several continue
   one. A segment of one token is a step over the state, which is read once from memory. */

#include "scan.h"

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
            /* Ahead lies the next head's state, where it is that of a holder. */
            __builtin_prefetch(from + (keys + n) * width + LANES * j, 0, 2);
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
        (vectors == 1 ? step_1 : vectors == 4 ? step_4 : step_8)(&token, from + c, to ? to + c : NULL, out + c, keys,
                                                                 width, t->beta.at != NULL);
        token.value += vectors * LANES;
    }
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
            for (int64_t at = 0; at < s->length; at += CHUNK) {
                fetch_chunk(t, head, s->first + at + CHUNK, smaller(CHUNK, s->length - at - CHUNK));
                const int is_kept = to || s->child >= 0 || at + CHUNK < s->length;
                advance(t, w, head, s->first + at, smaller(CHUNK, s->length - at), state, is_kept);
            }
        }
        if (to && (s->length > 1 || s->child >= 0)) memcpy(to, state, 4 * size);
        if (s->child < 0) return;
        for (place = s->child; t->segments[place].next >= 0; place = t->segments[place].next) {
            memcpy(free, state, 4 * size);
            follow(t, w, head, place, free, free + size);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- calls */

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
        const int64_t chunks = (s->length + CHUNK - 1) / CHUNK;
        const int64_t before = s->parent < 0 ? 0 : t->segments[s->parent].room;
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
