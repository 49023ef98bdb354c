// Both products of attention in float32, with a block of the cache in the place of a weight panel.
#pragma once

#include "attention_rows.h"
#include "attention_span.h"

namespace penstock {

template <class W>
struct FloatProducts {
    using Operand = float;

    static void begin(int) {}

    // A step of k fetches so many bytes of what comes next: a block is fetched by the time that one is multiplied.
    static constexpr size_t kSpeed = std::min<size_t>(kCacheLine, 2 * kBlockTokens * sizeof(W));

    // scores [rows][tokens of the span] = queries times keys; a few rows take two blocks at a time, as panels.
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

    static void advance(const Rows<float>& rows, const Span<W>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        const SpanScales* scales = gather_scales(span, tokens, scratch);
        score(rows, span, tokens.column());
        for (int r = 0; r < rows.count; r++) fold_row(rows, r, tokens, scales);
        add_values(rows, span, tokens.column(), tokens.to - tokens.from);
    }
};

}  // namespace penstock
