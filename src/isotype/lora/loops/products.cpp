// Sums of products of matrices, rounded once: C = factor * (A1 B1 + A2 B2 + ...) + bias.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include "products.h"

namespace {

constexpr int64_t GROUP = 64;    // columns of B that a core packs at once, and keeps in its L2 cache
constexpr int64_t PANELS = GROUP / LANES;
constexpr int64_t SLAB = 1024;   // lanes of a sum that are packed at once: 256 KiB for a group of columns
// Lanes that are added one after another: longer float sums lose digits. For bfloat16 a slab loses less than the final rounding.
template <class T> constexpr int64_t RUN = T::PER_LANE == 1 ? 256 : SLAB;
constexpr int64_t STRIP = 96;    // rows whose sums stay in the L1 cache
constexpr int64_t SHARES = 4;    // pieces of work for each thread, so that all threads end at about the same time
constexpr int64_t PACKED = 1 << 18;  // lanes of A that are packed at once, but at least STRIP rows
constexpr int64_t LARGE = 1 << 20;  // bytes of a sum that exceed the caches of a core: such a sum is written past the caches
constexpr size_t KEPT = 4 << 20;     // bytes of scratch memory that a thread keeps for the next call

struct Matrix {
    char* at;
    int64_t row, column;  // strides in values
};

struct Term {
    Matrix a, b;  // [rows, depth], [depth, columns]
    int64_t depth;
};

// The arguments from Python: int64 numbers. Each sum is followed by its terms.
struct Sum {
    Matrix out;
    int64_t rows, columns, out_is_float;
    const char* bias;  // null without a bias
    int64_t count;     // terms
};

struct Job {
    Sum sum;
    const Term* terms;
    float factor;
};

template <class T> int64_t lanes_of(int64_t depth) { return (depth + T::PER_LANE - 1) / T::PER_LANE; }

// Whether the lanes of A are read in place, without packing.
template <class T> bool lies_in_lanes(const Term& term) {
    return T::PER_LANE == 1 || (term.a.column == 1 && term.a.row % T::PER_LANE == 0 && term.depth % T::PER_LANE == 0);
}

template <class T> typename T::Value* value_of(const Matrix& m, int64_t row, int64_t column) {
    return reinterpret_cast<typename T::Value*>(m.at) + row * m.row + column * m.column;
}

// Lane `k` of a row of A or a column of B, whose values begin at `from` with a stride; values beyond the depth are zero.
template <class T> uint32_t lane_of(const typename T::Value* from, int64_t stride, int64_t k, int64_t depth) {
    typename T::Value pair[2] = {from[k * T::PER_LANE * stride], 0};
    if (T::PER_LANE == 2 && k * 2 + 1 < depth) pair[1] = from[(k * 2 + 1) * stride];
    return T::lane(pair, 1);
}

// Packs lanes [k, k + steps) of B's columns [first, first + count) into panels, `panel` lanes apart; missing columns are zero.
template <class T>
void pack_b(const Term& term, int64_t k, int64_t steps, int64_t first, int64_t count, int64_t panel, uint32_t* to) {
    typedef typename T::Value Value;
    constexpr int64_t BLOCK = 16;
    const Matrix& m = term.b;
    int64_t whole = std::min(steps, term.depth / T::PER_LANE - k);  // all lanes but a last one that is half empty
    for (int64_t j = 0; j < count; j += LANES, to += panel) {
        int64_t n = std::min<int64_t>(LANES, count - j);
        const Value* from = value_of<T>(m, 0, first + j);
        if (n < LANES) std::memset(to, 0, 4 * steps * LANES);
        int64_t done = 0;
        if (m.column == 1) {
            Value lines[2][LANES] = {};
            for (; done < whole; done++) {
                const Value *a = from + (k + done) * T::PER_LANE * m.row, *b = a + (T::PER_LANE - 1) * m.row;
                if (n < LANES) {
                    std::memcpy(lines[0], a, n * sizeof(Value)), std::memcpy(lines[1], b, n * sizeof(Value));
                    a = lines[0], b = lines[1];
                }
                T::interleave(a, b, to + done * LANES);
            }
        } else if (m.row == 1) {
            for (; n == LANES && done + LANES <= whole; done += LANES)
                transpose([&](int c) { return from + c * m.column + (k + done) * T::PER_LANE; }, to + done * LANES);
            for (; done < whole; done += std::min(BLOCK, whole - done))
                for (int64_t c = 0; c < n; c++) {
                    const Value* row = from + c * m.column + (k + done) * T::PER_LANE;
                    for (int64_t l = 0, last = std::min(BLOCK, whole - done); l < last; l++)
                        std::memcpy(to + (done + l) * LANES + c, row + l * T::PER_LANE, 4);
                }
        }
        for (; done < steps; done++)
            for (int64_t c = 0; c < n; c++) to[done * LANES + c] = lane_of<T>(from + c * m.column, m.row, k + done, term.depth);
    }
}

// Lanes of A: lane k of row i is at[i * row + k * step].
struct Lanes {
    const uint32_t* at;
    int64_t row, step;
};

// Rows [first, last) of A as lanes, in place or packed into `to`, which has room for whole vectors of rows.
template <class T> Lanes lanes_of_a(const Term& term, int64_t first, int64_t last, uint32_t* to) {
    typedef typename T::Value Value;
    const Matrix& m = term.a;
    const Value* from = value_of<T>(m, first, 0);
    if (lies_in_lanes<T>(term)) return {(const uint32_t*)from, m.row / T::PER_LANE, m.column};
    int64_t steps = lanes_of<T>(term.depth), rows = last - first;
    if (m.row == 1) {
        int64_t all = up(rows, LANES);
        Value none[LANES] = {}, ends[2][LANES] = {};
        for (int64_t k = 0; k < steps; k++)
            for (int64_t i = 0; i < rows; i += LANES) {
                const Value *a = from + i + k * T::PER_LANE * m.column, *b = k * T::PER_LANE + 1 < term.depth ? a + m.column : none;
                if (int64_t n = rows - i; n < LANES) {
                    std::memcpy(ends[0], a, n * sizeof(Value)), std::memcpy(ends[1], b, n * sizeof(Value));
                    a = ends[0], b = ends[1];
                }
                T::interleave(a, b, to + k * all + i);
            }
        return {to, 1, all};
    }
    for (int64_t i = 0; i < rows && steps; i++) {
        uint32_t* row = to + i * steps;
        row[steps - 1] = 0;
        if (m.column == 1)
            std::memcpy(row, from + i * m.row, term.depth * sizeof(Value));
        else
            for (int64_t k = 0; k < steps; k++) row[k] = lane_of<T>(from + i * m.row, m.column, k, term.depth);
    }
    return {to, steps, 1};
}

// Lanes [first, first + steps) of a term.
struct Piece { int64_t term, first, steps; };
typedef std::vector<Piece> Slab;

template <class T> std::vector<Slab> slabs_of(const Job& job) {
    std::vector<Slab> slabs(1);
    int64_t room = SLAB;
    for (int64_t t = 0; t < job.sum.count; t++)
        for (int64_t k = 0, all = lanes_of<T>(job.terms[t].depth); k < all;) {
            if (!room) slabs.emplace_back(), room = SLAB;
            int64_t steps = std::min({room, RUN<T>, all - k});
            slabs.back().push_back({t, k, steps});
            k += steps, room -= steps;
        }
    return slabs;
}

struct Work {
    const Job* job;
    int64_t row_first, row_last, column_first, column_last;
};

template <class T> int64_t bytes_of(const Sum& sum) {
    return sum.rows * sum.columns * (sum.out_is_float ? 4 : (int64_t)sizeof(typename T::Value));
}

// Writes the sums of a group of columns to C, with the bias.
template <class T>
void write(const Job& job, int64_t row, int64_t rows, int64_t column, int64_t columns, const float* sums) {
    const Matrix& out = job.sum.out;
    float bias[GROUP] = {};
    if (job.sum.bias)
        for (int64_t j = 0; j < columns; j++) bias[j] = T::widened(((const typename T::Value*)job.sum.bias)[column + j]);
    bool whole = out.column == 1 && columns == GROUP, large = bytes_of<T>(job.sum) >= LARGE;
    auto put = [&](auto type, int64_t i, const float* line) {
        typedef decltype(type) D;
        typename D::Value* to = value_of<D>(out, row + i, column);
        if (whole && large && (uintptr_t)to % 64 == 0)
            D::stream_row(line, (uint32_t*)to, GROUP);
        else if (whole)
            D::round_row(line, (uint32_t*)to, GROUP);
        else
            for (int64_t j = 0; j < columns; j++) to[j * out.column] = D::rounded(line[j]);
    };
    for (int64_t i = 0; i < rows; i++) {
        alignas(64) float line[GROUP];
        for (int64_t j = 0; j < GROUP; j += LANES) store(line + j, load(sums + i * GROUP + j) + load(bias + j));
        if (job.sum.out_is_float)
            put(Float(), i, line);
        else
            put(T(), i, line);
    }
    streamed();
}

thread_local Scratch scratch;

template <class T> void run(const Work& work) {
    const Job& job = *work.job;
    std::vector<Slab> slabs = slabs_of<T>(job);
    bool one = slabs.size() == 1;
    int64_t rows = work.row_last - work.row_first, strip = one ? STRIP : rows, most = std::min(strip, rows), all = 0, packed = 0;
    for (int64_t t = 0; t < job.sum.count; t++) {
        int64_t steps = lanes_of<T>(job.terms[t].depth);
        all += steps;
        if (!lies_in_lanes<T>(job.terms[t])) packed += steps * up(rows, LANES);
    }
    int64_t panel = std::min(SLAB, all) * LANES;
    scratch.reserve(4 * (panel * PANELS + most * GROUP + packed) + 1024);
    uint32_t* b = scratch.take<uint32_t>(panel * PANELS);
    float* sums = scratch.take<float>(most * GROUP);
    uint32_t* to = scratch.take<uint32_t>(packed);
    std::vector<Lanes> lanes;
    for (int64_t t = 0; t < job.sum.count; t++) {
        lanes.push_back(lanes_of_a<T>(job.terms[t], work.row_first, work.row_last, to));
        if (!lies_in_lanes<T>(job.terms[t])) to += lanes_of<T>(job.terms[t].depth) * up(rows, LANES);
    }
    std::vector<Part> parts;
    for (int64_t column = work.column_first; column < work.column_last; column += GROUP) {
        int64_t columns = std::min(GROUP, work.column_last - column);
        for (int64_t row = 0; row < rows; row += strip) {
            int64_t count = std::min(strip, rows - row);
            bool direct = one && job.sum.out_is_float && job.sum.out.column == 1 && columns == GROUP && !job.sum.bias &&
                          bytes_of<T>(job.sum) < LARGE;
            float* c = direct ? value_of<Float>(job.sum.out, work.row_first + row, column) : sums;
            int64_t c_row = direct ? job.sum.out.row : GROUP;
            for (const Slab& slab : slabs) {
                parts.clear();
                uint32_t* at = b;
                for (const Piece& piece : slab) {
                    const Lanes& a = lanes[piece.term];
                    if (!one || !row) pack_b<T>(job.terms[piece.term], piece.first, piece.steps, column, columns, panel, at);
                    at += piece.steps * LANES;
                    parts.push_back({a.at + row * a.row + piece.first * a.step, a.row, a.step, piece.steps});
                }
                const uint32_t* from = b;
                size_t first = 0;
                do {
                    size_t last = first;
                    int64_t steps = 0;
                    auto fits = [&] { return last == first || steps + parts[last].steps <= RUN<T> + RUN<T> / 8; };
                    while (last < parts.size() && fits()) steps += parts[last++].steps;
                    product<T>(count, up(columns, LANES), parts.data() + first, last - first, from, panel, c, c_row, job.factor,
                               first || &slab != &slabs[0]);
                    from += steps * LANES;
                    first = last;
                } while (first < parts.size());
            }
            if (!direct) write<T>(job, work.row_first + row, count, column, columns, sums);
        }
    }
    scratch.release_beyond(KEPT);
}

// Divides a job into pieces of work: into columns first, because all rows use the packed columns of B. If A has to be packed, the job is
// divided into rows, too, and into fewer columns, so that each row is packed rarely.
template <class T> void divide(const Job& job, int64_t threads, std::vector<Work>& to) {
    const Sum& s = job.sum;
    if (!s.rows || !s.columns) return;
    bool direct = std::all_of(job.terms, job.terms + s.count, lies_in_lanes<T>);
    int64_t all = 1;
    for (int64_t t = 0; t < s.count; t++) all += lanes_of<T>(job.terms[t].depth);
    int64_t groups = (s.columns + GROUP - 1) / GROUP, wanted = threads == 1 ? 1 : threads * SHARES;
    int64_t by_columns = direct ? groups : std::min(groups, wanted), by_rows = (wanted + by_columns - 1) / by_columns;
    // If a sum has several slabs, the sums of all rows of a piece are kept.
    int64_t most = direct ? (all > SLAB ? 1024 : s.rows) : std::max<int64_t>(STRIP, PACKED / all);
    int64_t columns = (groups + by_columns - 1) / by_columns * GROUP, pieces = (s.columns + columns - 1) / columns;
    for (int64_t p = 0; p < pieces; p++) {
        // The pieces that remain after an equal number for each thread are divided into rows for all threads.
        int64_t shares = pieces >= threads && p >= pieces / threads * threads ? threads : by_rows;
        int64_t rows = std::min(most, up((s.rows + shares - 1) / shares, 2 * ROWS)), j = p * columns;
        for (int64_t i = 0; i < s.rows; i += rows)
            to.push_back({&job, i, std::min(s.rows, i + rows), j, std::min(s.columns, j + columns)});
    }
}

template <class T> void sums_of_products(int64_t count, const int64_t* numbers, const float* factors, int64_t threads) {
    std::vector<Job> jobs;
    for (int64_t i = 0; i < count; i++) {
        Sum sum;
        std::memcpy(&sum, numbers, sizeof sum);
        jobs.push_back({sum, reinterpret_cast<const Term*>(numbers + sizeof sum / 8), factors[i]});
        numbers += (sizeof sum + sum.count * sizeof(Term)) / 8;
    }
    std::vector<Work> work;
    for (const Job& job : jobs) divide<T>(job, threads, work);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (work.size() > 1)
    for (size_t i = 0; i < work.size(); i++) run<T>(work[i]);
}

}  // namespace

#define EXPORT(NAME, T)                                                                                                         \
    extern "C" void sums_of_products_##NAME(int64_t count, const int64_t* numbers, const float* factors, int64_t threads) {       \
        sums_of_products<T>(count, numbers, factors, threads);                                                                    \
    }

EXPORT(float32, Float)
#if defined(__AVX512BF16__)
EXPORT(bfloat16, BFloat16)
#endif
