/* The backward pass of the gated recurrence; see scan.h. compiled.py calls the function at the end.

   Of the forward pass nothing is kept. A task is a tree and a slice of the heads that share keys, one after the other:
   it computes the states before a segment's chunks again, goes down to what continues the segment, in order, and comes
   back through the chunks. */

#include "scan.h"

/* ---------------------------------------------------------------------------------------------------- chunks */

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
            const float of_beta = product_of(gradient + i * width, w->residual + i * width, width);
            t->of_beta[(first + i) * t->num_heads + head] = of_beta;
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
        const float *key = w->score + i * CHUNK, *query = w->score + (count + i) * CHUNK;
        const float *between = w->between + i * CHUNK;
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
static void retreat(const Scan *t, Work *w, int64_t head, int64_t first, int64_t count, const float *state,
                    float *of_state) {
    const int64_t keys = t->key_width, width = t->value_width, wide = w->wide;
    take(t, w, head, first, count);
    make_scores(t, w);
    float *of_out = w->of_both + count * width, *of_both = w->of_both + w->skip * width;
    for (int64_t i = 0; i < count; i++) {
        float *value = w->value + i * width;
        read_row(of_out + i * width, &t->out_gradient, head, first + i, width);
        if (!w->has_beta) read_row(value, &t->value, head, first + i, width);
        for (int64_t c = 0; w->has_beta && c < width; c += LANES)
            store(value + c, load(w->residual + i * width + c) * w->beta[i]);
    }
    const Terms own = {w->score + count * CHUNK, of_out, 1, CHUNK, width, count};
    const Terms later = {w->ending, of_state, wide, 1, width, keys};
    product(w->of_value, width, count, NULL, own, width, UPPER);
    product(w->of_value, width, count, ONES, later, width, FULL);
    if (w->has_beta) solve_backward(t, w, head, first);
    const float *of_value = w->has_beta ? w->of_residual : w->of_value;
    for (int64_t i = 0; i < count; i++)
        memcpy(t->of_value + ((first + i) * t->num_heads + head) * width, of_value + i * width, 4 * width);

    turn(w->turned, 2 * CHUNK, of_both, width, rounded_up(w->num), width);
    turn(w->turned_value, CHUNK, w->value, width, rounded_up(count), width);
    const Terms of_scores = {of_both, w->turned_value, width, 1, CHUNK, width};
    const Terms of_begun = {state, w->turned, width, 1, 2 * CHUNK, width};
    const Terms of_ending = {of_state, w->turned_value, width, 1, CHUNK, width};
    product(w->of_score + w->skip * CHUNK, CHUNK, w->num, NULL, of_scores, count, FULL);
    product(w->turned_rows, 2 * CHUNK, keys, NULL, of_begun, w->num, FULL);
    turn(w->of_begun + w->skip * wide, wide, w->turned_rows, 2 * CHUNK, wide, rounded_up(w->num));
    product(w->turned_rows, 2 * CHUNK, keys, NULL, of_ending, count, FULL);
    turn(w->of_ending, wide, w->turned_rows, 2 * CHUNK, wide, rounded_up(count));

    for (int64_t n = 0; n < keys; n++)
        w->ended[n] = w->whole[n] * product_of(state + n * width, of_state + n * width, width);
    const Terms before = {w->begun + w->skip * wide, of_both, 1, wide, width, w->num};
    product(of_state, width, keys, w->whole, before, width, FULL);
    unfade(t, w);
    if (t->decay_width > 1) unscore_channels(w);
    else unscore_head(w);
    give_rows(t, w, head, first);
}

/* ---------------------------------------------------------------------------------------------------- trees */

/* Gradients of a segment and all that continue it; that of the state before it is added to `of_before`. */
static void come_back(const Scan *t, Work *w, int64_t head, int64_t place, const float *before, float *of_before,
                      float *free) {
    const Segment *s = t->segments + place;
    const int64_t size = t->key_width * t->value_width, chunks = (s->length + CHUNK - 1) / CHUNK;
    float *states = free, *of_state = states + (chunks + 1) * size, *residuals = of_state + size;
    const float *held = s->read < 0 ? before : t->held + (s->read * t->num_heads + head) * size;
    free = residuals + (w->has_beta ? chunks * CHUNK * t->value_width : 0);
    memcpy(states, held, 4 * size);
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t at = c * CHUNK, is_kept = c + 1 < chunks || s->child >= 0;
        fetch_chunk(t, head, s->first + at + CHUNK, smaller(CHUNK, s->length - at - CHUNK));
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
        if (c) fetch_chunk(t, head, s->first + (c - 1) * CHUNK, CHUNK);
        retreat(t, w, head, s->first + c * CHUNK, smaller(CHUNK, s->length - c * CHUNK), states + c * size, of_state);
    }
    for (int64_t i = 0; s->read < 0 && i < size; i++) of_before[i] += of_state[i];
}

/* ---------------------------------------------------------------------------------------------------- calls */

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
