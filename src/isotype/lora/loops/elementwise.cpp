// Gated products, RMSNorms and rotations, forward and backward. Values are read once, computed in float, rounded and written once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 1 << 14;  // values in a thread's piece of work: about 100 KiB for all operands together

vec sigmoid(vec x) {
    vec power = x * -LOG2_E;
    vec found = 1.0f / (1.0f + exp2v(power > 127.0f ? vec{} + 127.0f : power));
    return power > 127.0f ? vec{} : found;  // the value is below 6e-39
}

// Calls `with(at, load, store)` for whole vectors in [first, last), then once for the remaining values.
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

// The product, which overwrites its gradient `d`, and the gradients of both factors.
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

// y = x / sqrt(mean(x^2) + eps) * w; `inverse` gets 1 / sqrt(...) of each row.
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

// Values [batch, heads, tokens, dim] with any strides, but the last stride is one.
template <class T> struct Heads { T* at; int64_t batch, head, token; };

// Rotary positions: the halves (a, b) of a head become (a cos - b sin, b cos + a sin), with the cosines and sines of each half. With
// `back` gradients become (a cos + b sin', b cos - a sin'), where sin' are the sines of the other half. A table is [tokens, dim].
// `apart` is the distance in values from the table of one row of the batch to the table of the next row, 0 if all rows share a table.
template <class T>
void rotate(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int64_t apart, bool back, int64_t threads, Heads<const T> x,
            const T* cos, const T* sin, Heads<T> out) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (batch * heads * tokens * dim > CHUNK)
    for (int64_t r = 0; r < batch * tokens; r++) {
        int64_t b = r / tokens, t = r % tokens;
        const T *c = cos + b * apart + t * dim, *s = sin + b * apart + t * dim;
        const T *first = back ? s + half : s, *second = back ? s : s + half, *from = x.at + b * x.batch + t * x.token;
        T* to = out.at + b * out.batch + t * out.token;
        float sign = back ? -1.0f : 1.0f;
        each<T>(0, half, [=](int64_t i, auto get, auto put) {
            vec c1 = get(c + i), c2 = get(c + half + i), s1 = sign * get(first + i), s2 = sign * get(second + i);
            for (int64_t h = 0; h < heads; h++) {
                vec one = get(from + h * x.head + i), other = get(from + h * x.head + half + i);
                put(to + h * out.head + i, one * c1 - other * s1);
                put(to + h * out.head + half + i, other * c2 + one * s2);
            }
        });
    }
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
    }                                                                                                                                \
    extern "C" void rotate_##NAME(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, int64_t apart, int64_t back,              \
                                  int64_t threads, const Heads<const T>* x, const T* cos, const T* sin, const Heads<T>* out) {        \
        rotate(batch, heads, tokens, dim, apart, back, threads, *x, cos, sin, *out);                                                  \
    }

EXPORT(float32, float)
EXPORT(bfloat16, bfloat16)
