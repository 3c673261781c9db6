/* The softmax of the training pass over a vocabulary: scores of logits, then their gradient, a row at a time, each logit
   read from memory once. elementwise.py calls these functions and mirrors the struct.

   Logits and their gradient are float32 or bfloat16, all else float32; sums over blocks are float64, in order. A row's
   numbers depend on nothing but the row. */

#include "lanes.h"

#define BLOCK 512 /* logits that are widened and added up at a time */

typedef struct {
    const void *logits;                      /* rows x width */
    void *out;                               /* backward: their gradient, may be the logits themselves */
    const int64_t *target;                   /* of rows, as all below */
    float *logprob, *entropy, *logsum;       /* logsum: what the log-softmax takes off tempered logits */
    const float *coefficient, *of_entropy;   /* backward: of log-prob; of entropy, or NULL */
    int64_t rows, width, num_threads, half;  /* half: logits and gradient are bfloat16 */
    float temperature;
} Softmax;

/* `count` tempered logits from `at` on, in `room`. */
INLINE void read_block(const Softmax *h, int64_t at, int64_t count, float *room, const int half) {
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) store(room + c, load_at(h->logits, at + c, half) / h->temperature);
    for (; c < count; c++) room[c] = number_at(h->logits, at + c, half) / h->temperature;
}

/* The sums of exp(x) and of exp(x) x over a block, x what is there less `most`. */
INLINE void add_block(float *room, int64_t count, float most, double *sum, double *along) {
    float weights[BLOCK];
    for (int64_t c = 0; c < count; c++) room[c] -= most;
    for (int64_t c = 0; c < count; c++) weights[c] = exponential(room[c]);
    *sum += total(weights, count);
    for (int64_t c = 0; c < count; c++) weights[c] *= room[c] < -87.0f ? -87.0f : room[c];
    *along += total(weights, count);
}

INLINE void score_row(const Softmax *h, int64_t row, const int half) {
    float room[BLOCK], most = -INFINITY, chosen;
    double sum = 0.0, along = 0.0;
    for (int64_t v = 0; v < h->width; v += BLOCK) {
        const int64_t count = smaller(BLOCK, h->width - v);
        read_block(h, row * h->width + v, count, room, half);
        most = largest(room, count, most);
    }
    for (int64_t v = 0; v < h->width; v += BLOCK) {
        const int64_t count = smaller(BLOCK, h->width - v);
        read_block(h, row * h->width + v, count, room, half);
        add_block(room, count, most, &sum, &along);
    }
    read_block(h, row * h->width + h->target[row], 1, &chosen, half);
    const double logsum = log(sum);
    h->logsum[row] = (float)(most + logsum);
    h->logprob[row] = (float)((double)(chosen - most) - logsum);
    h->entropy[row] = (float)(logsum - along / sum);
}

/* coefficient (1 at the target - p) - of_entropy p (log p + H), over the temperature. */
INLINE void differentiate_row(const Softmax *h, int64_t row, const int half) {
    float room[BLOCK];
    const float logsum = h->logsum[row], entropy = h->entropy[row], scale = 1.0f / h->temperature;
    const float coefficient = h->coefficient[row], of_entropy = h->of_entropy ? h->of_entropy[row] : 0.0f;
    for (int64_t v = 0; v < h->width; v += BLOCK) {
        const int64_t count = smaller(BLOCK, h->width - v), at = row * h->width + v, target = h->target[row] - v;
        read_block(h, at, count, room, half);
        for (int64_t c = 0; c < count; c++) {
            const float x = room[c] - logsum, least = x < -87.0f ? -87.0f : x;
            room[c] = -exponential(x < 0.0f ? x : 0.0f) * (coefficient + of_entropy * (least + entropy)) * scale;
        }
        if (target >= 0 && target < count) room[target] += coefficient * scale;
        for (int64_t c = 0; c < count; c++) put(h->out, at + c, room[c], half);
    }
}

void covey_head_scores(const Softmax *h) {
#pragma omp parallel for schedule(static) num_threads(h->num_threads)
    for (int64_t row = 0; row < h->rows; row++) {
        if (h->half) score_row(h, row, 1);
        else score_row(h, row, 0);
    }
}

void covey_head_gradient(const Softmax *h) {
#pragma omp parallel for schedule(static) num_threads(h->num_threads)
    for (int64_t row = 0; row < h->rows; row++) {
        if (h->half) differentiate_row(h, row, 1);
        else differentiate_row(h, row, 0);
    }
}
