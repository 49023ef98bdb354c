// Both products of attention to latents in float32.
//
// The cache has a token's numbers once, as keys lie: what products with values need side by side is turned in the first-level
// cache, some columns of a span at a time, and then serves all rows. So all query heads of a task are rows of one pass.
#pragma once

#include "attention_floats.h"

namespace penstock {

// Vectors whose numbers change places across the diagonal of the square that they are.
typedef std::conditional_t<kWide == 4, wide, v8> Turned;
constexpr int kTurned = sizeof(Turned) / sizeof(float);

// Number i of `first` where bit kBit of i is not set, else number i - kBit of `second`; or with kUpper, number i + kBit of
// `first` and number i of `second`.
template <int kBit, bool kUpper, int... I>
PENSTOCK_INLINE Turned woven(Turned first, Turned second, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(first, second, ((I & kBit) ? kTurned + I - (kUpper ? 0 : kBit) : I + (kUpper ? kBit : 0))...);
#else
    typedef IntsOf<Turned> Places;
    return __builtin_shuffle(first, second,
                             Places{((I & kBit) ? kTurned + I - (kUpper ? 0 : kBit) : I + (kUpper ? kBit : 0))...});
#endif
}

PENSTOCK_INLINE void turn_square(Turned (&x)[kTurned]) {
    constexpr auto kAll = std::make_integer_sequence<int, kTurned>();
    unrolled<kTurned == 8 ? 3 : 2>(PENSTOCK_EACH(step) {
        constexpr int kBit = 1 << step;
        unrolled<kTurned>(PENSTOCK_EACH(i) {
            if constexpr ((i() & kBit) == 0) {
                const Turned first = x[i], second = x[i + kBit];
                x[i] = woven<kBit, false>(first, second, kAll);
                x[i + kBit] = woven<kBit, true>(first, second, kAll);
            }
        });
    });
}

// out [16 tokens][width] = some columns of a block [columns][16 tokens]
template <class W>
void turn_columns(const W* columns, int width, float* out) {
    for (int i = 0; i < width; i += kTurned)
        for (int token = 0; token < kBlockTokens; token += kTurned) {
            Turned x[kTurned];
            unrolled<kTurned>(PENSTOCK_EACH(j) { x[j] = load_as<Turned>(columns + (i + j) * kBlockTokens + token); });
            turn_square(x);
            unrolled<kTurned>(PENSTOCK_EACH(j) { store(out + (token + j) * width + i, x[j]); });
        }
}

template <class W>
class LatentProducts {
    typedef FloatProducts<W> Floats;
    typedef FloatProducts<float> Turns;  // products with what was turned

   public:
    using Operand = float;

    static void begin(int) {}

    static void advance(const Rows<float>& rows, const Span<W>& span, const SpanTokens& tokens, AttentionScratch&) {
        advance(rows, span, tokens, rows.head_dim * kBlockTokens * sizeof(W));
    }

    // `ahead` are the bytes of a block that comes next.
    static void advance(const Rows<float>& rows, const Span<W>& span, const SpanTokens& tokens, size_t ahead) {
        constexpr int kPassRows = 8 * kTileRows;
        advance_in_passes<kPassRows>(
            rows, tokens, nullptr,
            [&](const auto& pass, int block, const SpanTokens& seen, bool) __attribute__((always_inline)) {
                Floats::score_pass(pass, span, block, seen, /*fetches=*/false);
            },
            [&](const auto& pass, int block, const SpanTokens& seen, bool fetches) __attribute__((always_inline)) {
                add_pass(pass, span, block, seen, fetches ? ahead : 0);
            });
    }

   private:
    static void add_pass(const Rows<float>& rows, const Span<W>& span, int block, const SpanTokens& seen, size_t ahead) {
        alignas(64) float turned[kSpan * Floats::kMostColumns];
        const float* values[kSpanBlocks];
        const int d = rows.value_dim, tokens = seen.to - seen.from;
        for (int column = 0, width; column < d; column += width) {
            width = Floats::width_at(column, d);
            for (int b = 0; b < seen.blocks(); b++) {
                values[b] = turned + b * kBlockTokens * width;
                turn_columns(span.keys[block + b] + column * kBlockTokens, width, turned + b * kBlockTokens * width);
            }
            for_tiles(rows.count, [&](int start, int height) {
                float* out = rows.out + start * rows.out_stride + column;
                Turns::add_tile(height, width, rows.weights(start) + seen.column(), values, 0, width, tokens, out,
                                rows.out_stride);
                if (ahead) Floats::fetch_share(span, ahead, rows.count * column + start * width, height * width, rows.count * d);
            });
        }
    }
};

// Numbers of 8 bits become floats, a span at a time.
template <>
class LatentProducts<GroupedInt8> {
   public:
    using Operand = float;

    static void begin(int) {}

    static void advance(const Rows<float>& rows, const Span<GroupedInt8>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        Span<float> floats;
        const int elements = rows.head_dim * kBlockTokens;
        float* to = scratch.blocks.get();
        floats.blocks = span.blocks;
        for (int b = 0; b < span.blocks; b++, to += elements) {
            floats.keys[b] = to;
            floats.fetched_keys[b] = span.fetched_keys[b];
            unpack(span.keys[b], rows.head_dim, rows.head_dim - rows.value_dim, to);
        }
        const int groups = rows.head_dim / (rows.head_dim - rows.value_dim);
        LatentProducts<float>::advance(rows, floats, tokens, elements + groups * kBlockTokens * sizeof(float));
    }

   private:
    static void unpack(const GroupedInt8* block, int head_dim, int group, float* out) {
        const Int8* numbers = reinterpret_cast<const Int8*>(block);
        const float* scales = reinterpret_cast<const float*>(block + head_dim * kBlockTokens);
        for (int i = 0; i < head_dim; i += group, scales += kBlockTokens) {
            wide by[kBlockParts];
            unrolled<kBlockParts>(PENSTOCK_EACH(p) { by[p] = load_as<wide>(scales + p * kWide); });
            for (int j = 0; j < group; j++, numbers += kBlockTokens, out += kBlockTokens)
                unrolled<kBlockParts>(PENSTOCK_EACH(p) { store(out + p * kWide, load_as<wide>(numbers + p * kWide) * by[p]); });
        }
    }
};

}  // namespace penstock
