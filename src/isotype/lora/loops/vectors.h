// Vectors with the width of the CPU's registers, as vector extensions of GCC and Clang: AVX512, AVX2, SSE2 and NEON share the loops.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef vec vec_u __attribute__((aligned(4)));
typedef ivec ivec_u __attribute__((aligned(4)));

inline vec load(const float* from) { return *reinterpret_cast<const vec_u*>(from); }
inline void store(float* to, vec x) { *reinterpret_cast<vec_u*>(to) = x; }
inline void store(uint32_t* to, ivec x) { *reinterpret_cast<ivec_u*>(to) = x; }

// Stores past the caches, to an address that is a multiple of the vector's size. Other threads see the values after `streamed`.
inline void stream(uint32_t* to, ivec x) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)to, (__m512i)x);
#elif defined(__AVX2__)
    _mm256_stream_si256((__m256i*)to, (__m256i)x);
#else
    store(to, x);
#endif
}
inline void streamed() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif

// Exchanges the lanes of `a` whose number has bit S for the lanes of `b` whose number does not.
template <int S, int... I> void exchange(ivec& a, ivec& b, std::integer_sequence<int, I...>) {
    ivec first = SHUFFLE(a, b, (I & S ? LANES + I - S : I)...);
    b = SHUFFLE(a, b, (I & S ? LANES + I : I + S)...);
    a = first;
}

template <int S> void exchange_all(ivec* x) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(x[i], x[i + S], std::make_integer_sequence<int, LANES>());
    if constexpr (S > 1) exchange_all<S / 2>(x);
}

typedef ivec ivec_2 __attribute__((aligned(2)));

// Writes lane k of `row(i)` to to[k * LANES + i], for LANES rows of LANES lanes.
template <class Row> void transpose(Row row, uint32_t* to) {
    ivec x[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = *reinterpret_cast<const ivec_2*>(row(i));
    exchange_all<LANES / 2>(x);
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) *reinterpret_cast<ivec_u*>(to + k * LANES) = x[k];
}

constexpr float LOG2_E = 1.44269504089f;

inline uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }

// max(least, x), but NaN for NaN.
inline vec at_least(float least, vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);  // if one operand is NaN, the instruction returns the second one
#else
    return x < least ? vec{} + least : x;
#endif
}

// The whole number n next to x, and y 2^n, which is 0 for n below -149; without an AVX512 instruction it is 0 for x below -126.
struct Power {
#if defined(__AVX512F__)
    vec n;
    explicit Power(vec x) : n((vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) {}
    vec times(vec y) const { return (vec)_mm512_scalef_ps((__m512)y, (__m512)n); }
#else
    static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding this number rounds x to a whole number in the last bits
    vec x, shifted, n;
    explicit Power(vec x) : x(x), shifted(at_least(-126.0f, x) + MAGIC), n(shifted - MAGIC) {}
    vec times(vec y) const {
        vec found = (vec)(x < -126.0f ? ivec{} : (ivec)y + (((ivec)shifted - (int32_t)bits(MAGIC)) << 23));
        return x == x ? found : x;
    }
#endif
};

// 2^x for x <= 127; 0 below -150; NaN for NaN. The Taylor series of degree 7 on [-1/2, 1/2] has a relative error of 5e-9.
inline vec exp2v(vec x) {
    vec bounded = at_least(-160.0f, x);
    Power power(bounded);
    vec f = bounded - power.n;
    vec y = f * 1.5252733804e-5f + 1.5403530394e-4f;
    y = y * f + 1.3333558146e-3f;
    y = y * f + 9.6181291076e-3f;
    y = y * f + 5.5504108665e-2f;
    y = y * f + 2.4022650696e-1f;
    y = y * f + 6.9314718056e-1f;
    y = y * f + 1.0f;
    return power.times(y);
}

// e^x for x <= 88, within two units in the last place; 0 below -104; NaN for NaN. The remainder of x / log 2 is exact, because the
// nearest whole number is multiplied by log 2 in two parts. The Taylor series of degree 7 on [-0.35, 0.35] has a relative error of 6e-9.
inline vec expv(vec x) {
    vec bounded = at_least(-110.0f, x);
    Power power(bounded * LOG2_E);
    vec r = bounded - power.n * 0.693359375f + power.n * 2.12194440e-4f;
    vec y = r * 1.9841270e-4f + 1.3888889e-3f;
    y = y * r + 8.3333333e-3f;
    y = y * r + 4.1666668e-2f;
    y = y * r + 1.6666667e-1f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return power.times(y);
}

// Four maxima at once: with a single maximum each comparison would wait for the one before.
inline float largest_of(const float* x, int64_t n) {
    constexpr int EACH = 4;
    vec top[EACH] = {load(x), load(x), load(x), load(x)};
    auto larger = [](vec a, vec b) { return b > a ? b : a; };
    int64_t i = 0;
    for (; i + EACH * LANES <= n; i += EACH * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < EACH; j++) top[j] = larger(top[j], load(x + i + j * LANES));
    for (; i < n; i += LANES) top[0] = larger(top[0], load(x + i));
    vec all = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    float found = all[0];
    for (int j = 1; j < LANES; j++) found = std::max(found, all[j]);
    return found;
}

inline float sum_of(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// ------------------------------------------------------------------------------------------------- values of tensors

struct bfloat16 { uint16_t bits; };
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef halves halves_u __attribute__((aligned(2)));

inline vec load(const bfloat16* from) {
    return (vec)(__builtin_convertvector(*reinterpret_cast<const halves_u*>(from), words) << 16);
}

// Rounds to nearest, ties to even. The AVX512 instruction flushes subnormal numbers (below 1.2e-38) to zero, as its products do.
#if defined(__AVX512BF16__)
inline void store(bfloat16* to, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
#else
inline void store(bfloat16* to, vec x) {
    words b = (words)x;
    words rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    *reinterpret_cast<halves_u*>(to) = __builtin_convertvector((words)(x == x ? (ivec)rounded : ivec{} + 0x7fc0), halves);
}
#endif

// Loads or stores the first n < LANES values of a vector; the other values are zero.
template <class T> vec load_some(const T* from, int64_t n) {
    T all[LANES] = {};
    std::memcpy(all, from, n * sizeof(T));
    return load(all);
}
template <class T> void store_some(T* to, vec x, int64_t n) {
    T all[LANES];
    store(all, x);
    std::memcpy(to, all, n * sizeof(T));
}

// ------------------------------------------------------------------------------------------------- memory

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch memory of a thread, kept between calls: allocating memory costs more time than the computation.
struct Scratch {
    std::vector<char> memory;
    size_t used = 0;
    void reserve(size_t bytes) { used = 0; if (memory.size() < bytes + 4096) memory.resize(bytes + 4096); }
    void release_beyond(size_t bytes) { if (memory.size() > bytes) memory = {}; }
    template <class V> V* take(int64_t n) {
        uintptr_t at = reinterpret_cast<uintptr_t>(memory.data()) + used;
        uintptr_t begin = (at + 63) / 64 * 64;
        used += begin - at + n * sizeof(V);
        return reinterpret_cast<V*>(begin);
    }
};
