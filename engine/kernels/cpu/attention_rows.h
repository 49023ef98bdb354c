// The rows of attention, and the softmax that folds one span of tokens after another into them.
#pragma once

#include <atomic>

#include "kv_layout.h"

namespace penstock {

constexpr int kSpan = 128;  // tokens per fold
constexpr int kSpanBlocks = kSpan / kBlockTokens;
constexpr int kSegment = 16 * kSpan;  // tokens whose softmax is one of its own, until it is merged
constexpr int kScoresStride = kSpan + 16;  // a power of 2 would put the rows of a tile into the same cache sets
constexpr size_t kCacheLine = 64;
constexpr int kMostShort = std::numeric_limits<int16_t>::max();
constexpr int kMostSum = std::numeric_limits<int32_t>::max();
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the largest score of no tokens

// ---- records ---------------------------------------------------------------------------------------------------

// What segments made of a row: the largest score, the sum of 2^(score - largest), and from kRecordStart on the sum of
// that times the values. They are merged in ascending order, whoever computed them and when.
constexpr int kRecordStart = kLanes;

constexpr size_t record_size(int head_dim) { return kRecordStart + head_dim; }

// Adds what a further segment made of the row.
inline void merge(float* record, int head_dim, float peak, float total, const float* sums) {
    float* own = record + kRecordStart;
    if (peak == kNone) return;
    if (record[0] == kNone) {
        record[0] = peak;
        record[1] = total;
        std::memcpy(own, sums, head_dim * sizeof(float));
        return;
    }
    const float highest = std::max(record[0], peak);
    const v8 before = exp2(splat(record[0] - highest)), now = exp2(splat(peak - highest));
    record[0] = highest;
    record[1] = record[1] * before[0] + total * now[0];
    for (int i = 0; i < head_dim; i += kLanes) store(own + i, fma(load(own + i), before, load(sums + i) * now));
}

// Some rows whose segments are tasks of their own.
struct Split {
    int first, segments;
    size_t place;    // of the records among those of all
    float* records;  // [segments][rows of all kv heads of a task][record]
    std::atomic<int> left;

    Split(int first, int segments, size_t place)
        : first(first), segments(segments), place(place), records(nullptr), left(segments) {}
};

// ---- rows ------------------------------------------------------------------------------------------------------

// The query heads of some tokens that read the same kv heads, or all of them latents.
struct Task {
    int sequence;
    int token;  // first one
    int tokens;
    int part;  // first one, of Shape::parts()
    int parts;
    int64_t cost;
    Split* split;  // or null, if the task is all that its rows see
    int segment;
};

// Some query heads that read the same kv head.
struct HeadRange {
    int first, count;
};

// The rows of one kv head in a task: its query heads of each token. Operand is what both products multiply: float32,
// bfloat16 with tiles, or integers.
template <class Operand>
struct Rows {
    int count;
    int head_dim;
    int value_dim;
    float softcap;
    size_t q_stride, out_stride;  // between rows: head_dim with padding for tiles
    Operand* q;
    float* out;
    float* scores;  // [count][kScoresStride]; nothing of them outlasts a span
    float* peak;
    float* total;            // [count][16 lanes]
    int32_t *first, *limit;  // the tokens that a row sees
    float* records;          // [count][record]: of all segments before
    float* operand_scales;   // [count][2]: of integers, those of a row's query and of its weights

    Rows part(int from, int rows) const {
        Rows some = *this;
        some.count = rows;
        some.q += from * q_stride;
        some.out += from * out_stride;
        some.peak += from;
        some.total += from * kBlockTokens;
        some.first += from;
        some.limit += from;
        some.records += from * record_size(value_dim);
        some.operand_scales += 2 * from;
        return some;
    }

    float* record(int row) const { return records + row * record_size(value_dim); }
    float& query_scale(int row) const { return operand_scales[2 * row]; }
    float& weight_scale(int row) const { return operand_scales[2 * row + 1]; }

    // A row's weights take the place of its scores.
    Operand* weights(int row) const { return reinterpret_cast<Operand*>(scores + row * kScoresStride); }
};

// The tokens [from, to) of the span that starts at token `start`.
struct SpanTokens {
    int start, from, to;

    int column() const { return from - start; }
    int blocks() const { return divide_up(to - from, kBlockTokens); }

    // Without the blocks at both ends that none of the rows sees.
    template <class Operand>
    SpanTokens seen_by(const Rows<Operand>& rows) const {
        const int first = rows.first[0] / kBlockTokens * kBlockTokens;
        return {start, std::max(from, first), std::min(to, rows.limit[rows.count - 1])};
    }
};

// The scales of a span's keys and values, by their place in the span; a value that is not there has scale 0.
struct SpanScales {
    alignas(64) float keys[kSpan];
    alignas(64) float values[kSpan];
};

// How many rows a task may have, and how many the buffers hold for as many.
struct RowLimits {
    int rows;  // where one token's heads are not more
    int unit;  // more rows than this are padded to a multiple of it

    int padded(int count) const { return count <= unit ? count : divide_up(count, unit) * unit; }
    int tokens_per_task(const Shape& shape) const {
        return std::max(1, rows / (shape.latent ? shape.num_heads : shape.group()));
    }
    int parts_per_task(const Shape& shape, int tokens) const {
        return std::max(1, rows / padded(tokens * shape.group()));
    }
};

template <class W>
constexpr RowLimits kRowLimits = kIsTiled<W> ? RowLimits{96, 16} : RowLimits{48, 1};

// What a worker needs for a task.
struct AttentionScratch {
    Buffer<float> q, out, scores, peak, total, records, operand_scales;
    Buffer<int32_t> first, limit;
    Buffer<float> blocks;  // keys and values of a span, in the type that is multiplied
    Buffer<SpanScales> scales;

    // For heads of this size and smaller ones, and for groups as large.
    AttentionScratch(int head_dim, int group, const RowLimits& limits) {
        const size_t rows = std::max(limits.rows, limits.padded(group)) + limits.unit, depth = depth_of(head_dim);
        q = allocate<float>(rows * depth);
        out = allocate<float>(rows * depth);
        scores = allocate<float>(rows * kScoresStride);
        peak = allocate<float>(rows);
        total = allocate<float>(rows * kBlockTokens);
        first = allocate<int32_t>(rows);
        limit = allocate<int32_t>(rows);
        records = allocate<float>(rows * record_size(head_dim));
        operand_scales = allocate<float>(2 * rows);
        blocks = allocate<float>(2 * kSpan * depth);
        scales = allocate<SpanScales>(1);
    }

    // head_dim as tiles of it need it
    static size_t depth_of(int head_dim) { return divide_up(head_dim, 32) * 32; }

    template <class Operand>
    Rows<Operand> rows(const Shape& shape) const {
        const size_t depth = depth_of(shape.head_dim);
        return {0,
                shape.head_dim,
                shape.value_dim(),
                shape.softcap,
                depth,
                depth,
                reinterpret_cast<Operand*>(q.get()),
                out.get(),
                scores.get(),
                peak.get(),
                total.get(),
                first.get(),
                limit.get(),
                records.get(),
                operand_scales.get()};
    }
};

// Whether weights are rounded to bfloat16: those of tiles, whoever multiplies them.
template <class Operand>
constexpr bool kIsRounded = !std::is_arithmetic_v<Operand>;

// ---- the softmax of a span -------------------------------------------------------------------------------------

// Sixteen floats are one register, two or four. Sums over them have eight lanes whichever it is.
constexpr int kBlockParts = kBlockTokens / kWide;

PENSTOCK_INLINE v8 fold_halves(const wide (&x)[kBlockParts], v8 (*combine)(v8, v8)) {
#if PENSTOCK_AVX512
    const __m512 whole = (__m512)x[0];
    return combine((v8)_mm512_castps512_ps256(whole), (v8)_mm512_extractf32x8_ps(whole, 1));
#elif PENSTOCK_NEON
    v8 halves[2];
    std::memcpy(halves, x, sizeof halves);
    return combine(halves[0], halves[1]);
#else
    return combine(x[0], x[1]);
#endif
}

PENSTOCK_INLINE v8 plus(v8 a, v8 b) { return a + b; }

inline void multiply(float* scores, const float* scales, int from, int to) {
    for (int i = from; i < to; i += kWide) store(scores + i, load_as<wide>(scores + i) * load_as<wide>(scales + i));
}

// Scores over a cap become c tanh(x), in powers of 2.
inline void cap(float* scores, int from, int to, float softcap) {
    const wide c = all<wide>(softcap * 1.44269504088896341f);
    for (int i = from; i < to; i += kWide) store(scores + i, c * tanh(load_as<wide>(scores + i)));
}

PENSTOCK_INLINE float highest(const float* scores, int from, int to) {
    wide found[kBlockParts];
    for (wide& part : found) part = all<wide>(-std::numeric_limits<float>::infinity());
    for (int i = from; i < to; i += kBlockTokens)
        unrolled<kBlockParts>(PENSTOCK_EACH(p) { found[p] = max(found[p], load_as<wide>(scores + i + p * kWide)); });
    return max(fold_halves(found, max));
}

// 2^x up to x = 0 for weights that are rounded to bfloat16, 1e-4 relative, a twentieth of that rounding; exactly 1 at 0, and 0
// below -126. As exp2, with a shorter polynomial: 2^x = 2^n 2^r, where n is the integer next to x, the even one of two, and
// r = x - n is exact.
template <class V>
PENSTOCK_INLINE V short_exp2(V x) {
    const auto power = [](V r) __attribute__((always_inline)) {
        V p = all<V>(5.500895e-02f);
        p = fma(p, r, all<V>(2.4221101e-01f));
        p = fma(p, r, all<V>(6.9328293e-01f));
        return fma(p, r, all<V>(1.0f));
    };
#if PENSTOCK_AMX
    // Of -inf, the first instruction makes 0 and the second 0; what is below 2^-126 is flushed (FlushedDenormals).
    if constexpr (sizeof(V) == 64) {
        const V r = (V)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return (V)_mm512_scalef_ps((__m512)power(r), (__m512)(x - r));
    }
#endif
    const V magic = all<V>(12582912.0f);  // even, or halves would go to the odd n
    const V shifted = x + magic;
    const V result = power(x - (shifted - magic)) * (V)(((IntsOf<V>)shifted << 23) + (127 << 23));
    return x < all<V>(-126.0f) ? V{} : result;
}

// Writes 2^(score - peak) times the scales as weights, and adds it to the row's sums.
template <class Operand>
PENSTOCK_INLINE void weigh(const float* scores, int from, int to, float peak, const float* scales, Operand* weights,
                           wide (&sums)[kBlockParts]) {
    for (int i = from; i < to; i += kBlockTokens)
        unrolled<kBlockParts>(PENSTOCK_EACH(p) {
            const int at = i + p * kWide;
            const wide power = load_as<wide>(scores + at) - all<wide>(peak);
            const wide weight = kIsRounded<Operand> ? short_exp2(power) : exp2(power);
            sums[p] += weight;
            store_operands(weights + at, scales ? weight * load_as<wide>(scales + at) : weight);
        });
}

template <class Operand>
void clear(Operand* weights, int from, int to) {
    if (from < to) std::memset(static_cast<void*>(weights + from), 0, (to - from) * sizeof(Operand));
}

PENSTOCK_INLINE void hide(float* scores, int from, int to) {
    for (int i = from; i < to; i++) scores[i] = -std::numeric_limits<float>::infinity();
}

// Scores of a span become weights; the row's output and sums so far are scaled to the new maximum. `scales` is null for
// a type without any.
template <class Operand>
void fold_row(const Rows<Operand>& rows, int row, const SpanTokens& tokens, const SpanScales* scales) {
    float* scores = rows.scores + row * kScoresStride;
    Operand* weights = rows.weights(row);
    const int begin = tokens.column() / 32 * 32, end = divide_up(tokens.to - tokens.start, 32) * 32;
    const int first = std::max(rows.first[row], tokens.from) - tokens.start;
    const int limit = std::min(rows.limit[row], tokens.to) - tokens.start;
    if (first >= limit) {
        if constexpr (std::is_integral_v<Operand>) rows.weight_scale(row) = 0.0f;
        return clear(weights, begin, end);
    }
    const int low = first / kBlockTokens * kBlockTokens, high = divide_up(limit, kBlockTokens) * kBlockTokens;
    if (scales) multiply(scores, scales->keys, low, high);
    if (rows.softcap > 0.0f) cap(scores, low, high, rows.softcap);
    hide(scores, low, first);
    hide(scores, limit, high);
    const float before = rows.peak[row], peak = std::max(before, highest(scores, low, high));
    rows.peak[row] = peak;
    float* total = rows.total + row * kBlockTokens;
    wide sums[kBlockParts];
    unrolled<kBlockParts>(PENSTOCK_EACH(p) { sums[p] = load_as<wide>(total + p * kWide); });
    if (peak != before) {
        const float shrink = exp2(splat(before - peak))[0];
        unrolled<kBlockParts>(PENSTOCK_EACH(p) { sums[p] *= all<wide>(shrink); });
        float* out = rows.out + row * rows.out_stride;
        multiply(out, rows.value_dim, shrink);
    }
    if constexpr (std::is_integral_v<Operand>) {
        weigh(scores, low, high, peak, scales->values, scores, sums);
        rows.weight_scale(row) = to_integers(scores + low, high - low, kMostShort, weights + low);
    } else {
        weigh(scores, low, high, peak, scales ? scales->values : nullptr, weights, sums);
    }
    unrolled<kBlockParts>(PENSTOCK_EACH(p) { store(total + p * kWide, sums[p]); });
    clear(weights, begin, low);
    clear(weights, high, end);
}

// Rows in passes of nearly equal size: of so many that a span's scores stay near. Each goes through
// score(rows, first block, tokens that they see, fetches), the softmax, and add(...) with the same; the first that sees
// anything fetches what comes next.
template <int kPassRows = 4 * kTileRows, class Operand, class Score, class Add>
PENSTOCK_INLINE void advance_in_passes(const Rows<Operand>& rows, const SpanTokens& tokens, const SpanScales* scales,
                                       const Score& score, const Add& add) {
    const int passes = divide_up(rows.count, kPassRows), tiles = divide_up(rows.count, kTileRows);
    bool fetches = true;
    for (int i = 0; i < passes; i++) {
        const int start = tiles * i / passes * kTileRows, end = tiles * (i + 1) / passes * kTileRows;
        const Rows<Operand> pass = rows.part(start, std::min(end, rows.count) - start);
        const SpanTokens seen = tokens.seen_by(pass);
        if (seen.from >= seen.to) continue;
        const int block = (seen.from - tokens.from) / kBlockTokens;
        score(pass, block, seen, fetches);
        for (int r = 0; r < pass.count; r++) fold_row(pass, r, seen, scales);
        add(pass, block, seen, fetches);
        fetches = false;
    }
}

// The sum of a row's exponentials.
template <class Operand>
float total_of(const Rows<Operand>& rows, int row) {
    wide sums[kBlockParts];
    unrolled<kBlockParts>(PENSTOCK_EACH(p) { sums[p] = load_as<wide>(rows.total + row * kBlockTokens + p * kWide); });
    return sum(fold_halves(sums, plus));
}

}  // namespace penstock
