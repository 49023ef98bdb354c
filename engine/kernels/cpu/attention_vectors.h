// Both products of attention by vectors, with the bits that tiles give: for the few rows of a decoded token.
//
// A few rows leave most of a tile empty, while vectors multiply keys and values where the cache has them, without a
// copy. The order of a sum is that of tiles (tiles.h): 32 steps at a time, the even ones are one chain of fused
// multiply-adds from 0, the odd ones another, and even + odd is added to what there is. A step that is padding to
// tiles adds nothing, and is left out. So a token has the same bits whichever of both it goes through.
#pragma once

#include "attention_tiles.h"

#if PENSTOCK_TILES

namespace penstock {

// With more rows, tiles are quicker.
constexpr int kFewRows = 4;

// An operand of tiles, in float32: a vector is multiplied with it as it is.
struct WideOperand {
    float value;
};

template <class V>
PENSTOCK_INLINE void store_operands(WideOperand* out, V x) {
    BFloat narrow[sizeof(V) / sizeof(float)];
    store_operands(narrow, x);
    store(&out->value, load_as<V>(narrow));
}

template <class V>
struct Pair {
    V even, odd;
};

// As many 16 bits as V has lanes, with zeros above them.
template <class V>
PENSTOCK_INLINE IntsOf<V> load_unsigned(const void* from) {
#if PENSTOCK_AVX512
    if constexpr (sizeof(V) == 64)
        return (IntsOf<V>)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#endif
    typedef uint16_t Narrow __attribute__((vector_size(sizeof(V) / 2)));
    Narrow narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, IntsOf<V>);
}

// Numbers that the cache has side by side, the even ones and the odd ones.
template <class V>
PENSTOCK_INLINE Pair<V> load_pairs(const BFloat* from) {
    IntsOf<V> both;
    std::memcpy(&both, from, sizeof both);
    return {(V)(both << 16), (V)(both & int32_t(0xffff0000))};
}

// An integer with 128 added to it is the last bits of 2^23, or those of 2^15 where it is 8 bits higher.
template <class V>
PENSTOCK_INLINE Pair<V> load_pairs(const Int8* from) {
    const auto both = load_unsigned<V>(from) ^ 0x8080;
    return {(V)((both & 0xff) | 0x4b000000) - all<V>(8388608.0f + 128),
            (V)((both & 0xff00) | 0x47000000) - all<V>(32768.0f + 128)};
}

// Sums of Rows x Columns vectors over at most 32 steps.
template <class V, int Rows, int Columns>
struct PairSums {
    V even[Rows][Columns], odd[Rows][Columns];

    PENSTOCK_INLINE PairSums() {
        each([&](auto r, auto j) __attribute__((always_inline)) { even[r][j] = odd[r][j] = V{}; });
    }

    // Two steps: operand(r) are their two operands of a row, column(j) has what these multiply. The odd one may be left
    // out.
    template <bool kBoth, class Operand, class Column>
    PENSTOCK_INLINE void add(const Operand& operand, const Column& column) {
        unrolled<Columns>(PENSTOCK_EACH(j) {
            const Pair<V> pair = load_pairs<V>(column(j));
            unrolled<Rows>(PENSTOCK_EACH(r) {
                even[r][j] = fma(all<V>(operand(r)[0].value), pair.even, even[r][j]);
                if constexpr (kBoth) odd[r][j] = fma(all<V>(operand(r)[1].value), pair.odd, odd[r][j]);
            });
        });
    }

    template <class Function>
    static PENSTOCK_INLINE void each(const Function& function) {
        unrolled<Rows>(PENSTOCK_EACH(r) { unrolled<Columns>(PENSTOCK_EACH(j) { function(r, j); }); });
    }
};

template <class W>
class VectorProducts {
   public:
    using Operand = WideOperand;

    static void begin(int) {}

    static void advance(const Rows<WideOperand>& rows, const Span<W>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        const SpanScales* scales = gather_scales(span, tokens, scratch);
        with_count<kFewRows>(rows.count, [&](auto count) { score<count>(rows, span, tokens); });
        for (int r = 0; r < rows.count; r++) fold_row(rows, r, tokens, scales);
        with_count<kFewRows>(rows.count, [&](auto count) { add_values<count>(rows, span, tokens); });
    }

   private:
    // scores [rows][tokens of the span] = queries times keys
    template <int kRows>
    static void score(const Rows<WideOperand>& rows, const Span<W>& span, const SpanTokens& tokens) {
        int b = 0;
        for (; b + 2 <= span.blocks; b += 2) score_blocks<kRows, 2>(rows, span, b, tokens.column());
        if (b < span.blocks) score_blocks<kRows, 1>(rows, span, b, tokens.column());
    }

    template <int kRows, int kBlocks>
    static void score_blocks(const Rows<WideOperand>& rows, const Span<W>& span, int b, int column) {
        using Sums = PairSums<wide, kRows, kBlocks * kBlockParts>;
        wide scores[kRows][kBlocks * kBlockParts];
        Sums::each([&](auto r, auto j) __attribute__((always_inline)) { scores[r][j] = wide{}; });
        for (int from = 0; from < rows.head_dim; from += kTileDepth) {
            Sums sums;
            for (int i = from; i < std::min(from + kTileDepth, rows.head_dim); i += 2) {
                const int row = i * kBlockTokens;
                sums.template add<true>(
                    [&](int r) __attribute__((always_inline)) { return rows.q + r * rows.q_stride + i; },
                    [&](int j) __attribute__((always_inline)) {
                        return span.keys[b + j / kBlockParts] + row + j % kBlockParts * 2 * kWide;
                    });
                for (int j = 0; j < kBlocks; j++) __builtin_prefetch(span.fetched_values[b + j] + row * sizeof(W));
            }
            Sums::each([&](auto r, auto j) __attribute__((always_inline)) {
                scores[r][j] += sums.even[r][j] + sums.odd[r][j];
            });
        }
        float* out = rows.scores + column + b * kBlockTokens;
        Sums::each([&](auto r, auto j) __attribute__((always_inline)) {
            store(out + r * kScoresStride + j * kWide, scores[r][j]);
        });
    }

    // out += weights of the span times its values
    template <int kRows>
    static void add_values(const Rows<WideOperand>& rows, const Span<W>& span, const SpanTokens& tokens) {
        const int d = rows.head_dim;
        int i = 0;
        for (; i + 2 * kWide <= d; i += 2 * kWide) add_columns<wide, kRows, 2>(rows, span, tokens, i);
        for (; i + kWide <= d; i += kWide) add_columns<wide, kRows, 1>(rows, span, tokens, i);
        if (i < d) add_columns<v8, kRows, 1>(rows, span, tokens, i);
    }

    template <class V, int kRows, int kColumns>
    static void add_columns(const Rows<WideOperand>& rows, const Span<W>& span, const SpanTokens& tokens, int i) {
        using Sums = PairSums<V, kRows, kColumns>;
        constexpr int kWidth = sizeof(V) / sizeof(float);
        const int limit = tokens.to - tokens.start;
        for (int b = 0, at = tokens.column(); b < span.blocks;) {
            Sums sums;
            do {
                add_block(rows, span, b, at, std::min(limit - at, kBlockTokens), i, sums);
                b++;
                at += kBlockTokens;
            } while (at % kTileDepth != 0 && b < span.blocks);
            Sums::each([&](auto r, auto j) __attribute__((always_inline)) {
                float* out = rows.out + r * rows.out_stride + i + j * kWidth;
                store(out, load_as<V>(out) + (sums.even[r][j] + sums.odd[r][j]));
            });
        }
    }

    // What lies after the last token is not read: what an earlier sequence left there could be a NaN.
    template <class V, int kRows, int kColumns>
    static PENSTOCK_INLINE void add_block(const Rows<WideOperand>& rows, const Span<W>& span, int b, int at, int tokens,
                                          int i, PairSums<V, kRows, kColumns>& sums) {
        constexpr int kPairs = 2 * sizeof(V) / sizeof(float);  // elements of a column
        const WideOperand* weights = rows.weights(0) + at;
        const char* fetched = span.fetched_keys[b];
        int place = 2 * i, token = 0;
        const auto weight = [&](int r) __attribute__((always_inline)) { return weights + r * kScoresStride + token; };
        const auto column = [&](int j) __attribute__((always_inline)) { return span.values[b] + place + j * kPairs; };
        for (; token + 2 <= tokens; token += 2, place += 2 * rows.head_dim) {
            sums.template add<true>(weight, column);
            for (int j = 0; j < kColumns; j++) __builtin_prefetch(fetched + (place + j * kPairs) * sizeof(W));
        }
        if (token < tokens) sums.template add<false>(weight, column);
    }
};

}  // namespace penstock

#endif  // PENSTOCK_TILES
