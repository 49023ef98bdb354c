// Both products of attention by tiles: bfloat16 times bfloat16, summed in float32.
//
// A score is a sum over head_dim in steps of 32. An output takes up the tokens of a span in steps of 32, from token 0
// of the span on. Depths that are no multiple are padded with zeros, which change no sum. Decoding and prompts go
// through the same steps, so a token has the same bits in both.
#pragma once

#include <array>

#include "attention_span.h"

#if PENSTOCK_TILES

namespace penstock {

constexpr int kTileDepth = 32;  // steps of bfloat16 in a tile
constexpr int kRowTiles = 2;    // of a pass over the rows

// Tiles 0 to 3 are sums. With one tile of rows A is 4 and B are 5 to 7, with two A are 4 and 5 and B are 6 and 7.
constexpr TileShapes tile_shapes_of(int height) {
    TileShapes shapes = kWholeTiles;
    for (int tile = 0; tile < 5; tile++) shapes.rows[tile] = static_cast<uint8_t>(height);
    return shapes;
}

template <size_t... Heights>
constexpr std::array<TileShapes, sizeof...(Heights)> all_tile_shapes(std::index_sequence<Heights...>) {
    return {tile_shapes_of(Heights)...};
}

inline constexpr auto kTileShapes = all_tile_shapes(std::make_index_sequence<kTileHeight>());

// C [rows][16 columns] += or = A [rows][32 steps] B [32 steps][16 columns], for some rows and columns.
struct TileProduct {
    const BFloat* a;
    size_t a_stride;         // between rows, in elements
    const BFloat* const* b;  // of each tile of columns
    size_t b_row, b_step;    // between pairs of k, and between steps, in elements
    float* c;
    size_t c_stride;
    int steps;
    bool fresh;
    const char* const* fetched;  // what each tile of columns brings into the cache, `fetched_bytes` of each; or null
    size_t fetched_bytes;
};

template <int RowTiles, int Columns>
PENSTOCK_INLINE void multiply_tiles(const TileProduct& p, int column) {
    const auto sums = [&](int r, int j) { return p.c + r * kTileHeight * p.c_stride + (column + j) * kTileHeight; };
    const auto each_sum = [&](auto function) __attribute__((always_inline)) {
        unrolled<RowTiles>(PENSTOCK_EACH(r) { unrolled<Columns>(PENSTOCK_EACH(j) { function(r, j); }); });
    };
    each_sum([&](auto r, auto j) __attribute__((always_inline)) {
        if (p.fresh)
            tile_zero<r * Columns + j>();
        else
            tile_load<r * Columns + j>(sums(r, j), p.c_stride * sizeof(float));
    });
    for (int step = 0; step < p.steps; step++) {
        unrolled<RowTiles>(PENSTOCK_EACH(r) {
            const BFloat* a = p.a + r * kTileHeight * p.a_stride + step * kTileDepth;
            tile_load<4 + r>(a, p.a_stride * sizeof(BFloat));
        });
        unrolled<Columns>(PENSTOCK_EACH(j) {
            constexpr int b = RowTiles == 1 ? 5 + j % 3 : 6 + j;
            tile_load<b>(p.b[column + j] + step * p.b_step, p.b_row * sizeof(BFloat));
            unrolled<RowTiles>(PENSTOCK_EACH(r) { tile_dot_bf16<r * Columns + j, 4 + r, b>(); });
            if (p.fetched)
                fetch(p.fetched[column + j], p.fetched_bytes * step / p.steps, p.fetched_bytes * (step + 1) / p.steps);
        });
    }
    each_sum([&](auto r, auto j) __attribute__((always_inline)) {
        tile_store<r * Columns + j>(sums(r, j), p.c_stride * sizeof(float));
    });
}

// The same with a depth of two steps for two whole tiles of rows. These stay in four tiles: where two threads share a
// core, a load costs more than a product.
PENSTOCK_INLINE void multiply_kept_rows(const TileProduct& p, int columns) {
    const auto row = [&](int r, int step) { return p.a + r * kTileHeight * p.a_stride + step * kTileDepth; };
    unrolled<2>(PENSTOCK_EACH(r) {
        unrolled<2>(PENSTOCK_EACH(s) { tile_load<2 + 2 * r + s>(row(r, s), p.a_stride * sizeof(BFloat)); });
    });
    for (int column = 0; column < columns; column++) {
        unrolled<2>(PENSTOCK_EACH(r) { tile_zero<r>(); });
        unrolled<2>(PENSTOCK_EACH(s) {
            tile_load<6 + s>(p.b[column] + s * p.b_step, p.b_row * sizeof(BFloat));
            unrolled<2>(PENSTOCK_EACH(r) { tile_dot_bf16<r, 2 + 2 * r + s, 6 + s>(); });
        });
        if (p.fetched) fetch(p.fetched[column], 0, p.fetched_bytes);
        float* c = p.c + column * kTileHeight;
        unrolled<2>(PENSTOCK_EACH(r) { tile_store<r>(c + r * kTileHeight * p.c_stride, p.c_stride * sizeof(float)); });
    }
}

// `rows` are those of one pass.
inline void multiply_tiles(const TileProduct& p, int rows, int columns) {
    if (rows <= kTileHeight) {
        for (int j = 0; j < columns; j += 4)
            with_count<4>(std::min(4, columns - j), [&](auto count) { multiply_tiles<1, count()>(p, j); });
    } else if (p.fresh && p.steps == 2) {
        multiply_kept_rows(p, columns);
    } else {
        for (int j = 0; j < columns; j += 2)
            with_count<2>(std::min(2, columns - j), [&](auto count) { multiply_tiles<2, count()>(p, j); });
    }
}

// What the cache holds as bfloat16; integers without their scales.
inline void widen(const BFloat* from, int count, BFloat* to) {
    constexpr int kLine = kCacheLine / sizeof(BFloat);
    int i = 0;
    for (; i + kLine <= count; i += kLine) std::memcpy(to + i, from + i, kCacheLine);
    std::memcpy(to + i, from + i, (count - i) * sizeof(BFloat));
}

inline void widen(const Int8* from, int count, BFloat* to) {
    int i = 0;
    for (; i + kWide <= count; i += kWide) store_operands(to + i, load_as<wide>(from + i));
    for (; i < count; i++) to[i] = tile_operand(from[i].value);
}

template <class W>
class TileProducts {
   public:
    using Operand = BFloat;

    // Prepares this thread for so many rows: in one tile that is lower, or in whole ones.
    static void begin(int rows) { use_tiles(rows < kTileHeight ? kTileShapes[rows] : kWholeTiles); }

    static void advance(const Rows<BFloat>& rows, const Span<W>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        constexpr int kPass = kRowTiles * kTileHeight;
        const TileProducts products(rows.head_dim, rows.value_dim, span, tokens, scratch);
        bool has_values = false;
        for (int start = 0; start < rows.count; start += kPass) {
            const Rows<BFloat> pass = rows.part(start, std::min(kPass, rows.count - start));
            const SpanTokens seen = tokens.seen_by(pass);
            if (seen.from >= seen.to) continue;
            products.score(pass, seen, /*fetches=*/!has_values);
            if (!has_values) products.bring_values();
            has_values = true;
            for (int r = 0; r < pass.count; r++) fold_row(pass, r, seen, products.scales_);
            products.add_values(pass, seen);
        }
    }

   private:
    TileProducts(int head_dim, int value_dim, const Span<W>& span, const SpanTokens& tokens, AttentionScratch& scratch)
        : span_(span),
          tokens_(tokens),
          head_dim_(head_dim),
          value_dim_(value_dim),
          depth_(divide_up(head_dim, kTileDepth) * kTileDepth),
          columns_(divide_up(value_dim, kTileHeight)),
          scales_(gather_scales(span, tokens, scratch)),
          values_(operands_in(scratch) + kSpan * depth_) {
        for (int b = 0; b < span.blocks; b++)
            keys_[b] = bring_keys(b, operands_in(scratch) + b * kBlockTokens * depth_);
    }

    static BFloat* operands_in(AttentionScratch& scratch) { return reinterpret_cast<BFloat*>(scratch.blocks.get()); }

    // The keys of a block where they are, or if they need a conversion or padding, in the scratch.
    const BFloat* bring_keys(int b, BFloat* to) const {
        if constexpr (std::is_same_v<W, BFloat>)
            if (depth_ == head_dim_) return span_.keys[b];
        widen(span_.keys[b], kBlockTokens * head_dim_, to);
        clear(to, kBlockTokens * head_dim_, kBlockTokens * depth_);
        return to;
    }

    // Copies the values of the span, [64 pairs of tokens][columns][2]: a step reads two blocks, which may lie far apart.
    // What is not there or not written yet is 0, because what an earlier sequence left there could be a NaN.
    void bring_values() const {
        const int end = divide_up(tokens_.to - tokens_.start, kTileDepth) * kTileDepth;
        for (int at = tokens_.column() / kTileDepth * kTileDepth; at < end; at += 2) bring_pair(at);
    }

    void bring_pair(int at) const {
        const int row = 2 * value_dim_, width = 2 * kTileHeight * columns_, token = at - tokens_.column();
        BFloat* to = values_ + at / 2 * width;
        const int there = token < 0 ? 0 : tokens_.to - tokens_.from - token;
        if (there <= 0) return clear(to, 0, width);
        const int b = token / kBlockTokens, pair = token % kBlockTokens / 2;
        const size_t share = 2 * head_dim_ * sizeof(W);
        if (value_dim_ < head_dim_)
            turn_pair(span_.keys[b] + 4 * pair, to);
        else
            widen(span_.values[b] + pair * row, row, to);
        fetch(span_.fetched_keys[b], pair * share, (pair + 1) * share);
        if (there == 1)
            for (int i = 1; i < row; i += 2) to[i] = BFloat{0};
    }

    // The values of two tokens that latents begin with: [numbers / 2][16 tokens][2] become [numbers][2 tokens].
    void turn_pair(const W* from, BFloat* to) const {
        for (int i = 0; i < value_dim_; i += 2, from += 2 * kBlockTokens, to += 4) {
            const W turned[] = {from[0], from[2], from[1], from[3]};
            widen(turned, 4, to);
        }
    }

    // scores [rows][tokens of the span] = queries times keys
    void score(const Rows<BFloat>& rows, const SpanTokens& seen, bool fetches) const {
        const int b = (seen.from - tokens_.from) / kBlockTokens;
        const size_t bytes = head_dim_ * kBlockTokens * sizeof(W);
        multiply_tiles({rows.q, rows.q_stride, keys_ + b, 2 * kBlockTokens, kTileDepth * kBlockTokens,
                        rows.scores + seen.column(), kScoresStride, depth_ / kTileDepth, true,
                        fetches ? span_.fetched_values + b : nullptr, bytes},
                       rows.count, seen.blocks());
    }

    // out += weights of the span times its values
    void add_values(const Rows<BFloat>& rows, const SpanTokens& seen) const {
        const int at = seen.column() / kTileDepth * kTileDepth, end = divide_up(seen.to - seen.start, kTileDepth);
        const size_t width = 2 * kTileHeight * columns_;
        const BFloat* values = values_ + at / 2 * width;
        for (int column = 0; column < columns_; column += 4) {
            const BFloat* b[4];
            for (int j = 0; j < 4; j++) b[j] = values + (column + j) * 2 * kTileHeight;
            multiply_tiles({rows.weights(0) + at, 2 * kScoresStride, b, width, width * kTileDepth / 2,
                            rows.out + column * kTileHeight, rows.out_stride, end - at / kTileDepth, false, nullptr, 0},
                           rows.count, std::min(4, columns_ - column));
        }
    }

    const Span<W>& span_;
    const SpanTokens& tokens_;
    const int head_dim_;
    const int value_dim_;
    const int depth_;    // head_dim with the padding of keys
    const int columns_;  // tiles of values
    const SpanScales* scales_;
    BFloat* values_;
    const BFloat* keys_[kSpanBlocks];
};

}  // namespace penstock

#endif
