/* Drafts of rows' next tokens, from earlier texts of their prompts: guessed, chosen and judged between two passes.

   A draw inverts the distribution in the order of token ids, by a uniform number that is known before. So the guess is
   where this number falls in the distribution that earlier texts tell, from the probabilities they were drawn with. A
   draft is fed behind the token before it, and counts where it is the very token that the row draws. So what is done here
   changes how long sampling takes, and no token. drafter.py mirrors the structs. */

#pragma once

#include "lanes.h"
#include <stdlib.h>
#include <time.h>

#define LONGEST 8     /* tokens of a context */
#define TABLES 6      /* contexts that are asked at most, of a prompt's texts and of others' */
#define KINDS 64      /* tokens that a context names at most, those that followed it first */
#define MOST_DRAFTS 7        /* drafts of a row in a pass */
#define LEVELS 15     /* steps of a guess's probability, each of which has its own share of right guesses */
#define SIZES 65      /* of passes */
#define REST 0.1f     /* probability of other tokens below which shorter contexts are not looked at */
#define DEVIATION 0.01 /* standard deviation of what is known of a cumulative probability, however often it was seen */
#define UNKNOWN 131072.0f /* token ids that an unknown one is thought to be among */
#define RISE 0.02f    /* share of a pass's time that one more position is thought to take before it was measured */
#define FORGETS 0.999f /* factor of times that were not measured again: what seemed slow long ago is tried again */
#define FILLS 0.25f   /* share of the least chance that pays at which guesses end: some fill a block that others began */
#define GAIN 1.12f    /* least gain in speed that is believed: times of passes vary */
#define DRAFTED 40    /* passes with drafts between two looks at how long passes without take */
#define PLAIN 3       /* passes of such a look: the first of a call is slow */
#define LATELY 0.95f  /* factor of what was saved before, look by look */
#define LOST 0.2f     /* share of a pass's time that drafts may have lost lately */
#define NEGLIGIBLE 0.005f /* share of a pass's time that a look may always take */
#define LONGEST_PAUSE 64  /* passes between two looks where none pays */

typedef struct {
    int32_t token, next, count; /* next: place of the one with the next larger token, or -1 */
    float total;                /* of its probabilities */
} Follower;

typedef struct {
    uint64_t key; /* 0: free */
    int32_t first, kinds, count;
} Context;

/* What followed each context of some texts. */
typedef struct {
    Context *contexts; /* `room` of them, half of them free at least */
    Follower *followers;
    int64_t room, num_contexts, follower_room, num_followers, num_tokens;
    int64_t orders[3]; /* lengths of contexts, falling */
} Texts;

/* What was learned of passes and guesses; all 0 at first. */
typedef struct {
    float seconds[65];         /* of passes by size, 0: not measured */
    float tried[60], right[60]; /* guesses by level and by the length of the context that told them: 8, 4, 2 or 1 */
    float looking;             /* seconds of a look at a row */
    float lately;              /* seconds that looks have saved lately, less what they took */
    float drafted, accepted, saved; /* tokens and seconds since they were asked for */
    int64_t always;            /* whether guesses are fed without asking the clock */
    int64_t pause, wait;       /* passes between looks, and those left */
    int64_t since;             /* passes with drafts since others were measured; below 0: those still to measure */
} Pace;

/* Rows that write up to `span` tokens each, with drafts. */
typedef struct {
    Pace *pace;
    Texts **texts;           /* of rows' prompts */
    const Texts *beside;     /* of any prompt */
    int32_t *ids;            /* rows x (8 + span): the newest before, then those written, then guesses */
    float *logprobs;         /* rows x span, as below */
    const double *uniforms;
    const int64_t *left;     /* tokens that a row may write */
    const int64_t *stops;    /* rows x num_stops: tokens that end a row, or -1 */
    const int64_t *groups, *lengths; /* of rows: slots of their prompts, and cached tokens of their own */
    const float *temperatures;
    int64_t *written;        /* by rows so far */
    int64_t *guesses, *chosen; /* of rows: guesses, and those of them that are fed */
    float *chances;          /* rows x 7: that a guess and those before it are right */
    int64_t *levels;
    int64_t *fed, *row_of, *place_of; /* of positions: token, row, and its place among the row's `span` */
    int64_t rows, span, num_stops, room, num_fed, is_over;
    double started, looked;  /* seconds of a clock, and of the look */
} Drafts;

/* ---------------------------------------------------------------------------------------------------- texts */

static uint64_t key_of(const int32_t *end, int64_t order) {
    uint64_t key = (uint64_t)order;
    for (int64_t i = -order; i < 0; i++) {
        key = (key ^ (uint64_t)(uint32_t)end[i]) * 0x9E3779B97F4A7C15u;
        key ^= key >> 29;
    }
    return key | 1;
}

/* Where a context is, or would be. */
static Context *place_of(const Texts *t, uint64_t key) {
    uint64_t at = key >> 7 & (uint64_t)(t->room - 1);
    while (t->contexts[at].key && t->contexts[at].key != key) at = (at + 1) & (uint64_t)(t->room - 1);
    return &t->contexts[at];
}

/* Make room for one more context and follower; 0 where there is no memory. */
static int grow(Texts *t) {
    if (t->num_followers == t->follower_room) {
        const int64_t room = larger(256, 2 * t->follower_room);
        Follower *followers = realloc(t->followers, (size_t)room * sizeof(Follower));
        if (!followers) return 0;
        t->followers = followers, t->follower_room = room;
    }
    if (2 * t->num_contexts < t->room) return 1;
    Texts wider = *t;
    wider.room = larger(256, 2 * t->room), wider.contexts = calloc((size_t)wider.room, sizeof(Context));
    if (!wider.contexts) return 0;
    for (int64_t i = 0; i < t->room; i++)
        if (t->contexts[i].key) *place_of(&wider, t->contexts[i].key) = t->contexts[i];
    free(t->contexts);
    *t = wider;
    return 1;
}

static void count_after(Texts *t, const int32_t *end, int64_t order, float probability) {
    if (!grow(t)) return;
    const uint64_t key = key_of(end, order);
    Context *c = place_of(t, key);
    if (!c->key) *c = (Context){key, -1, 0, 0}, t->num_contexts++;
    c->count++;
    int32_t *at = &c->first;
    while (*at >= 0 && t->followers[*at].token < *end) at = &t->followers[*at].next;
    if (*at < 0 || t->followers[*at].token != *end) {
        if (c->kinds == KINDS) return;
        const int32_t own = (int32_t)t->num_followers++;
        t->followers[own] = (Follower){*end, *at, 0, 0.0f};
        *at = own, c->kinds++;
    }
    t->followers[*at].count++, t->followers[*at].total += probability;
}

/* Count the tokens from place `first` on, whose log-probabilities these are. */
void covey_count_text(Texts *t, const int32_t *ids, const float *logprobs, int64_t first, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        const float probability = expf(logprobs[i]);
        for (int o = 0; o < 3; o++)
            if (t->orders[o] <= first + i) count_after(t, ids + first + i, t->orders[o], probability);
    }
    t->num_tokens += num;
}

void covey_clear_texts(Texts *t) {
    free(t->contexts), free(t->followers);
    t->contexts = NULL, t->followers = NULL;
    t->room = t->num_contexts = t->follower_room = t->num_followers = t->num_tokens = 0;
}

/* ---------------------------------------------------------------------------------------------------- guesses */

/* 1 for a number far above an estimated bound, -1 below. */
static double beyond(double uniform, double bound, int64_t num_seen) {
    if (bound <= 1e-9 || bound >= 1.0 - 1e-9) return bound < 0.5 ? 1.0 : -1.0;
    return erf((uniform - bound) / sqrt(bound * (1.0 - bound) / ((double)num_seen + 1.0) + DEVIATION * DEVIATION));
}

/* A context that tells next tokens, and the share of the probability that it tells of. */
typedef struct {
    const Follower *all;
    int32_t at, count, order;
    float share;
} Teller;

INLINE float chance_of(const Teller *t, const Follower *f) {
    const float often = (float)f->count / (float)t->count, mean = f->total / (float)f->count;
    return t->share * (often < mean ? often : mean);
}

/* The contexts that end here, the longest first; `rest`: what they tell nothing of. */
static int tellers(const Texts *own, const Texts *beside, const int32_t *end, Teller told[TABLES], float *rest) {
    const Texts *const both[2] = {own, beside};
    int num = 0;
    *rest = 1.0f;
    for (int64_t order = LONGEST; order > 0; order /= 2)
        for (int b = 0; b < 2; b++) {
            const Texts *t = both[b];
            if (!t || !t->room || *rest < REST) continue;
            if (t->orders[0] != order && t->orders[1] != order && t->orders[2] != order) continue;
            const Context *c = place_of(t, key_of(end, order));
            if (!c->key) continue;
            told[num] = (Teller){t->followers, c->first, c->count, (int32_t)order, *rest};
            for (int32_t at = c->first; at >= 0; at = t->followers[at].next)
                *rest -= chance_of(&told[num], &t->followers[at]);
            if (*rest < 0.0f) *rest = 0.0f;
            num++;
        }
    return num;
}

/* The token that `uniform` draws, or -1, its chance, and the length of the longest context that tells of it. */
static int32_t guess(const Texts *own, const Texts *beside, const int32_t *end, double uniform, float *chance,
                     int32_t *order) {
    Teller told[TABLES];
    float rest, most = 0.0f;
    const int num = tellers(own, beside, end, told, &rest);
    const int64_t num_seen = num ? told[0].count : 0;
    int32_t likeliest = -1;
    *chance = 0.0f, *order = num ? told[0].order : 0;
    for (double below = 0.0;;) {
        int32_t token = INT32_MAX;
        for (int i = 0; i < num; i++)
            if (told[i].at >= 0 && told[i].all[told[i].at].token < token) token = told[i].all[told[i].at].token;
        if (token == INT32_MAX) return likeliest;
        float own_chance = 0.0f;
        for (int i = 0; i < num; i++) {
            const Follower *f = told[i].at >= 0 ? &told[i].all[told[i].at] : NULL;
            if (f && f->token == token) own_chance += chance_of(&told[i], f), told[i].at = f->next;
        }
        const double unknown = rest * fmin(1.0, (float)token / UNKNOWN), low = below + unknown; /* of smaller ids */
        below += own_chance;
        if (below + unknown > uniform) {
            *chance = (float)fmax(0.0, 0.5 * (beyond(uniform, low, num_seen) - beyond(uniform, below + unknown, num_seen)));
            return token;
        }
        if (likeliest < 0 || own_chance > most) most = own_chance, likeliest = token;
    }
}

int32_t covey_guess(const Texts *own, const Texts *beside, const int32_t *end, const double *uniform, float *chance) {
    int32_t order;
    return guess(own, beside, end, *uniform, chance, &order);
}

/* ---------------------------------------------------------------------------------------------------- passes */

/* A number of positions, rounded up to a size of pass. */
static int64_t size_of(int64_t num_fed) {
    const int64_t step = num_fed <= 8 ? 1 : num_fed <= 32 ? 4 : 16;
    return smaller(SIZES - 1, (num_fed + step - 1) / step * step);
}

/* Take a measurement; one that is longer than others counts little: something else ran. */
void covey_note_pass(Pace *p, int64_t num_fed, float seconds) {
    const int64_t size = size_of(num_fed);
    for (int64_t i = 0; i < SIZES; i++)
        if (i != size) p->seconds[i] *= FORGETS;
    const float before = p->seconds[size] > 0.0f ? p->seconds[size] : seconds;
    p->seconds[size] = before + (seconds < before ? 0.5f * (seconds - before) : 0.1f * (fminf(seconds, 1.5f * before) - before));
}

/* The expected seconds of a pass, 0 without a shorter one. */
static float seconds_of(const Pace *p, int64_t num_fed) {
    const int64_t size = size_of(num_fed);
    int64_t below = size, above = size;
    while (below > 0 && !(p->seconds[below] > 0.0f)) below--;
    while (above < SIZES && !(p->seconds[above] > 0.0f)) above++;
    if (below == 0) return 0.0f;
    if (above == SIZES) return p->seconds[below] * (1.0f + RISE * (float)(size - below));
    if (above == below) return p->seconds[size];
    return p->seconds[below] + (float)(size - below) / (float)(above - below) * (p->seconds[above] - p->seconds[below]);
}

/* The least chance of a draft that can pay: what one more position takes, measured by what a row brings. */
static float least_chance(const Pace *p, int64_t rows, int64_t room) {
    const float plain = seconds_of(p, rows);
    float least = 2.0f;
    for (int64_t more = 1; more <= room - rows && plain > 0.0f; more++) {
        const float own = (seconds_of(p, rows + more) - plain) / (float)more * (float)rows / plain;
        if (own < least) least = own;
    }
    return p->always ? 0.0f : least < 0.02f ? 0.02f : least;
}

/* Tenths of a chance, and fiftieths of the last one, for each length of a context. */
static int64_t level_of(float chance, int32_t order) {
    const int64_t step = chance < 0.9f ? (int64_t)(10.0f * chance) : smaller(LEVELS - 1, 9 + (int64_t)(50.0f * (chance - 0.9f)));
    return LEVELS * (order > 4 ? 3 : order / 2) + step;
}

/* Most of a guess's own chance is believed at first, as if it had been seen six times. */
INLINE float right_share(const Pace *p, int64_t level, float chance) {
    return (p->right[level] + 6.0f * 0.75f * chance) / (p->tried[level] + 6.0f);
}

static void learn(Pace *p, int64_t level, int is_right) {
    p->tried[level] += 1.0f, p->right[level] += (float)is_right;
    if (p->tried[level] > 1000.0f) p->tried[level] *= 0.5f, p->right[level] *= 0.5f;
}

/* ---------------------------------------------------------------------------------------------------- rows */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

INLINE int32_t *end_of_row(const Drafts *d, int64_t row) {
    return d->ids + row * (LONGEST + d->span) + LONGEST + d->written[row];
}

INLINE int is_stop(const Drafts *d, int64_t row, int32_t token) {
    for (int64_t n = 0; n < d->num_stops; n++)
        if (d->stops[row * d->num_stops + n] == token) return 1;
    return 0;
}

/* Guess a row's next tokens, up to its end, while they can pay. */
static void guess_row(Drafts *d, int64_t row, float least) {
    const int64_t most = smaller(MOST_DRAFTS, d->left[row] - d->written[row] - 1);
    int32_t *end = end_of_row(d, row);
    float all = 1.0f, chance;
    int32_t order;
    for (int64_t i = 0; i < most; i++) {
        const double uniform = d->uniforms[row * d->span + d->written[row] + i];
        const int32_t token = guess(d->texts[row], d->beside, end + i, uniform, &chance, &order);
        if (token < 0 || is_stop(d, row, token)) return;
        const int64_t level = level_of(chance, order);
        all *= right_share(d->pace, level, chance);
        if (all < least) return;
        end[i] = token, d->levels[row * MOST_DRAFTS + i] = level, d->chances[row * MOST_DRAFTS + i] = all;
        d->guesses[row] = i + 1;
    }
}

/* Choose the likeliest guesses, as many as make sampling fastest. */
static void choose(Drafts *d) {
    const float look = d->pace->looking * (float)d->rows;
    float expected = (float)d->rows, fastest = GAIN * expected / seconds_of(d->pace, d->rows);
    int64_t best = 0, order[4 * SIZES], num = 0;
    for (; num < smaller(d->room - d->rows, 4 * SIZES); num++) {
        int64_t next = -1;
        float most = 0.0f;
        for (int64_t row = 0; row < d->rows; row++) {
            const int64_t at = d->chosen[row];
            if (at < d->guesses[row] && d->chances[row * MOST_DRAFTS + at] > most)
                next = row, most = d->chances[row * MOST_DRAFTS + at];
        }
        if (next < 0) break;
        order[num] = next, d->chosen[next]++, expected += most;
        const float speed = expected / (seconds_of(d->pace, d->rows + num + 1) + look);
        if (speed > fastest || d->pace->always) best = num + 1, fastest = speed;
    }
    while (num > best) d->chosen[order[--num]]--;
}

/* Look for drafts where they may pay. */
static void look(Drafts *d) {
    Pace *p = d->pace;
    const float plain = seconds_of(p, d->rows), least = least_chance(p, d->rows, d->room);
    for (int64_t row = 0; row < d->rows; row++) d->guesses[row] = d->chosen[row] = 0;
    p->lately *= LATELY, d->looked = 0.0f;
    if (p->wait > 0) {
        p->wait--;
        return;
    }
    if (p->since < 0 && !p->always) return;
    if (least >= 1.0f || d->room <= d->rows || (plain == 0.0f && !p->always)) return;
    const double started = now();
    for (int64_t row = 0; row < d->rows; row++) guess_row(d, row, FILLS * least);
    choose(d);
    d->looked = now() - started;
    int64_t num = 0;
    for (int64_t row = 0; row < d->rows; row++) num += d->chosen[row];
    p->looking += 0.2f * ((float)d->looked / (float)d->rows - p->looking);
    p->lately -= (float)d->looked, p->saved -= (float)d->looked;
    const int pays = p->always || (p->lately >= -LOST * plain && (num || d->looked < NEGLIGIBLE * plain));
    p->pause = pays ? 0 : smaller(LONGEST_PAUSE, 2 * p->pause + 1), p->wait = p->pause;
}

/* Fill the positions of a pass: each row's newest token and its drafts. */
void covey_draft(Drafts *d) {
    look(d);
    int64_t f = 0;
    for (int64_t row = 0; row < d->rows; row++)
        for (int64_t i = 0; i <= d->chosen[row]; i++, f++) {
            d->fed[f] = end_of_row(d, row)[i - 1];
            d->row_of[f] = row, d->place_of[f] = d->written[row] + i;
        }
    d->num_fed = f, d->started = now();
}

/* Take what was drawn for a row from position `f` on, up to its first wrong draft; returns the number of tokens. */
static int64_t take_row(Drafts *d, int64_t row, const int64_t *tokens, const float *logprobs) {
    int32_t *end = end_of_row(d, row);
    float *own = d->logprobs + row * d->span + d->written[row];
    int64_t num = 0;
    for (int is_right = 1, has_ended = 0; is_right && !has_ended && num <= d->chosen[row]; num++) {
        const int32_t token = (int32_t)tokens[num];
        is_right = end[num] == token;
        if (num < d->guesses[row]) learn(d->pace, d->levels[row * MOST_DRAFTS + num], is_right);
        end[num] = token, own[num] = logprobs[num];
        has_ended = is_stop(d, row, token) || d->written[row] + num + 1 == d->left[row];
        d->is_over |= has_ended;
    }
    covey_count_text(d->texts[row], end - LONGEST, own, LONGEST, num);
    d->written[row] += num;
    return num;
}

/* Judge a pass by what was drawn at its positions. */
void covey_judge(Drafts *d, const int64_t *tokens, const float *logprobs) {
    const float seconds = (float)(now() - d->started), plain = seconds_of(d->pace, d->rows);
    int64_t taken = 0;
    for (int64_t row = 0, f = 0; row < d->rows; row++) {
        const int64_t next = f + d->chosen[row] + 1;
        taken += take_row(d, row, tokens + f, logprobs + f);
        f = next;
    }
    covey_note_pass(d->pace, d->num_fed, seconds);
    d->pace->since += d->num_fed > d->rows || d->pace->since < 0;
    if (plain == 0.0f || d->pace->since > DRAFTED) d->pace->since = -PLAIN;
    d->pace->drafted += (float)(d->num_fed - d->rows), d->pace->accepted += (float)(taken - d->rows);
    if (d->num_fed == d->rows || plain == 0.0f) return;
    const float saved = plain * (float)taken / (float)d->rows - seconds;
    d->pace->saved += saved, d->pace->lately += saved;
}
