/* Decoder layers of Llama's family in passes without gradient: products, norms, rotary positions and gate, in two
   functions for what comes before attention and what comes after it; and all layers of a decode step in one.

   A row's numbers depend on nothing but the row: each of its sums runs over all inputs in order, whatever rows are
   beside it and however many threads there are. Sums are float32; what is multiplied is float32 or bfloat16 (both
   operands then, as autocast does it, but nothing else is rounded). fused.py mirrors the structs.

   Weights lie in panels of PANEL outputs: for each input, or pair of inputs in bfloat16, the weights of all outputs of a
   panel side by side. ROWS rows and a panel are multiplied at a time, TOGETHER of them with all their sums in registers,
   or all of them in tiles. Decoding has few rows, so that the time goes into reading weights: while a panel is multiplied
   the next one is fetched, in as many parts as there are blocks of rows. */

#include "decode.h"
#include "drafts.h"
#include "draw.h"
#include "mixer.h"
#include <omp.h>
#include <sys/mman.h>

#if LANES == 16
#define TOGETHER 8 /* rows whose sums are in registers */
#else
#define TOGETHER 6
#endif
#ifdef __AMX_BF16__
#define ROWS 32
#else
#define ROWS TOGETHER
#endif
#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define BATCH 64 /* rows that go through all panels together: they stay in the cache */

const int64_t covey_panel = PANEL;

typedef struct Adapter Adapter;

typedef struct Product {
    const void *panels;
    const float *bias; /* as many as there are panels for, or NULL */
    const float *scales; /* of outputs, as many, where weights have eight bits, or NULL */
    const Adapter *adapter; /* what is computed beside the product, or NULL */
    const struct Product *next; /* whose weights are read after these, or NULL */
    int64_t inner, outer;
} Product;

/* LoRA adapters of the layers of a product, side by side: the numbers between their two products, of all layers, are
   `down.outer` a row, and a panel of outputs reads `up.inner` of them, from `first` on. */
struct Adapter {
    Product down, up;
    const int64_t *first; /* of panels */
    const float *scales;  /* of outputs, as many as there are panels for */
};

/* A layer mixes tokens, by attention, by a mixer or by both side by side, and has two products behind; mixing or these
   may be absent, whose products are 0 wide. Norms, each or NULL: before the mixing, of what it adds, before the products
   behind, of what they add. */
typedef struct {
    Product into, output, gate, up, down; /* without a gate, `up` is squared where it is above 0 */
    const float *norm_before, *norm_mixed, *norm_after, *norm_end;
    const float *query_norm, *key_norm; /* of a head each or, `norms_whole`, of all heads; NULL for none */
    const Mixer *mixer;                 /* or NULL; its columns stand behind those of attention, if any */
    int64_t hidden_width, head_width, num_queries, num_keys, norms_whole;
    int64_t turned, angles;             /* numbers of a head that are turned to positions; a row's angles before these */
    int64_t gates;                      /* of what was attended, of a head or of a number each; behind the heads */
    int64_t half;
    float eps, head_eps;
    float scale;                        /* of what is added to the hidden numbers */
} Layer;

typedef struct {
    float *hidden;                 /* rows x hidden width, changed in place */
    const float *cosines, *sines;  /* steps x rows x numbers that are turned, of each kind of layer */
    float *heads;                  /* rows x (queries, keys, values) x head width, or what a mixer reads */
    float *attended;               /* rows x what enters the output */
    float *mixed;                  /* rows x what a mixer convolves */
    void *normed, *gated;          /* room for BATCH rows of what enters a product */
    void *narrow[2];               /* the same of what enters the second product of an adapter */
    void *eighths;                 /* the same of what is rounded to eight bits */
    int64_t rows, angle_rows, first_angle, num_threads; /* rows of all steps, and those of steps before this one */
} Pass;

/* What a layer's attention reads, and how (struct Decode). */
typedef struct {
    const void *prompt_keys, *prompt_values;
    void *row_keys, *row_values;
    Held held; /* of a mixer */
    int64_t window;
    float scaling;
} Cached;

typedef lanes Sums[ROWS][VECTORS];

/* Weights that are read next, and how many bytes of them are fetched for PANEL numbers, or pairs, that are multiplied. */
typedef struct {
    const char *from;
    int64_t step;
} Ahead;

INLINE void fetch_ahead(Ahead ahead, int64_t place) {
    __builtin_prefetch(ahead.from + place * ahead.step, 0, 3);
    __builtin_prefetch(ahead.from + place * ahead.step + ahead.step / 2, 0, 3);
}

#include "eighths.h"
#include "tiles.h"

/* The weights of words that are multiplied at a time: words themselves, or first the lower and then the upper of a pair. */
INLINE lanes part_of_word(lanes word, const int part, const int half) {
    if (!half || PAIR == 2) return word;
    return (lanes)(part ? (words)word & 0xffff0000 : (words)word << 16);
}

/* Sums of the first `num` rows of a tile: rows at x that meet `steps` words of weights, `stride` words apart, `last` + 1 of
   them (the others repeat the last one). A sum is the same for any `num`. */
INLINE void multiply(const float *x, int64_t stride, int64_t steps, int64_t last, const float *panel, Ahead ahead,
                     lanes out[][VECTORS], const int num, const int half) {
    const float *row[TOGETHER];
    lanes sum[TOGETHER][VECTORS];
    const int parts = half ? 2 / PAIR : 1;
#pragma GCC unroll 8
    for (int r = 0; r < num; r++) {
        row[r] = x + smaller(r, last) * stride;
        for (int v = 0; v < VECTORS; v++) sum[r][v] = (lanes){0};
    }
    for (int64_t i = 0; i < steps; i++) {
        fetch_ahead(ahead, i);
        for (int part = 0; part < parts; part++) {
            lanes weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                weights[v] = part_of_word(load(panel + i * PANEL + v * LANES), part, half);
                KEEP(weights[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < num; r++) {
                const lanes own = everywhere(row[r] + i * parts + part);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) sum[r][v] = plus_product(sum[r][v], own, weights[v], half);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num; r++)
        for (int v = 0; v < VECTORS; v++) out[r][v] = sum[r][v];
}

/* Functions of their own for few rows: products of bfloat16 take longer than reading weights. */
#define MULTIPLY(name, num, half)                                                                                     \
    static __attribute__((noinline)) void name(const float *x, int64_t stride, int64_t steps, int64_t last,           \
                                               const float *panel, Ahead ahead, lanes out[][VECTORS]) {               \
        multiply(x, stride, steps, last, panel, ahead, out, num, half);                                               \
    }
MULTIPLY(multiply_2, 2, 0)
MULTIPLY(multiply_4, 4, 0)
MULTIPLY(multiply_all, TOGETHER, 0)
MULTIPLY(multiply_half_2, 2, 1)
MULTIPLY(multiply_half_4, 4, 1)
MULTIPLY(multiply_half_all, TOGETHER, 1)

static void (*const MULTIPLIES[2][3])(const float *, int64_t, int64_t, int64_t, const float *, Ahead, lanes[][VECTORS]) = {
    {multiply_2, multiply_4, multiply_all}, {multiply_half_2, multiply_half_4, multiply_half_all}};

/* Rows that enter a product, and the same in eight bits where its weights have eight. */
typedef struct {
    const void *x;
    const uint8_t *eighths;
} Given;

INLINE int64_t num_panels(const Product *p) { return (p->outer + PANEL - 1) / PANEL; }

INLINE int64_t panel_bytes(const Product *p, const int half) {
    return PANEL * (p->scales ? spanned(p->inner) : (half ? 2 : 4) * p->inner);
}

/* A thread's first panel: threads share out panels in order. */
INLINE int64_t first_panel(const Product *p, int64_t thread) {
    const int64_t threads = omp_get_num_threads(), each = num_panels(p) / threads, more = num_panels(p) % threads;
    return thread * each + smaller(thread, more);
}

/* What the rows from `row` on, of `last` + 1, fetch of the thread's next panel: of this product, or of the next. */
INLINE Ahead ahead_of(const Product *p, int64_t panel, int64_t row, int64_t last, int64_t together, const int half) {
    const int64_t bytes = panel_bytes(p, half), parts = last / together + 1, thread = omp_get_thread_num();
    const int is_last = p->next && panel + 1 == first_panel(p, thread + 1);
    const int64_t from = is_last ? first_panel(p->next, thread) * panel_bytes(p->next, half) : (panel + 1) * bytes;
    const char *panels = is_last ? p->next->panels : p->panels;
    return (Ahead){panels + from + row / together * bytes / parts, PANEL * 4 / parts};
}

INLINE void sum_up_eighths(const Product *p, const uint8_t *x, int64_t first, int64_t last, int64_t panel, Sums sum) {
    const int64_t end = smaller(last, first + ROWS - 1), stride = eighths_stride(p->inner);
    const uint8_t *weights = (const uint8_t *)p->panels + panel * PANEL * spanned(p->inner);
    for (int64_t r = first; r <= end; r += EIGHTH_ROWS)
        (end == r      ? multiply_eighths_1
         : end - r < 2 ? multiply_eighths_2
         : end - r < 4 ? multiply_eighths_4
                       : multiply_eighths_EIGHTH_ROWS)(x + r * stride, p->inner, end - r, weights,
                                                       ahead_of(p, panel, r, last, EIGHTH_ROWS, 0), sum + (r - first));
    for (int64_t r = 0; r <= end - first; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] *= load(p->scales + panel * PANEL + v * LANES);
}

/* Rows first .. last of x, `width` numbers each, ROWS at most, times a panel, from number `at` on. */
INLINE void sum_up(const Product *p, const void *x, int64_t width, int64_t at, int64_t first, int64_t last,
                   int64_t panel, Sums sum, const int half) {
    const int64_t more = smaller(last - first, ROWS - 1), together = half ? PAIR : 1; /* numbers of a row's word */
    const int64_t steps = p->inner / (half ? 2 : 1), stride = width / together;
    const float *weights = (const float *)p->panels + panel * steps * PANEL;
    const float *from = (const float *)x + (first * width + at) / together;
#ifdef TILE_ROWS
    if (half && goes_by_tiles(steps)) {
        multiply_tiles((const uint32_t *)from, stride, steps, more, (const uint32_t *)weights, sum);
        return;
    }
#endif
    for (int64_t r = 0; r <= more; r += TOGETHER)
        MULTIPLIES[half][more - r < 2 ? 0 : more - r < 4 ? 1 : 2](
            from + r * stride, stride, steps, more - r, weights, ahead_of(p, panel, first + r, last, TOGETHER, half), sum + r);
}

/* The same of a whole product: its bias, and its adapter, from what was made `narrow` for it. */
INLINE void tile(const Product *p, Given given, const void *narrow, int64_t first, int64_t last, int64_t panel,
                 Sums sum, const int half) {
    const int64_t num = smaller(ROWS, last - first + 1);
    if (p->scales)
        sum_up_eighths(p, given.eighths, first, last, panel, sum);
    else
        sum_up(p, given.x, p->inner, 0, first, last, panel, sum, half);
    if (p->bias)
        for (int64_t r = 0; r < num; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] += load(p->bias + panel * PANEL + v * LANES);
    if (!p->adapter) return;
    const Adapter *a = p->adapter;
    Sums more;
    sum_up(&a->up, narrow, a->down.outer, a->first[panel], first, last, panel, more, half);
    for (int64_t r = 0; r < num; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] += load(a->scales + panel * PANEL + v * LANES) * more[r][v];
}

/* narrow = x * the first product of the adapter, where there is one, rounded as it enters the second one; shared out
   among the threads. */
INLINE void narrow_rows(const Product *p, const void *x, void *narrow, int64_t rows, const int half) {
    if (!p->adapter) return;
    const Product *down = &p->adapter->down;
#pragma omp for schedule(static) collapse(2)
    for (int64_t first = 0; first < rows; first += ROWS)
        for (int64_t panel = 0; panel < num_panels(down); panel++) {
            Sums sum;
            sum_up(down, x, down->inner, 0, first, rows - 1, panel, sum, half);
            const int64_t count = smaller(PANEL, down->outer - panel * PANEL);
            for (int64_t r = 0; r < smaller(ROWS, rows - first); r++)
                for (int64_t c = 0; c < count; c++)
                    put_operand(narrow, (first + r) * down->outer + panel * PANEL + c, ((const float *)sum[r])[c], half);
        }
}

/* out = x * weights, or this times `scale` and what is there already in `plus`, where there is such; shared out among
   the threads, which fetch meanwhile what attention will read. */
INLINE void multiply_rows(const Product *p, Given given, void *narrow, const float *plus, float scale, float *out,
                          int64_t rows, const Decode *then, const int half) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), own = first_panel(p, thread);
    narrow_rows(p, given.x, narrow, rows, half);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < num_panels(p); panel++) {
        if (then) fetch_part(then, thread, threads, panel - own, first_panel(p, thread + 1) - own);
        for (int64_t first = 0; first < rows; first += ROWS) {
            Sums sum;
            tile(p, given, narrow, first, rows - 1, panel, sum, half);
            const int64_t count = smaller(PANEL, p->outer - panel * PANEL);
            for (int64_t r = 0; r < smaller(ROWS, rows - first); r++) {
                const int64_t at = (first + r) * p->outer + panel * PANEL;
                const float *own = (const float *)sum[r];
                for (int64_t c = 0; c < count; c++) out[at + c] = plus ? plus[at + c] + scale * own[c] : own[c];
            }
        }
    }
}

INLINE float swish(float x) {
    const float e = exponential(x < 0.0f ? x : -x);
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* gated = swish(x * gate) * (x * up), or what is above 0 of x * up, squared; shared out among the threads. */
INLINE void gate_rows(const Layer *l, Given given, void *const narrow[2], void *gated, int64_t rows, const int half) {
    const int64_t has_gate = l->gate.outer;
    if (has_gate) narrow_rows(&l->gate, given.x, narrow[0], rows, half);
    narrow_rows(&l->up, given.x, narrow[1], rows, half);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < num_panels(&l->up); panel++)
        for (int64_t first = 0; first < rows; first += ROWS) {
            Sums gate, up;
            if (has_gate) tile(&l->gate, given, narrow[0], first, rows - 1, panel, gate, half);
            tile(&l->up, given, narrow[1], first, rows - 1, panel, up, half);
            const int64_t count = smaller(PANEL, l->up.outer - panel * PANEL);
            for (int64_t r = 0; r < smaller(ROWS, rows - first); r++) {
                const int64_t at = (first + r) * l->up.outer + panel * PANEL;
                const float *g = (const float *)gate[r], *u = (const float *)up[r];
                for (int64_t c = 0; c < count; c++)
                    put_operand(gated, at + c, has_gate ? swish(g[c]) * u[c] : u[c] < 0.0f ? 0.0f : u[c] * u[c], half);
            }
        }
}

INLINE void norm_rows(const float *x, const float *weight, void *out, int64_t rows, int64_t width, float eps,
                      const int half) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) norm(x + row * width, weight, out, row * width, width, eps, half);
}

/* Norms of queries and keys, where there are any, and their rotary positions; or norms of all heads of a row alone. */
INLINE void rotate_rows(const Layer *l, const float *cosines, const float *sines, float *heads, int64_t rows,
                        const int turns) {
    const int64_t width = l->head_width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *own = heads + row * l->into.outer, *keys = own + l->num_queries * width;
        if (l->norms_whole) {
            norm(own, l->query_norm, own, 0, l->num_queries * width, l->head_eps, 0);
            norm(keys, l->key_norm, keys, 0, l->num_keys * width, l->head_eps, 0);
        }
        for (int64_t head = 0; turns && head < l->num_queries + l->num_keys; head++) {
            float *x = own + head * width;
            const float *weight = head < l->num_queries ? l->query_norm : l->key_norm;
            if (weight && !l->norms_whole) norm(x, weight, x, 0, width, l->head_eps, 0);
            turn(x, cosines + row * l->turned, sines + row * l->turned, l->turned);
        }
    }
}

/* Rows with what the product reads of them, for which `room` is used. */
INLINE Given ready(const Product *p, const void *x, void *room, int64_t rows) {
    if (!p->scales) return (Given){x, NULL};
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        round_row((const float *)x + row * p->inner, p->inner, (uint8_t *)room + row * eighths_stride(p->inner));
    return (Given){x, room};
}

/* What enters a product: the numbers themselves, or rounded ones in `room`. */
INLINE const void *operand(const float *x, void *room, int64_t rows, int64_t width, const int half) {
    if (!half) return x;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = row * width; c < (row + 1) * width; c++) put_operand(room, c, x[c], half);
    return room;
}

/* The same of the hidden numbers behind a norm, if there is one. */
INLINE const void *normed_operand(const Layer *l, const float *hidden, const float *weight, void *room, int64_t rows,
                                  const int half) {
    if (!weight) return operand(hidden, room, rows, l->hidden_width, half);
    norm_rows(hidden, weight, room, rows, l->hidden_width, l->eps, half);
    return room;
}

/* hidden += scale * (x * weights), or the norm of this, for which `room` is used. */
INLINE void add_product(const Layer *l, const Product *p, Given given, void *narrow, const float *weight, float *room,
                        float *hidden, int64_t rows, const int half) {
    multiply_rows(p, given, narrow, weight ? NULL : hidden, l->scale, weight ? room : hidden, rows, NULL, half);
    if (!weight) return;
    norm_rows(room, weight, room, rows, l->hidden_width, l->eps, 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = row * l->hidden_width; c < (row + 1) * l->hidden_width; c++) hidden[c] += l->scale * room[c];
}

INLINE int64_t angles_at(const Layer *l, const Pass *p) {
    return l->angles * p->angle_rows + p->first_angle * l->turned;
}

/* `then`: attention that turns heads to their positions itself, or NULL. */
INLINE void read_heads(const Layer *l, const Pass *p, const Decode *then, const int half) {
    for (int64_t first = 0; first < p->rows; first += BATCH) {
        const int64_t rows = smaller(BATCH, p->rows - first);
        float *heads = p->heads + first * l->into.outer;
        const void *x = normed_operand(l, p->hidden + first * l->hidden_width, l->norm_before, p->normed, rows, half);
        const Given given = ready(&l->into, x, p->eighths, rows);
        multiply_rows(&l->into, given, p->narrow[0], NULL, 1.0f, heads, rows, then, half);
        const int64_t at = angles_at(l, p) + first * l->turned;
        if (l->num_queries && (!then || l->norms_whole))
            rotate_rows(l, p->cosines + at, p->sines + at, heads, rows, !then);
    }
}

/* What was attended times the logistic function of the gates, which stand behind queries, keys and values. */
INLINE void gate_attended(const Layer *l, const float *heads, float *attended, int64_t rows) {
    const int64_t width = l->num_queries * l->head_width, at = (l->num_queries + 2 * l->num_keys) * l->head_width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t gate = 0, of = width / l->gates; gate < l->gates; gate++) {
            const float open = logistic(heads[row * l->into.outer + at + gate]);
            for (int64_t c = gate * of; c < (gate + 1) * of; c++) attended[row * l->output.inner + c] *= open;
        }
}

/* Whether attention leaves its results as the product behind reads them. */
INLINE int leaves_half(const Layer *l, const Pass *p) {
    return l->half && !l->gates && !l->mixer && p->rows <= BATCH;
}

/* `is_half`: what was attended lies rounded in `gated`. */
INLINE void finish_layer(const Layer *l, const Pass *p, const int is_half, const int half) {
    const int64_t width = l->hidden_width;
    for (int64_t first = 0; first < p->rows; first += BATCH) {
        const int64_t rows = smaller(BATCH, p->rows - first);
        float *hidden = p->hidden + first * width;
        if (l->output.outer) {
            float *from = p->attended + first * l->output.inner;
            if (l->gates) gate_attended(l, p->heads + first * l->into.outer, from, rows);
            const void *attended = is_half ? p->gated : operand(from, p->gated, rows, l->output.inner, half);
            const Given given = ready(&l->output, attended, p->eighths, rows);
            add_product(l, &l->output, given, p->narrow[0], l->norm_mixed, p->normed, hidden, rows, half);
        }
        if (!l->up.outer) continue;
        const void *x = normed_operand(l, hidden, l->norm_after, p->normed, rows, half);
        gate_rows(l, ready(&l->up, x, p->eighths, rows), p->narrow, p->gated, rows, half);
        add_product(l, &l->down, ready(&l->down, p->gated, p->eighths, rows), p->narrow[0], l->norm_end, p->normed, hidden, rows, half);
    }
}

/* Compiled once for each type of numbers, whoever calls. */
static __attribute__((noinline)) void before_attention(const Layer *l, const Pass *p, const Decode *then) {
    l->half ? read_heads(l, p, then, 1) : read_heads(l, p, then, 0);
}

static __attribute__((noinline)) void after_attention(const Layer *l, const Pass *p, const int is_half) {
    l->half ? finish_layer(l, p, is_half, 1) : finish_layer(l, p, is_half, 0);
}

/* `heads`: queries, keys and values of every row, turned to their positions. */
void covey_before_attention(const Layer *l, const Pass *p) {
#pragma omp parallel num_threads(p->num_threads)
    IN_TILES(before_attention(l, p, NULL))
}

/* `hidden`: what it is after the layer, given what attention made of the heads. */
void covey_after_attention(const Layer *l, const Pass *p) {
#pragma omp parallel num_threads(p->num_threads)
    IN_TILES(after_attention(l, p, 0))
}

void covey_decode_attention(const Decode *d) {
#pragma omp parallel num_threads(d->num_threads)
    decode_attention(d);
}

INLINE int64_t mixer_column(const Layer *l) { return (l->num_queries + 2 * l->num_keys) * l->head_width + l->gates; }

/* Let attention read and write what is a layer's own. */
INLINE void take_layer(Decode *d, const Layer *l, const Cached *cached, const Pass *p, int64_t half_out) {
    d->query = p->heads, d->new_key = d->query + l->num_queries * l->head_width;
    d->new_value = d->new_key + l->num_keys * l->head_width, d->half_out = half_out;
    d->out = half_out ? p->gated : p->attended;
    d->cosines = p->cosines + angles_at(l, p), d->sines = p->sines + angles_at(l, p), d->turned = l->turned;
    d->query_norm = l->norms_whole ? NULL : l->query_norm, d->key_norm = l->norms_whole ? NULL : l->key_norm;
    d->head_eps = l->head_eps;
    d->query_strides[0] = d->key_strides[0] = d->value_strides[0] = l->into.outer;
    d->query_strides[1] = d->key_strides[1] = d->value_strides[1] = d->width = l->head_width;
    d->num_key_heads = l->num_keys, d->queries_per_key = l->num_queries / l->num_keys, d->out_stride = l->output.inner;
    d->prompt_keys = cached->prompt_keys, d->prompt_values = cached->prompt_values;
    d->row_keys = cached->row_keys, d->row_values = cached->row_values;
    d->window = cached->window, d->scaling = cached->scaling;
}

static void decode_layers(const Layer *layers, const Cached *cached, int64_t num_layers, const Pass *p,
                          const Decode *attention) {
    Decode d = *attention; /* of each thread */
    for (int64_t l = 0; l < num_layers; l++) {
        const Layer *own = &layers[l];
        const int64_t width = own->num_queries * own->head_width, columns = own->into.outer;
        const int is_half = width && leaves_half(own, p);
        if (width) take_layer(&d, own, &cached[l], p, is_half);
        if (columns) before_attention(own, p, width ? &d : NULL);
        if (width) decode_attention(&d);
        if (own->mixer)
            mix_rows(own->mixer, &cached[l].held, p->heads + mixer_column(own), columns, p->mixed, p->attended + width,
                     own->output.inner, p->rows);
        after_attention(own, p, is_half);
    }
}

/* `hidden`: what all layers make of one new token a row, by one team of threads. */
void covey_decode_layers(const Layer *layers, const Cached *cached, int64_t num_layers, const Pass *p,
                         const Decode *attention) {
#pragma omp parallel num_threads(p->num_threads)
    IN_TILES(decode_layers(layers, cached, num_layers, p, attention))
}

/* Norms of rows, in place. */
void covey_norm(float *x, const float *weight, int64_t rows, int64_t width, float eps, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    norm_rows(x, weight, x, rows, width, eps, 0);
}

INLINE void product_of(const Product *p, const float *x, float *out, void *const room[3], int64_t rows, const int half) {
    for (int64_t first = 0; first < rows; first += BATCH) {
        const int64_t count = smaller(BATCH, rows - first);
        const void *given = operand(x + first * p->inner, room[0], count, p->inner, half);
        multiply_rows(p, ready(p, given, room[2], count), room[1], NULL, 1.0f, out + first * p->outer, count, NULL, half);
    }
}

static __attribute__((noinline)) void product(const Product *p, const float *x, float *out, void *const room[3],
                                              int64_t rows, int64_t half) {
    half ? product_of(p, x, out, room, rows, 1) : product_of(p, x, out, room, rows, 0);
}

/* out = x * weights + bias; `room` for BATCH rows of what enters a product, of what enters its adapter's second, and of
   what is rounded to eight bits. */
void covey_product(const Product *p, const float *x, float *out, void *const room[3], int64_t rows, int64_t half,
                   int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    IN_TILES(product(p, x, out, room, rows, half))
}

/* Steps of decoding: of each the layers, the head and the draw, whose tokens the next one reads. */
typedef struct {
    const Layer *layers;
    const Cached *cached;
    const Pass *tensors;
    const Decode *attention;  /* own lengths grow by the steps */
    const void *embedding;    /* tokens x hidden width */
    const float *norm;        /* before the head */
    const Product *head;
    int64_t *newest;          /* of rows: what the first step reads, and then what was drawn */
    const int64_t *stops;     /* rows x num_stops: tokens that end a row, or -1 */
    Draws draws;              /* of the first step; no tokens: logits are all that is wanted */
    Drafts *drafts;           /* rows whose steps may have several positions each, all arrays with room for them; or NULL */
    int64_t num_layers, num_stops, steps, half_embedding;
    float eps, factor;        /* of embeddings */
} Steps;

INLINE void embed_rows(const Steps *s) {
    const int64_t width = s->layers->hidden_width, rows = s->tensors->rows;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < width; c++) {
            const float x = s->factor * number_at(s->embedding, s->newest[row] * width + c, s->half_embedding);
            s->tensors->hidden[row * width + c] = s->half_embedding ? nearest(x) : x;
        }
}

/* Hidden numbers as the head reads them, of the type of embeddings. */
INLINE void end_rows(const Steps *s) {
    const int64_t width = s->layers->hidden_width;
    float *hidden = s->tensors->hidden;
    norm_rows(hidden, s->norm, hidden, s->tensors->rows, width, s->eps, 0);
    if (!s->half_embedding) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s->tensors->rows; row++)
        for (int64_t c = row * width; c < (row + 1) * width; c++) hidden[c] = nearest(hidden[c]);
}

INLINE int ends(const Steps *s, int64_t row) {
    for (int64_t n = 0; n < s->num_stops; n++)
        if (s->stops[row * s->num_stops + n] == s->newest[row]) return 1;
    return 0;
}

/* Draw a step's tokens; 1 where one ends its row. */
INLINE int draw_step(const Steps *s, int64_t step) {
    Draws d = s->draws;
    int has_ended = 0;
    d.tokens += step * d.rows, d.logprobs += step * d.rows, d.uniforms += step * d.rows;
    draw_rows(&d);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < d.rows; row++) {
        s->newest[row] = d.tokens[row];
        ((int64_t *)s->attention->own_lengths)[row]++;
    }
    for (int64_t row = 0; row < d.rows; row++) has_ended |= ends(s, row);
    return has_ended;
}

/* Groups' positions side by side, as attention reads them. */
static void fill_cells(Decode *d, const Drafts *f) {
    int64_t *cells = (int64_t *)d->row_of_cell, *most = &d->group_width;
    for (int64_t group = *most = 0; group < d->num_groups; group++) {
        int64_t own = 0;
        for (int64_t i = 0; i < f->num_fed; i++) own += f->groups[f->row_of[i]] == group;
        *most = larger(*most, own);
    }
    for (int64_t group = 0; group < d->num_groups; group++) {
        int64_t *cell = cells + group * *most;
        for (int64_t i = 0; i < f->num_fed; i++)
            if (f->groups[f->row_of[i]] == group) *cell++ = i;
        while (cell < cells + (group + 1) * *most) *cell++ = -1;
    }
}

/* Draft, and lay out the positions of a step; by one thread. */
static void begin_step(Steps *s) {
    Drafts *f = s->drafts;
    Decode *d = (Decode *)s->attention;
    covey_draft(f);
    for (int64_t i = 0; i < f->num_fed; i++) {
        const int64_t row = f->row_of[i], at = row * f->span + f->place_of[i];
        ((int64_t *)d->own_lengths)[i] = f->lengths[row] + f->place_of[i];
        ((int64_t *)d->angle_rows)[i] = at;
        ((double *)s->draws.uniforms)[i] = f->uniforms[at];
        ((float *)s->draws.temperatures)[i] = f->temperatures[row];
    }
    fill_cells(d, f);
    d->holders = f->num_fed > f->rows ? f->row_of : NULL;
    d->num_rows = s->draws.rows = ((Pass *)s->tensors)->rows = f->num_fed;
}

/* Draw a step's tokens, and keep what stands; 1 where one ends its row. */
INLINE int judge_step(const Steps *s) {
    draw_rows(&s->draws);
#pragma omp single
    covey_judge(s->drafts, s->draws.tokens, s->draws.logprobs);
    return s->drafts->is_over != 0;
}

/* Returns the number of steps, which is the same in all threads. */
static int64_t decode_steps(const Steps *s) {
    Pass p = *s->tensors; /* of each thread */
    void *const room[3] = {p.normed, p.narrow[0], p.eighths};
    for (int64_t step = 0; step < s->steps; step++) {
        if (s->drafts) {
#pragma omp single
            begin_step((Steps *)s);
            p.rows = s->tensors->rows;
        }
        embed_rows(s);
        decode_layers(s->layers, s->cached, s->num_layers, &p, s->attention);
        end_rows(s);
        product(s->head, p.hidden, (float *)s->draws.logits, room, p.rows, s->layers->half);
        if (!s->draws.tokens) break;
        if (s->drafts ? judge_step(s) : draw_step(s, step)) return step + 1;
        if (!s->drafts) p.first_angle += p.rows;
    }
    return s->steps;
}

int64_t covey_decode_steps(const Steps *s) {
    int64_t steps = 0;
#pragma omp parallel num_threads(s->tensors->num_threads)
    IN_TILES({
        const int64_t own = decode_steps(s);
        if (omp_get_thread_num() == 0) steps = own;
    })
    return steps;
}

/* Tokens and natural log-probabilities of rows of logits. */
void covey_draw(const Draws *d, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    draw_rows(d);
}

/* What a vector of a packed row holds of the inputs from `from` on: LANES of them, or as many pairs in bfloat16. */
INLINE lanes packed(const float *from, const int half) {
    return half ? narrowed(load(from), load(from + LANES)) : load(from);
}

/* The next LANES numbers, or pairs, of a panel's outputs, of which all are there. */
INLINE void pack_block(const float *weight, float *panel, int64_t inner, int64_t from, const int half) {
    for (int64_t o = 0; o < PANEL; o += LANES) {
        lanes block[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) block[r] = packed(weight + (o + r) * inner + from, half);
        transpose(block);
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) store(panel + r * PANEL + o, block[r]);
    }
}

INLINE void pack(const float *weight, void *panels, int64_t inner, int64_t outer, int64_t num_threads, const int half) {
    const int64_t together = half ? 2 : 1; /* inputs that lie side by side */
    const int64_t blocks = inner / (together * LANES);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t first = 0; first < outer; first += PANEL) {
        const int64_t ready = first + PANEL <= outer ? blocks * together * LANES : 0;
        for (int64_t i = 0; i < ready; i += together * LANES)
            pack_block(weight + first * inner, (float *)panels + (first * inner + i * PANEL) / together, inner, i, half);
        for (int64_t i = ready; i < inner; i++)
            for (int64_t o = 0; o < PANEL; o++) {
                const int64_t at = first * inner + (i / together * PANEL + o) * together + i % together;
                put(panels, at, first + o < outer ? weight[(first + o) * inner + i] : 0.0f, half);
            }
    }
}

#define COLLAPSE 25 /* MADV_COLLAPSE of Linux 6.1, which older headers do not name: pages in use become large ones too */

/* Ask for pages of two megabytes around so many bytes: the processor fetches ahead within a page only. A hint, which no
   numbers depend on. */
static void want_large_pages(const void *from, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21, first = (uintptr_t)from / page * page;
    const uintptr_t end = ((uintptr_t)from + (uintptr_t)bytes + page - 1) / page * page;
    madvise((void *)first, end - first, MADV_HUGEPAGE);
    madvise((void *)first, end - first, COLLAPSE);
#else
    (void)from, (void)bytes;
#endif
}

/* Bytes of a row, and of an output's weights, in eight bits. */
int64_t covey_eighths(int64_t inner, int64_t of_row) { return of_row ? eighths_stride(inner) : spanned(inner); }

void covey_pack_eighths(const float *weight, void *panels, float *scales, int64_t inner, int64_t outer,
                        int64_t num_threads) {
    want_large_pages(panels, num_panels(&(Product){.outer = outer}) * PANEL * spanned(inner));
    pack_eighths(weight, panels, scales, inner, outer, num_threads);
}

/* Weights (outer x inner) laid out in panels, padded with zeros. */
void covey_pack(const float *weight, void *panels, int64_t inner, int64_t outer, int64_t half, int64_t num_threads) {
    want_large_pages(panels, num_panels(&(Product){.outer = outer}) * PANEL * inner * (half ? 2 : 4));
    half ? pack(weight, panels, inner, outer, num_threads, 1) : pack(weight, panels, inner, outer, num_threads, 0);
}
