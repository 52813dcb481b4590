// Gated products and RMSNorms, forward and backward: one reading, one writing, float between them, one rounding.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 1 << 14;  // values that a thread takes at once: some 100 KiB of all operands together

vec sigmoid(vec x) {
    vec power = x * -LOG2_E;
    vec found = 1.0f / (1.0f + exp2v(power > 127.0f ? vec{} + 127.0f : power));
    return power > 127.0f ? vec{} : found;  // below 6e-39
}

// Whole vectors of [0, n) by `with(at, load, store)`, and what is left by parts of one.
template <class T, class Do> void each(int64_t first, int64_t last, Do with) {
    int64_t i = first;
    for (; i + LANES <= last; i += LANES)
        with(i, [](const T* from) { return load(from); }, [](T* to, vec x) { store(to, x); });
    int64_t left = last - i;
    if (left > 0)
        with(i, [left](const T* from) { return load_some(from, left); }, [left](T* to, vec x) { store_some(to, x, left); });
}

template <class T, class Do> void parallel(int64_t n, int64_t threads, Do with) {
#pragma omp parallel for num_threads(threads) if (n > CHUNK)
    for (int64_t at = 0; at < n; at += CHUNK) each<T>(at, std::min(n, at + CHUNK), with);
}

// silu(g) u
template <class T> void product(int64_t n, int64_t threads, const T* g, const T* u, T* out) {
    parallel<T>(n, threads, [=](int64_t i, auto get, auto put) {
        vec x = get(g + i);
        put(out + i, x * sigmoid(x) * get(u + i));
    });
}

// The product again, which takes the place of its gradient `d`, and the gradients of its factors.
template <class T> void product_backward(int64_t n, int64_t threads, T* d, const T* g, const T* u, T* d_g, T* d_u) {
    parallel<T>(n, threads, [=](int64_t i, auto get, auto put) {
        vec x = get(g + i), y = get(u + i), grad = get(d + i), s = sigmoid(x);
        put(d + i, x * s * y);
        put(d_u + i, grad * x * s);
        put(d_g + i, grad * y * s * (1.0f + x * (1.0f - s)));
    });
}

template <class Do> void rows_of(int64_t rows, int64_t width, int64_t threads, Do with) {
#pragma omp parallel for num_threads(threads) if (rows * width > CHUNK)
    for (int64_t r = 0; r < rows; r++) with(r);
}

// y = x / sqrt(mean(x^2) + eps) * w, and of each row one over that root
template <class T>
void norm(int64_t rows, int64_t width, int64_t threads, float eps, const T* x, const float* w, T* y, float* inverse) {
    rows_of(rows, width, threads, [=](int64_t r) {
        const T* from = x + r * width;
        T* to = y + r * width;
        vec squares = {};
        each<T>(0, width, [&](int64_t i, auto get, auto) { vec v = get(from + i); squares += v * v; });
        float scale = 1 / std::sqrt(sum_of(squares) / width + eps);
        inverse[r] = scale;
        each<T>(0, width, [&](int64_t i, auto get, auto put) {
            vec weight = i + LANES <= width ? load(w + i) : load_some(w + i, width - i);
            put(to + i, get(from + i) * scale * weight);
        });
    });
}

template <class T>
void norm_backward(int64_t rows, int64_t width, int64_t threads, const T* d, const T* x, const float* w, const float* inverse, T* d_x) {
    rows_of(rows, width, threads, [=](int64_t r) {
        const T *from = x + r * width, *grad = d + r * width;
        float scale = inverse[r];
        auto weight = [=](int64_t i) { return i + LANES <= width ? load(w + i) : load_some(w + i, width - i); };
        vec total = {};
        each<T>(0, width, [&](int64_t i, auto get, auto) { total += get(grad + i) * weight(i) * (get(from + i) * scale); });
        float along = sum_of(total) / width;
        each<T>(0, width, [&](int64_t i, auto get, auto put) {
            put(d_x + r * width + i, (get(grad + i) * weight(i) - get(from + i) * scale * along) * scale);
        });
    });
}

}  // namespace

#define EXPORT(NAME, T)                                                                                                            \
    extern "C" void silu_product_##NAME(int64_t n, int64_t threads, const T* g, const T* u, T* out) { product(n, threads, g, u, out); } \
    extern "C" void silu_product_backward_##NAME(int64_t n, int64_t threads, T* d, const T* g, const T* u, T* d_g, T* d_u) { \
        product_backward(n, threads, d, g, u, d_g, d_u);                                                                        \
    }                                                                                                                                \
    extern "C" void rms_norm_##NAME(int64_t rows, int64_t width, int64_t threads, float eps, const T* x, const float* w, T* y,         \
                                    float* inverse) {                                                                                \
        norm(rows, width, threads, eps, x, w, y, inverse);                                                                           \
    }                                                                                                                                \
    extern "C" void rms_norm_backward_##NAME(int64_t rows, int64_t width, int64_t threads, const T* d, const T* x, const float* w,     \
                                             const float* inverse, T* d_x) {                                                         \
        norm_backward(rows, width, threads, d, x, w, inverse, d_x);                                                                  \
    }

EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
