// Products of matrices whose elements are 32-bit lanes, summed in float. A lane is a float, or two bfloat16 values that are neighbours
// along the sum, so both dtypes have the same loops.
//
// In C = A B, elements of A are broadcast, and B is packed in panels: [columns / LANES][steps][LANES].
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 2;  // this CPU has 16 registers, not 32
#endif
constexpr int ROWS = 6;    // ROWS x COLUMNS sums fit into registers, as do twice the rows with half the columns
template <int N> using Const = std::integral_constant<int, N>;

// ------------------------------------------------------------------------------------------------- dtypes

struct Float {
    typedef float Value;
    static constexpr int PER_LANE = 1;
    static vec fma(vec sum, ivec a, ivec b) { return sum + (vec)a * (vec)b; }
    static float rounded(float x) { return x; }
    static float widened(float x) { return x; }
    static void round_row(const float* from, uint32_t* to, int64_t n) { std::memcpy(to, from, 4 * n); }
    // The same past the caches, for results that exceed the caches; `to` is aligned to 64 bytes.
    static void stream_row(const float* from, uint32_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) stream(to + i, (ivec)load(from + i));
    }
    // `put` rounds and stores values. `lanes` and `lane` round and join the values of one or two rows that are neighbours along a sum.
    static void put(uint32_t* row, int64_t at, vec x) { store((float*)row + at, x); }
    static ivec lanes(const vec* x) { return (ivec)x[0]; }
    static uint32_t lane(const float* at, int64_t) { return bits(*at); }
    // Joins the values of two rows that are neighbours along a sum into a vector of lanes, without rounding.
    static void interleave(const float* a, const float*, uint32_t* to) { std::memcpy(to, a, 4 * LANES); }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
    typedef uint16_t Value;
    static constexpr int PER_LANE = 2;
    static vec fma(vec sum, ivec a, ivec b) {
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
    }
    static __m256i narrow(const float* from) { return (__m256i)_mm512_cvtneps_pbh((__m512)load(from)); }
    static uint16_t rounded(float x) {
        return (uint16_t)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0);
    }
    static float widened(uint16_t x) { uint32_t b = (uint32_t)x << 16; float f; std::memcpy(&f, &b, 4); return f; }
    static void round_row(const float* from, uint32_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) _mm256_storeu_si256((__m256i*)((uint16_t*)to + i), narrow(from + i));
    }
    static void stream_row(const float* from, uint32_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += 2 * LANES)
            stream(to + i / 2, (ivec)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(from + i)), narrow(from + i + LANES), 1));
    }
    static void put(uint32_t* row, int64_t at, vec x) { store((bfloat16*)row + at, x); }
    static ivec lanes(const vec* x) {
        auto wide = [](vec y) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)y)); };
        return (ivec)_mm512_or_si512(wide(x[0]), _mm512_slli_epi32(wide(x[1]), 16));
    }
    static uint32_t lane(const uint16_t* at, int64_t next) { return at[0] | (uint32_t)at[next] << 16; }
    static void interleave(const uint16_t* a, const uint16_t* b, uint32_t* to) {
        words low = __builtin_convertvector(*reinterpret_cast<const halves_u*>(a), words);
        words high = __builtin_convertvector(*reinterpret_cast<const halves_u*>(b), words);
        words both = low | high << 16;
        std::memcpy(to, &both, sizeof both);
    }
};
#endif

// ------------------------------------------------------------------------------------------------- products

typedef int32_t lane_u __attribute__((aligned(2)));  // two values of a row, at any address

// A part of a sum: A(i, k) = a[i * a_row + k * a_step]. The panels of B have the steps of all parts in order.
struct Part {
    const uint32_t* a;
    int64_t a_row, a_step, steps;
};

// C[M][N] (+)= factor * A B from row `first` of A; c has rows of c_row floats and whole panels.
template <class T, int M, int N>
void tile_product(const Part* parts, int64_t count, int64_t first, const uint32_t* b, int64_t panel, float* c, int64_t c_row, float factor,
                  bool add) {
    vec sum[M][N] = {};
    for (int64_t p = 0; p < count; p++) {
        const Part& part = parts[p];
        const uint32_t* a = part.a + first * part.a_row;
        for (int64_t k = 0; k < part.steps; k++, b += LANES) {
            ivec column[N];
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) column[j] = *reinterpret_cast<const ivec_u*>(b + j * panel);
#pragma GCC unroll 12
            for (int i = 0; i < M; i++) {
                ivec row = *reinterpret_cast<const lane_u*>(a + i * part.a_row + k * part.a_step) + ivec{};
#pragma GCC unroll 4
                for (int j = 0; j < N; j++) sum[i][j] = T::fma(sum[i][j], row, column[j]);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            float* at = c + i * c_row + j * LANES;
            store(at, add ? load(at) + sum[i][j] * factor : sum[i][j] * factor);
        }
}

// C (+)= factor * (sum over the parts of A B); the panels of b are `panel` lanes apart.
template <class T>
void product(int64_t rows, int64_t columns, const Part* parts, int64_t count, const uint32_t* b, int64_t panel, float* c, int64_t c_row,
             float factor, bool add) {
    int64_t panels = columns / LANES, j = 0;
    auto down = [&](auto height, auto width) {
        constexpr int M = decltype(height)::value, N = decltype(width)::value;
        int64_t i = 0;
        auto tile = [&](auto height) {
            constexpr int H = decltype(height)::value;
            tile_product<T, H, N>(parts, count, i, b + j * panel, panel, c + i * c_row + j * LANES, c_row, factor, add);
            i += H;
        };
        while (i + M <= rows) tile(height);
        while (i + 2 <= rows) tile(Const<2>());
        while (i < rows) tile(Const<1>());
        j += N;
    };
    while (j + COLUMNS <= panels) down(Const<ROWS>(), Const<COLUMNS>());
    if (COLUMNS > 2 && j + 2 <= panels) down(Const<2 * ROWS>(), Const<2>());
    while (j < panels) down(Const<2 * ROWS>(), Const<1>());
}

template <class T>
void product(int64_t rows, int64_t columns, const Part& part, const uint32_t* b, int64_t panel, float* c, int64_t c_row, float factor,
             bool add) {
    product<T>(rows, columns, &part, 1, b, panel, c, c_row, factor, add);
}
