// Attention in strips of query rows, forward and backward: the results of blocks.py, with scores that stay in a core's caches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include "../loops/products.h"

namespace {

constexpr int STRIP = LANES == 16 ? 96 : 48;  // rows whose scores fit into the L2 cache of a core; the other number is some percent slower

// ------------------------------------------------------------------------------------------------- arguments

struct Matrix {
    char* at;
    int64_t batch, head, token;  // strides in values; the stride of the last dimension is one
};

struct Block {
    int64_t part_first, part_last;      // rows of the batch
    int64_t row_first, row_last;        // queries
    int64_t key_first, key_last;
    int64_t masked_first, masked_last;
    const float* tile;                  // [tile_heads, rows, masked], in units of log 2; null without a mask
    int64_t tile_heads;
};

struct Call {
    int64_t batch, key_heads, group, queries, keys, head, value_head, block_count, threads;
    float scale;
    const Block* blocks;
    Matrix q, k, v, out, d_out, d_q, d_k, d_v;  // null for a matrix that is not needed
    float* sums;                        // [batch, key heads, queries, group, 2]: largest score, 1 / sum of exponentials
    uint32_t* packed;                   // as many lanes as `needs` returns
    float* totals;                      // for the backward, as many floats as `needs` returns
};

constexpr float LOWEST = -1e30f;

struct Sizes {
    int64_t keys, steps_head, steps_value, steps_keys, head, value;
};

template <class T>
Sizes sizes_of(const Call& c) {
    int64_t keys = up(c.keys, 2 * LANES);
    return {keys, up(c.head, T::PER_LANE) / T::PER_LANE, up(c.value_head, T::PER_LANE) / T::PER_LANE, keys / T::PER_LANE,
            up(c.head, LANES), up(c.value_head, LANES)};
}

// K and V of one key head. Packed along the head: K for scores, and V (`v_head`, only in the backward) for the gradients of
// probabilities. Packed along the keys: the matrix that is summed over keys, V in the forward and K in the backward.
struct Packs { uint32_t *k_head, *v_head, *along_keys; };

template <class T>
int64_t lanes_of(const Sizes& s, bool backward) {
    return s.keys * s.steps_head + (backward ? s.keys * s.steps_value + s.head * s.steps_keys : s.value * s.steps_keys);
}

template <class T>
Packs packs_of(const Call& c, const Sizes& s, int64_t matrix, bool backward) {
    uint32_t* at = c.packed + matrix * lanes_of<T>(s, backward);
    uint32_t* next = at + s.keys * s.steps_head;
    return {at, next, backward ? next + s.keys * s.steps_value : next};
}

template <class T>
typename T::Value* row_of(const Matrix& m, int64_t batch, int64_t head, int64_t token) {
    return reinterpret_cast<typename T::Value*>(m.at) + batch * m.batch + head * m.head + token * m.token;
}

// Packs rows [0, n) of x, which become columns of the product, for sums along the row: [columns / LANES][steps][LANES].
template <class T>
void pack_along_row(const Matrix& x, int64_t batch, int64_t head, int64_t n, int64_t width, int64_t padded, uint32_t* to) {
    int64_t steps = up(width, T::PER_LANE) / T::PER_LANE, turned = 0;
    for (int64_t key = 0; key < padded; key++) {
        uint32_t* at = to + key / LANES * steps * LANES + key % LANES;
        if (key % LANES == 0) {
            turned = key + LANES <= n ? width / T::PER_LANE / LANES * LANES : 0;
            for (int64_t k = 0; k < turned; k += LANES)
                transpose([&](int i) { return row_of<T>(x, batch, head, key + i) + k * T::PER_LANE; }, at + k * LANES);
        }
        if (key >= n) {
            for (int64_t k = 0; k < steps; k++) at[k * LANES] = 0;
            continue;
        }
        const typename T::Value* row = row_of<T>(x, batch, head, key);
        int64_t whole = width / T::PER_LANE;
        for (int64_t k = turned; k < whole; k++) at[k * LANES] = T::lane(row + k * T::PER_LANE, 1);
        if (whole < steps) {
            typename T::Value last[2] = {row[width - 1], 0};
            at[whole * LANES] = T::lane(last, 1);
        }
    }
}

// Packs rows for sums over the rows: [width / LANES][rows / PER_LANE][LANES]; `row(i)` is null for rows of zeros.
template <class T, class Row>
void pack_along_column(Row row, int64_t padded_rows, int64_t width, int64_t padded_width, uint32_t* to) {
    typedef typename T::Value Value;
    int64_t steps = padded_rows / T::PER_LANE;
    for (int64_t k = 0; k < steps; k++) {
        const Value *a = row(k * T::PER_LANE), *b = T::PER_LANE == 2 ? row(k * 2 + 1) : nullptr;
        int64_t j = 0;
        for (; a && (b || T::PER_LANE == 1) && j + LANES <= width; j += LANES)
            T::interleave(a + j, b + j, to + j * steps + k * LANES);
        for (; j < padded_width; j++) {
            Value pair[2] = {a && j < width ? a[j] : Value(0), b && j < width ? b[j] : Value(0)};
            to[j / LANES * steps * LANES + k * LANES + j % LANES] = T::lane(pair, 1);
        }
    }
}

// Packs K and V of all key heads; called in a parallel region, whose threads share the work.
template <class T>
void pack(const Call& c, const Sizes& z, bool backward) {
    const Matrix& summed = backward ? c.k : c.v;
    int64_t width = backward ? c.head : c.value_head, padded = backward ? z.head : z.value;
#pragma omp for schedule(dynamic)
    for (int64_t m = 0; m < c.batch * c.key_heads; m++) {
        int64_t n = m / c.key_heads, h = m % c.key_heads;
        Packs p = packs_of<T>(c, z, m, backward);
        pack_along_row<T>(c.k, n, h, c.keys, c.head, z.keys, p.k_head);
        if (backward) pack_along_row<T>(c.v, n, h, c.keys, c.value_head, z.keys, p.v_head);
        auto row = [&](int64_t key) { return key < c.keys ? row_of<T>(summed, n, h, key) : nullptr; };
        pack_along_column<T>(row, z.keys, width, padded, p.along_keys);
    }
}

// The rows of a strip: row r is query r / group of head r % group.
struct Strip {
    int64_t batch, key_head, first, count;
};

// Copies rows of x as lanes [STRIP][steps]; missing rows and steps are zero.
template <class T>
void gather(const Call& c, const Strip& s, const Matrix& x, int64_t width, int64_t steps, uint32_t* to) {
    for (int64_t i = 0; i < up(s.count, ROWS); i++) {
        uint32_t* at = to + i * steps;
        std::memset(at, 0, 4 * steps);
        if (i >= s.count) continue;
        int64_t r = s.first + i;
        std::memcpy(at, row_of<T>(x, s.batch, s.key_head * c.group + r % c.group, r / c.group), sizeof(typename T::Value) * width);
    }
}

template <class T>
void scatter(const Call& c, const Strip& s, const Matrix& x, int64_t width, const float* from, int64_t row) {
    typedef typename T::Value Value;
    for (int64_t i = 0; i < s.count; i++) {
        int64_t r = s.first + i;
        Value* to = row_of<T>(x, s.batch, s.key_head * c.group + r % c.group, r / c.group);
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) T::round_row(from + i * row + j, (uint32_t*)(to + j), LANES);
        for (; j < width; j++) to[j] = T::rounded(from[i * row + j]);
    }
}

thread_local Scratch scratch;

struct Window { int64_t first, last, width; };  // keys; `width` is a multiple of two panels

Window window_of(const Block& b, int64_t last) {
    int64_t first = b.key_first / (2 * LANES) * (2 * LANES);
    return {first, last, up(last - first, 2 * LANES)};
}

const float* tile_row(const Call& c, const Block& b, const Strip& s, int64_t i) {
    int64_t r = s.first + i, head = b.tile_heads == 1 ? 0 : s.key_head * c.group + r % c.group;
    return b.tile + (head * (b.row_last - b.row_first) + r / c.group - b.row_first) * (b.masked_last - b.masked_first);
}

// The keys that a strip reads: those of the block, without the last keys that are masked for all rows of the strip.
Window window_of(const Call& c, const Block& b, const Strip& s) {
    if (!b.tile || b.masked_last != b.key_last) return window_of(b, b.key_last);
    int64_t open = 0, masked = b.masked_last - b.masked_first;
    for (int64_t i = s.count - 1; i >= 0; i--) {
        const float* row = tile_row(c, b, s, i);
        int64_t j = masked;
        while (j > open && row[j - 1] == -INFINITY) j--;
        open = j;
    }
    return window_of(b, std::max(b.masked_first + open, b.key_first + 1));
}

// The scores of a strip in units of log 2, with the mask.
template <class T>
void scores(const Call& c, const Sizes& z, const Block& b, const Strip& s, const Window& w, const uint32_t* q, const Packs& p, float* to) {
    product<T>(up(s.count, ROWS), w.width, {q, z.steps_head, 1, z.steps_head}, p.k_head + w.first * z.steps_head,
               z.steps_head * LANES, to, w.width, c.scale * LOG2_E, false);
    int64_t masked = std::min(b.masked_last, w.last) - b.masked_first;
    for (int64_t i = 0; i < s.count; i++) {
        float* row = to + i * w.width;
        for (int64_t j = 0; j < b.key_first - w.first; j++) row[j] = -INFINITY;
        for (int64_t j = w.last - w.first; j < w.width; j++) row[j] = -INFINITY;
        if (!b.tile) continue;
        const float* tile = tile_row(c, b, s, i);
        float* at = row + b.masked_first - w.first;
        for (int64_t j = 0; j < masked; j++) at[j] += tile[j];
    }
}

int64_t widest(const Call& c) {
    int64_t found = 0;
    for (int64_t i = 0; i < c.block_count; i++) found = std::max(found, window_of(c.blocks[i], c.blocks[i].key_last).width);
    return found;
}

template <class Do>
void strips(const Call& c, const Block& b, int64_t batch, int64_t key_head, Do with) {
    for (int64_t r = b.row_first * c.group; r < b.row_last * c.group; r += STRIP)
        with(Strip{batch, key_head, r, std::min<int64_t>(STRIP, b.row_last * c.group - r)});
}

struct Work { const Block* block; Strip strip; };

float* sums_of(const Call& c, const Strip& s, int64_t i) {
    return c.sums + ((s.batch * c.key_heads + s.key_head) * c.queries * c.group + s.first + i) * 2;
}

// ------------------------------------------------------------------------------------------------- forward

template <class T>
void forward_strip(const Call& c, const Sizes& z, const Work& at, const Packs& packs, int64_t most) {
    const Block& b = *at.block;
    const Strip& s = at.strip;
    Window w = window_of(c, b, s);
    scratch.reserve(4 * STRIP * (z.steps_head + most * 2 + z.value + 1) + 1024);
    uint32_t* q = scratch.take<uint32_t>(STRIP * z.steps_head);
    float* p = scratch.take<float>(STRIP * w.width);
    uint32_t* rounded = scratch.take<uint32_t>(STRIP * w.width);
    float* out = scratch.take<float>(STRIP * z.value);
    int64_t row = w.width / T::PER_LANE;
    gather<T>(c, s, c.q, c.head, z.steps_head, q);
    scores<T>(c, z, b, s, w, q, packs, p);
    for (int64_t i = 0; i < up(s.count, ROWS); i++) {
        float* x = p + i * w.width;
        if (i >= s.count) {
            std::memset(rounded + i * row, 0, 4 * row);
            continue;
        }
        float largest = std::max(largest_of(x, w.width), LOWEST);
        vec total = {};
        for (int64_t j = 0; j < w.width; j += LANES) {
            vec e = exp2v(load(x + j) - largest);
            total += e;
            T::put(rounded + i * row, j, e);
        }
        float* kept = sums_of(c, s, i);
        kept[0] = largest;
        kept[1] = 1 / std::max(sum_of(total), 1.0f);
    }
    product<T>(up(s.count, ROWS), z.value, {rounded, row, 1, row}, packs.along_keys + w.first / T::PER_LANE * LANES,
               z.steps_keys * LANES, out, z.value, 1, false);
    for (int64_t i = 0; i < s.count; i++)
        for (int64_t j = 0; j < z.value; j += LANES) store(out + i * z.value + j, load(out + i * z.value + j) * sums_of(c, s, i)[1]);
    scatter<T>(c, s, c.out, c.value_head, out, z.value);
}

template <class T>
void forward(const Call& c) {
    Sizes z = sizes_of<T>(c);
    int64_t most = widest(c);
    std::vector<Work> work;
    for (int64_t i = c.block_count - 1; i >= 0; i--)  // the longest last in causal attention: they go first
        for (int64_t n = c.blocks[i].part_first; n < c.blocks[i].part_last; n++)
            for (int64_t h = 0; h < c.key_heads; h++)
                strips(c, c.blocks[i], n, h, [&](Strip s) { work.push_back({c.blocks + i, s}); });
#pragma omp parallel num_threads(c.threads)
    {
        pack<T>(c, z, false);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < (int64_t)work.size(); i++)
            forward_strip<T>(c, z, work[i], packs_of<T>(c, z, work[i].strip.batch * c.key_heads + work[i].strip.key_head, false), most);
    }
}

// ------------------------------------------------------------------------------------------------- backward

// Turns scores into probabilities, and writes them as lanes for sums over rows, too; rows that pad the last ROWS are zero.
template <class T>
void to_probabilities(const Call& c, const Strip& s, int64_t rows, int64_t width, float* p, uint32_t* by_pair) {
    constexpr int TOGETHER = T::PER_LANE;
    for (int64_t i = 0; i < rows; i += TOGETHER) {
        float largest[TOGETHER] = {}, inverse[TOGETHER] = {};
        for (int r = 0; r < TOGETHER && i + r < s.count; r++) {
            const float* kept = sums_of(c, s, i + r);
            largest[r] = kept[0], inverse[r] = kept[1];
        }
        for (int64_t j = 0; j < width; j += LANES) {
            vec y[TOGETHER];
#pragma GCC unroll 2
            for (int r = 0; r < TOGETHER; r++) {
                float* at = p + (i + r) * width + j;
                y[r] = i + r < s.count ? exp2v(load(at) - largest[r]) * inverse[r] : vec{};
                store(at, y[r]);
            }
            store(by_pair + i / TOGETHER * width + j, T::lanes(y));
        }
    }
}

// Turns gradients of probabilities into rounded gradients of scores, as rows and as lanes for sums over rows.
template <class T>
void to_score_gradients(int64_t rows, int64_t width, const float* p, const float* d_p, uint32_t* by_row, uint32_t* by_pair) {
    constexpr int TOGETHER = T::PER_LANE;
    for (int64_t i = 0; i < rows; i += TOGETHER) {
        float along[TOGETHER];
        for (int r = 0; r < TOGETHER; r++) {
            vec total[2] = {};  // widths are multiples of two vectors
            for (int64_t j = (i + r) * width; j < (i + r + 1) * width; j += 2 * LANES) {
                total[0] += load(d_p + j) * load(p + j);
                total[1] += load(d_p + j + LANES) * load(p + j + LANES);
            }
            // The sum uses these values, not the rounded output: if one probability is near 1, the difference below cancels.
            along[r] = sum_of(total[0] + total[1]);
        }
        for (int64_t j = 0; j < width; j += LANES) {
            vec y[TOGETHER];
#pragma GCC unroll 2
            for (int r = 0; r < TOGETHER; r++) {
                int64_t at = (i + r) * width + j;
                y[r] = load(p + at) * (load(d_p + at) - along[r]);
                T::put(by_row + (i + r) * width / TOGETHER, j, y[r]);
            }
            store(by_pair + i / TOGETHER * width + j, T::lanes(y));
        }
    }
}

template <class T>
void backward_strip(const Call& c, const Sizes& z, const Block& b, const Strip& s, const Packs& packs, int64_t most, float* d_k, float* d_v) {
    typedef typename T::Value Value;
    Window w = window_of(c, b, s);
    constexpr int STEPS = STRIP / T::PER_LANE;
    int64_t lanes = STRIP * (z.steps_head + z.steps_value + most * 2) + STEPS * (z.head + z.value), floats = STRIP * (most * 2 + z.head);
    scratch.reserve(4 * (lanes + floats) + 1024);
    uint32_t* q = scratch.take<uint32_t>(STRIP * z.steps_head);
    uint32_t* d_out = scratch.take<uint32_t>(STRIP * z.steps_value);
    uint32_t* by_row = scratch.take<uint32_t>(STRIP * w.width);
    uint32_t* by_pair = scratch.take<uint32_t>(STRIP * w.width);
    uint32_t* q_rows = scratch.take<uint32_t>(STEPS * z.head);
    uint32_t* d_out_rows = scratch.take<uint32_t>(STEPS * z.value);
    float* p = scratch.take<float>(STRIP * w.width);
    float* d_p = scratch.take<float>(STRIP * w.width);
    float* d_q = scratch.take<float>(STRIP * z.head);
    int64_t rows = up(s.count, ROWS), steps = rows / T::PER_LANE, row = w.width / T::PER_LANE;

    gather<T>(c, s, c.q, c.head, z.steps_head, q);
    gather<T>(c, s, c.d_out, c.value_head, z.steps_value, d_out);
    scores<T>(c, z, b, s, w, q, packs, p);
    to_probabilities<T>(c, s, rows, w.width, p, by_pair);
    if (d_v) {
        pack_along_column<T>([&](int64_t i) { return (const Value*)(d_out + i * z.steps_value); }, rows, c.value_head, z.value, d_out_rows);
        product<T>(w.width, z.value, {by_pair, 1, w.width, steps}, d_out_rows, steps * LANES, d_v + w.first * z.value, z.value, 1, true);
    }
    if (!d_k && !c.d_q.at) return;
    product<T>(rows, w.width, {d_out, z.steps_value, 1, z.steps_value}, packs.v_head + w.first * z.steps_value,
               z.steps_value * LANES, d_p, w.width, 1, false);
    to_score_gradients<T>(rows, w.width, p, d_p, by_row, by_pair);
    if (c.d_q.at) {
        product<T>(rows, z.head, {by_row, row, 1, row}, packs.along_keys + w.first / T::PER_LANE * LANES,
                   z.steps_keys * LANES, d_q, z.head, c.scale, false);
        scatter<T>(c, s, c.d_q, c.head, d_q, z.head);
    }
    if (d_k) {
        pack_along_column<T>([&](int64_t i) { return (const Value*)(q + i * z.steps_head); }, rows, c.head, z.head, q_rows);
        product<T>(w.width, z.head, {by_pair, 1, w.width, steps}, q_rows, steps * LANES, d_k + w.first * z.head, z.head, c.scale, true);
    }
}

// Number of threads that share a key head, each with separate sums.
int64_t shares(const Call& c) {
    int64_t matrices = std::max<int64_t>(1, c.batch * c.key_heads);
    return (c.threads + matrices - 1) / matrices;
}

template <class T>
void backward(const Call& c) {
    Sizes z = sizes_of<T>(c);
    int64_t matrices = c.batch * c.key_heads, each = shares(c), most = widest(c), size = z.keys * (z.head + z.value);
#pragma omp parallel num_threads(c.threads)
    {
        pack<T>(c, z, true);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < matrices * each; i++) {
            int64_t m = i / each, n = m / c.key_heads, h = m % c.key_heads, at = 0;
            float* totals = c.totals + i * size;
            std::fill_n(totals, size, 0.0f);
            Packs p = packs_of<T>(c, z, m, true);
            for (int64_t j = 0; j < c.block_count; j++) {
                const Block& b = c.blocks[j];
                if (n < b.part_first || n >= b.part_last) continue;
                strips(c, b, n, h, [&](Strip s) {
                    if (at++ % each != i % each) return;
                    backward_strip<T>(c, z, b, s, p, most, c.d_k.at ? totals : nullptr, c.d_v.at ? totals + z.keys * z.head : nullptr);
                });
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t m = 0; m < matrices; m++) {
            float* totals = c.totals + m * each * size;
            for (int64_t i = 1; i < each; i++)
                for (int64_t j = 0; j < size; j += LANES) store(totals + j, load(totals + j) + load(totals + i * size + j));
            // the keys are written as a strip with one head per key head
            Call keys = c;
            keys.group = 1;
            Strip all{m / c.key_heads, m % c.key_heads, 0, c.keys};
            if (c.d_k.at) scatter<T>(keys, all, c.d_k, c.head, totals, z.head);
            if (c.d_v.at) scatter<T>(keys, all, c.d_v, c.value_head, totals + z.keys * z.head, z.value);
        }
    }
}

template <class T>
void needs(const Call& c, bool backward, int64_t* lanes, int64_t* floats) {
    Sizes z = sizes_of<T>(c);
    *lanes = c.batch * c.key_heads * lanes_of<T>(z, backward);
    *floats = backward ? c.batch * c.key_heads * shares(c) * z.keys * (z.head + z.value) : 0;
}

}  // namespace

#define EXPORT(NAME, T)                                                                                                   \
    extern "C" void forward_##NAME(const Call* c) { forward<T>(*c); }                                                      \
    extern "C" void backward_##NAME(const Call* c) { backward<T>(*c); }                                                    \
    extern "C" void needs_##NAME(const Call* c, int64_t back, int64_t* lanes, int64_t* floats) { needs<T>(*c, back, lanes, floats); }

EXPORT(float32, Float)
#if defined(__AVX512BF16__)
EXPORT(bfloat16, BFloat16)
#endif
