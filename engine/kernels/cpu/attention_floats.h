// Both products of attention in float32, with a block of the cache in the place of a weight panel.
//
// A few rows go through the tiles of linear maps, which fetch what comes next step by step. Many rows are bound by
// arithmetic: they pass one group after another through a span, whose scores then stay in the first-level cache. Either way
// an output is one chain of fused multiply-adds, ascending.
#pragma once

#include "attention_rows.h"
#include "attention_span.h"

namespace penstock {

template <class W>
class FloatProducts {
   public:
    using Operand = float;

    static void begin(int) {}

    static void advance(const Rows<float>& rows, const Span<W>& span, const SpanTokens& tokens, AttentionScratch&) {
        if (rows.count <= kStreamedRows) {
            score(rows, span, tokens.column());
            for (int r = 0; r < rows.count; r++) fold_row(rows, r, tokens, nullptr);
            return add_values(rows, span, tokens.column(), tokens.to - tokens.from);
        }
        advance_in_passes(
            rows, tokens, nullptr,
            [&](const auto& pass, int block, const SpanTokens& seen, bool fetches) __attribute__((always_inline)) {
                score_pass(pass, span, block, seen, fetches);
            },
            [&](const auto& pass, int block, const SpanTokens& seen, bool fetches) __attribute__((always_inline)) {
                add_pass(pass, span, block, seen, fetches);
            });
    }

   private:
    template <class Stored>
    friend class LatentProducts;

    // ---- a few rows --------------------------------------------------------------------------------------------

    static constexpr int kStreamedRows = 2 * kTileRows;  // bound by memory as much as by arithmetic

    // A step of k fetches so many bytes of what comes next: a block is fetched by the time that one is multiplied.
    static constexpr size_t kSpeed = std::min<size_t>(kCacheLine, 2 * kBlockTokens * sizeof(W));

    // scores [rows][tokens of the span] = queries times keys; up to three rows take two blocks at a time, as panels.
    static void score(const Rows<float>& rows, const Span<W>& span, int column) {
        const int d = rows.head_dim, together = rows.count <= 3 ? 2 : 1, half = d / 2;
        for (int b = 0; b < span.blocks;) {
            const int panels = std::min(together, span.blocks - b);
            const W* halves[] = {span.keys[b], span.keys[b] + half * kBlockTokens};
            const size_t apart = panels == 2 ? span.keys[b + 1] - span.keys[b] : 0;
            const Strides by{rows.q_stride, kBlockTokens, apart, kScoresStride, kPanel};
            const Pieces<W> pieces{halves, 0, half, span.fetched_values + b, 0, kSpeed};
            for_tiles(rows.count, [&](int start, int height) {
                float* scores = rows.scores + start * kScoresStride + column + b * kBlockTokens;
                tile_rows<W, 16>(height, panels, rows.q + start * rows.q_stride, pieces, d, scores, by, true);
            });
            b += panels;
        }
    }

    // out += weights of the span times its values; the last columns of a head_dim of 8 modulo 16 go alone.
    static void add_values(const Rows<float>& rows, const Span<W>& span, int column, int tokens) {
        const size_t d = rows.head_dim;
        const Strides by{kScoresStride, d, kPanel, rows.out_stride, kPanel};
        const int panels = rows.head_dim / kPanel;
        for_tiles(rows.count, [&](int start, int height) {
            const float* weights = rows.weights(start) + column;
            float* out = rows.out + start * rows.out_stride;
            const auto pieces = [&](int p) {
                return Pieces<W>{span.values,       static_cast<size_t>(p) * kPanel,     kBlockTokens,
                                 span.fetched_keys, static_cast<size_t>(p) * kSpeed * 8, kSpeed};
            };
            for (int p = 0; p < panels;)
                p += tile_rows<W, 16>(height, panels - p, weights, pieces(p), tokens, out + p * kPanel, by, false);
            if (d % kPanel)
                tile_rows<W, 8>(height, 1, weights, pieces(panels), tokens, out + panels * kPanel, by, false);
        });
    }

    // ---- many rows ---------------------------------------------------------------------------------------------

    static void score_pass(const Rows<float>& rows, const Span<W>& span, int block, const SpanTokens& seen, bool fetches) {
        const size_t bytes = rows.head_dim * kBlockTokens * sizeof(W);
        for (int b = 0; b < seen.blocks();) {
            const bool several = b + kTilePanels <= seen.blocks();
            for_tiles(rows.count, [&](int start, int height) {
                const float* q = rows.q + start * rows.q_stride;
                float* scores = rows.scores + start * kScoresStride + seen.column() + b * kBlockTokens;
                with_count<kTileRows>(height, PENSTOCK_EACH(count) {
                    if (several)
                        score_blocks<count(), kTilePanels>(q, rows, span.keys + block + b, scores);
                    else
                        score_blocks<count(), 1>(q, rows, span.keys + block + b, scores);
                });
                for (int i = 0; fetches && i < (several ? kTilePanels : 1); i++)
                    fetch(span.fetched_values[block + b + i], bytes * start / rows.count,
                          bytes * (start + height) / rows.count);
            });
            b += several ? kTilePanels : 1;
        }
    }

    // scores [kRows][tokens of the blocks] = queries times the keys of some blocks
    template <int kRows, int kBlocks>
    static void score_blocks(const float* q, const Rows<float>& rows, const W* const* blocks, float* scores) {
        constexpr int kVectors = kBlocks * kBlockParts;
        const size_t stride = rows.q_stride;
        const W* keys[kBlocks];
        wide sums[kRows][kVectors];
        unrolled<kBlocks>(PENSTOCK_EACH(b) { keys[b] = blocks[b]; });
        unrolled<kRows>(PENSTOCK_EACH(r) { unrolled<kVectors>(PENSTOCK_EACH(j) { sums[r][j] = wide{}; }); });
        for (const float* end = q + rows.head_dim; q < end; q += 2) {
            unrolled<2>(PENSTOCK_EACH(i) {
                multiply_add_rows(q + i, stride, sums, [&](int j) __attribute__((always_inline)) {
                    return keys[j / kBlockParts] + i * kBlockTokens + j % kBlockParts * kWide;
                });
            });
            unrolled<kBlocks>(PENSTOCK_EACH(b) { keys[b] += 2 * kBlockTokens; });
        }
        unrolled<kRows>(PENSTOCK_EACH(r) {
            unrolled<kVectors>(PENSTOCK_EACH(j) { store(scores + r * kScoresStride + j * kWide, sums[r][j]); });
        });
    }

    static void add_pass(const Rows<float>& rows, const Span<W>& span, int block, const SpanTokens& seen, bool fetches) {
        const int d = rows.head_dim, tokens = seen.to - seen.from;
        const size_t bytes = d * kBlockTokens * sizeof(W);
        for (int column = 0, width; column < d; column += width) {
            width = width_at(column, d);
            for_tiles(rows.count, [&](int start, int height) {
                float* out = rows.out + start * rows.out_stride + column;
                add_tile(height, width, rows.weights(start) + seen.column(), span.values + block, column, d, tokens, out,
                         rows.out_stride);
                if (fetches) fetch_share(span, bytes, rows.count * column + start * width, height * width, rows.count * d);
            });
        }
    }

    // Fetches as much of the blocks that are read next, of so many bytes, as some steps from `done` on are of all.
    static PENSTOCK_INLINE void fetch_share(const Span<W>& span, size_t bytes, int done, int steps, int all) {
        const size_t from = to_line(bytes * done / all), to = to_line(bytes * (done + steps) / all);
        for (int b = 0; b < span.blocks; b++) fetch(span.fetched_keys[b], from, to);
    }

    static constexpr int kMostColumns = kTilePanels * kPanel;

    // How many of d columns go together from one on.
    static int width_at(int column, int d) { return std::min(d - column, d - column < kMostColumns ? kPanel : kMostColumns); }

    static size_t to_line(size_t bytes) { return bytes / kCacheLine * kCacheLine; }

    // out [height][width columns] += weights times the values of some tokens, which are d apart
    static PENSTOCK_INLINE void add_tile(int height, int width, const float* weights, const W* const* values, int column,
                                         size_t d, int tokens, float* out, size_t stride) {
        const auto add = [&](auto count, auto v, auto vectors) __attribute__((always_inline)) {
            add_columns<count(), decltype(v), vectors()>(weights, values, column, d, tokens, out, stride);
        };
        with_count<kTileRows>(height, PENSTOCK_EACH(count) {
            if (width == kMostColumns)
                add(count, wide{}, std::integral_constant<int, kMostColumns / kWide>());
            else if (width == kPanel)
                add(count, wide{}, std::integral_constant<int, kPanel / kWide>());
            else
                add(count, v8{}, std::integral_constant<int, 1>());
        });
    }

    template <int kRows, class V, int kVectors>
    static void add_columns(const float* weights, const W* const* values, int column, size_t d, int tokens, float* out,
                            size_t stride) {
        constexpr int kWidth = sizeof(V) / sizeof(float);
        V sums[kRows][kVectors];
        unrolled<kRows>(PENSTOCK_EACH(r) {
            unrolled<kVectors>(PENSTOCK_EACH(j) { sums[r][j] = load_as<V>(out + r * stride + j * kWidth); });
        });
        for (; tokens > 0; tokens -= kBlockTokens, values++) {
            const W* from = *values + column;
            const float* end = weights + std::min(tokens, kBlockTokens);
            const auto add = [&](int token) __attribute__((always_inline)) {
                multiply_add_rows(weights + token, kScoresStride, sums, [&](int j) __attribute__((always_inline)) {
                    return from + token * d + j * kWidth;
                });
            };
            for (; weights + 2 <= end; weights += 2, from += 2 * d) unrolled<2>(PENSTOCK_EACH(token) { add(token); });
            if (weights < end) add(0), weights++;
        }
        unrolled<kRows>(PENSTOCK_EACH(r) {
            unrolled<kVectors>(PENSTOCK_EACH(j) { store(out + r * stride + j * kWidth, sums[r][j]); });
        });
    }

    // One step of k: sums [row][j] += x [row] * the vector at place(j).
    template <int kRows, int kVectors, class V, class Place>
    static PENSTOCK_INLINE void multiply_add_rows(const float* x, size_t stride, V (&sums)[kRows][kVectors],
                                                  const Place& place) {
        V y[kVectors];
        unrolled<kVectors>(PENSTOCK_EACH(j) { y[j] = load_as<V>(place(j)); });
        unrolled<kRows>(PENSTOCK_EACH(r) {
            const V factor = all<V>(x[r * stride]);
            unrolled<kVectors>(PENSTOCK_EACH(j) { sums[r][j] = fma(factor, y[j], sums[r][j]); });
        });
    }
};

}  // namespace penstock
