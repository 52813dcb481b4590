// Products of matrices whose elements are 32-bit lanes, summed in float: a lane is a float, or two bfloat16 values that follow
// one another along the sum, so that both are the same loops.
//
// Of C = A B, A's elements are broadcast, and B is packed in panels: [columns / LANES][steps][LANES].
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "../vectors.h"

constexpr int COLUMNS = LANES == 8 ? 2 : 4;  // AVX2 has 16 registers, the others 32
constexpr int ROWS = 6;    // ROWS x COLUMNS sums stay in registers

// ------------------------------------------------------------------------------------------------- dtypes

struct Float {
    typedef float Value;
    static constexpr int PER_LANE = 1;
    static vec fma(vec sum, ivec a, ivec b) { return sum + (vec)a * (vec)b; }
    static float rounded(float x) { return x; }
    static void round_row(const float* from, uint32_t* to, int64_t n) { std::memcpy(to, from, 4 * n); }
    // Lanes of two rows that follow one another along a sum; of the first alone where a lane is one value.
    static void pair_rows(const float* a, const float*, uint32_t* to, int64_t n) { std::memcpy(to, a, 4 * n); }
    static uint32_t lane(const float* at, int64_t) { return bits(*at); }
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
    static void round_row(const float* from, uint32_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) _mm256_storeu_si256((__m256i*)((uint16_t*)to + i), narrow(from + i));
    }
    static void pair_rows(const float* a, const float* b, uint32_t* to, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) {
            __m512i low = _mm512_cvtepu16_epi32(narrow(a + i)), high = _mm512_cvtepu16_epi32(narrow(b + i));
            _mm512_storeu_si512(to + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
    static uint32_t lane(const uint16_t* at, int64_t next) { return at[0] | (uint32_t)at[next] << 16; }
};
#endif

// ------------------------------------------------------------------------------------------------- products

// C[M][N] (+)= factor * A B. A(i, k) = a[i * a_row + k * a_step]; c has rows of c_row floats, whole panels wide.
template <class T, int M, int N>
void tile_product(const uint32_t* a, int64_t a_row, int64_t a_step, const uint32_t* b, int64_t panel, int64_t steps,
                  float* c, int64_t c_row, float factor, bool add) {
    vec sum[M][N] = {};
    for (int64_t k = 0; k < steps; k++) {
        ivec column[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) column[j] = *reinterpret_cast<const ivec_u*>(b + j * panel + k * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            ivec row = (int32_t)a[i * a_row + k * a_step] + ivec{};
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) sum[i][j] = T::fma(sum[i][j], row, column[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            float* at = c + i * c_row + j * LANES;
            store(at, add ? load(at) + sum[i][j] * factor : sum[i][j] * factor);
        }
}

template <class T>
void product(int64_t rows, int64_t columns, const uint32_t* a, int64_t a_row, int64_t a_step, const uint32_t* b, int64_t panel,
             int64_t steps, float* c, int64_t c_row, float factor, bool add) {
    int64_t panels = columns / LANES, j = 0;
    auto down = [&](auto width) {
        constexpr int N = decltype(width)::value;
        int64_t i = 0;
        for (; i + ROWS <= rows; i += ROWS)
            tile_product<T, ROWS, N>(a + i * a_row, a_row, a_step, b + j * panel, panel, steps, c + i * c_row + j * LANES, c_row,
                                     factor, add);
        for (; i + 2 <= rows; i += 2)
            tile_product<T, 2, N>(a + i * a_row, a_row, a_step, b + j * panel, panel, steps, c + i * c_row + j * LANES, c_row,
                                  factor, add);
        for (; i < rows; i++)
            tile_product<T, 1, N>(a + i * a_row, a_row, a_step, b + j * panel, panel, steps, c + i * c_row + j * LANES, c_row,
                                  factor, add);
    };
    for (; j + COLUMNS <= panels; j += COLUMNS) down(std::integral_constant<int, COLUMNS>());
    for (; j < panels; j++) down(std::integral_constant<int, 1>());
}
