// The softmax of rows of logits, the results that a loss needs, and the gradient, in float. Each row is read into a core's cache once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include "vectors.h"

namespace {

constexpr int64_t RUN = 64 * LANES;  // values that are summed before the sum is added to the total: longer sums lose digits

// The struct `_Results` of isotype.lora.loss.softmax; null for results that are not requested.
struct Results {
    float *log_probs, *logsumexp, *entropy, *mean_logits, *log_sum_sq_probs, *factor;
    bool* is_top1;
};

thread_local Scratch scratch;

struct Sums { vec e = {}, e_z = {}, e_e = {}; };

template <class T>
void row(int64_t width, float slope, float lift, T* logits, float exact, int64_t target, const Results& to, int64_t at, float* z) {
    int64_t whole = width / LANES * LANES;
    vec largest = vec{} - INFINITY, nan = {}, total = {};
    for (int64_t first = 0; first < whole; first += RUN) {
        vec run = {};
        for (int64_t i = first; i < std::min(whole, first + RUN); i += LANES) {
            vec x = load(logits + i) * slope;
            store(z + i, x);
            largest = x > largest ? x : largest;
            nan = x == x ? nan : x;
            run += x;
        }
        total += run;
    }
    float top = -INFINITY, sum = sum_of(total), none = sum_of(nan);
    for (int i = 0; i < LANES; i++) top = std::max(top, largest[i]);
    for (int64_t i = whole; i < width; i++) {
        float x = load_some(logits + i, 1)[0] * slope;
        z[i] = x, top = std::max(top, x), sum += x, none = x == x ? none : x;
    }
    top += none;
    if (to.mean_logits) to.mean_logits[at] = sum / width;
    if (to.is_top1) to.is_top1[at] = z[target] == top && std::find(z, z + target, top) == z + target;

    // The target is added separately: the exact logit replaces the rounded one, and log1p is exact near p = 1.
    z[target] = -INFINITY;
    for (int64_t i = width; i < whole + (width > whole) * LANES; i++) z[i] = -INFINITY;
    Sums all;
    for (int64_t first = 0; first < width; first += RUN) {
        Sums run;
        for (int64_t i = first; i < std::min(width, first + RUN); i += LANES) {
            vec below = load(z + i) - top, e = expv(below);
            store(z + i, e);
            run.e += e;
            run.e_z += e > 0.0f ? e * below : vec{};
            run.e_e += e * e;
        }
        all.e += run.e, all.e_z += run.e_z, all.e_e += run.e_e;
    }
    float others = sum_of(all.e), own_z = exact * slope - top, own_e = std::exp(own_z), log_total = std::log1p(others + (own_e - 1));
    to.log_probs[at] = own_z - log_total;
    to.logsumexp[at] = top + log_total;
    if (to.entropy) to.entropy[at] = log_total - (sum_of(all.e_z) + own_e * own_z) / (others + own_e);
    if (to.log_sum_sq_probs) to.log_sum_sq_probs[at] = std::log(sum_of(all.e_e) + own_e * own_e) - 2 * log_total;
    if (!to.factor) return;
    to.factor[at] = others / (others + own_e) * (-slope / lift);
    float share = lift / std::max(others, 1e-30f);
    for (int64_t i = 0; i < whole; i += LANES) store(logits + i, load(z + i) * share);
    if (whole < width) store_some(logits + whole, load(z + whole) * share, width - whole);
    store_some(logits + target, vec{} - lift, 1);
}

template <class T>
void softmax(int64_t rows, int64_t width, int64_t threads, float slope, float lift, T* logits, const float* exact, const int64_t* targets,
             const Results* to) {
#pragma omp parallel num_threads(threads)
    {
        scratch.reserve(4 * (width + LANES));
        float* z = scratch.take<float>(width + LANES);
#pragma omp for
        for (int64_t r = 0; r < rows; r++) row(width, slope, lift, logits + r * width, exact[r], targets[r], *to, r, z);
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                                              \
    extern "C" void softmax_##NAME(int64_t rows, int64_t width, int64_t threads, float slope, float lift, T* logits, const float* exact, \
                                   const int64_t* targets, const Results* to) {                                                         \
        softmax(rows, width, threads, slope, lift, logits, exact, targets, to);                                                         \
    }

EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
