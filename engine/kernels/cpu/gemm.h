// Products by vectors: rows of activations times panels of floating-point weights.
//
// The one invariant: every output is a single chain of fused multiply-adds over k, ascending, from 0; of pairs, two
// to a step (pairs.h). Which tile computes it, how many rows and panels that tile has, how wide a register is, and
// where k was cut into blocks (the sum then passes through memory, exactly) cannot change a bit of it.
#pragma once

#include <type_traits>

#include "panels.h"

namespace penstock {

// Of eight floats: 6 x 16 sums, 2 weights and a broadcast are 15 of 16 registers. Of sixteen: 6 x 64 sums, 4 weights
// and a broadcast, 29 of 32; so are 6 x 16 sums of four floats.
constexpr int kTileRows = 6;
constexpr int kParts = kPanel / kWide;  // vectors of 16 outputs
constexpr int kTilePanels = kWide == 16 ? 4 : 1;  // of a tile with several rows
constexpr int kDepth = 512;         // k per block: keeps the rows of a chunk in the second-level cache
constexpr int kStreamAhead = 6144;  // bytes: how far ahead weights that are read only once are fetched

// What rows of activations consist of beside weights that are read as W. Of pairs, a step of k is a pair.
template <class W>
using Activation = std::conditional_t<std::is_same_v<W, BFloatPair>, BFloatPair, float>;

// Calls function with a null pointer of what the weights of a linear are read as.
template <class Function>
auto with_weights(const Linear& linear, Function function) {
#if PENSTOCK_PAIRS
    if (linear.form == Form::bf16) return function(static_cast<BFloatPair*>(nullptr));
#endif
    return with_type(linear.type, function);
}

template <class W, class V>
PENSTOCK_INLINE V multiply_add(V x, V y, V sum) {
    if constexpr (std::is_same_v<W, BFloatPair>)
        return dot(x, y, sum);
    else
        return fma(x, y, sum);
}

struct Strides {
    size_t a;        // between rows of activations
    size_t w;        // between steps of k in the weights
    size_t w_panel;  // between panels of weights
    size_t c;        // between rows of sums
    size_t c_panel;  // between panels of sums
};

// The weights of a tile may lie in pieces, each `length` steps of k (the last one maybe fewer).
template <class W>
struct Pieces {
    const W* const* starts;
    size_t offset;  // into each piece
    int length;
    // Per piece, what will be needed later: fetched on the way, so many bytes per step of k. In a burst the fetches
    // would hold up the loads; one a step hides behind the arithmetic.
    const char* const* ahead;
    size_t ahead_offset;
    size_t ahead_speed;
};

// Rows x (Panels * Columns) sums over `depth` steps of k, added to c, or set where fresh.
template <class W, int Rows, int Panels, int Columns>
PENSTOCK_INLINE void tile(const Activation<W>* a, const Pieces<W>& pieces, int depth, float* c, const Strides& by,
                          bool fresh) {
    typedef std::conditional_t<Columns % kWide == 0, wide, v8> V;
    constexpr int kWidth = sizeof(V) / sizeof(float), kVectors = Columns / kWidth, kColumns = Panels * kVectors;
    V sums[Rows][kColumns];
    const auto place = [&](int r, int j) __attribute__((always_inline)) {
        return c + r * by.c + (j / kVectors) * by.c_panel + (j % kVectors) * kWidth;
    };
    unrolled<Rows>(PENSTOCK_EACH(r) {
        unrolled<kColumns>(PENSTOCK_EACH(j) { sums[r][j] = fresh ? V{} : load_as<V>(place(r, j)); });
    });
    for (int from = 0, piece = 0; from < depth; from += pieces.length, piece++) {
        const W* w = pieces.starts[piece] + pieces.offset;
        const char* ahead = pieces.ahead[piece] + pieces.ahead_offset;
        const int to = std::min(depth, from + pieces.length);
        for (int k = from; k < to; k++) {
            const auto weight = [&](int j) __attribute__((always_inline)) {
                return load_as<V>(w + (j / kVectors) * by.w_panel + (j % kVectors) * kWidth);
            };
            const auto value = [&](int r) __attribute__((always_inline)) { return all<V>(a[r * by.a + k]); };
            if constexpr (Rows < kColumns) {  // the fewer operands stay in registers, the others pass through
                V x[Rows];
                unrolled<Rows>(PENSTOCK_EACH(r) { x[r] = value(r); });
                unrolled<kColumns>(PENSTOCK_EACH(j) {
                    const V y = weight(j);
                    unrolled<Rows>(PENSTOCK_EACH(r) { sums[r][j] = multiply_add<W>(x[r], y, sums[r][j]); });
                });
            } else {
                V y[kColumns];
                unrolled<kColumns>(PENSTOCK_EACH(j) { y[j] = weight(j); });
                unrolled<Rows>(PENSTOCK_EACH(r) {
                    const V x = value(r);
                    unrolled<kColumns>(PENSTOCK_EACH(j) { sums[r][j] = multiply_add<W>(x, y[j], sums[r][j]); });
                });
            }
            w += by.w;
            __builtin_prefetch(ahead);
            ahead += pieces.ahead_speed;
        }
    }
    unrolled<Rows>(PENSTOCK_EACH(r) {
        unrolled<kColumns>(PENSTOCK_EACH(j) { store(place(r, j), sums[r][j]); });
    });
}

// How many panels of 16 columns go into the registers at once, beside so many rows.
constexpr int most_panels(int rows) { return kWide == 16 || rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// `Rows` rows of as many panels as go into the registers at once; returns how many panels that was.
template <class W, int Rows, int Columns, int Panels = most_panels(Rows)>
PENSTOCK_INLINE int tile_panels(int panels, const Activation<W>* a, const Pieces<W>& w, int depth, float* c,
                                const Strides& by, bool fresh) {
    if constexpr (Panels > 1)
        if (panels < Panels) return tile_panels<W, Rows, Columns, Panels / 2>(panels, a, w, depth, c, by, fresh);
    tile<W, Rows, Panels, Columns>(a, w, depth, c, by, fresh);
    return Panels;
}

// Calls function with the constant `count`, which is 1 to Most.
template <int Most, class Function>
PENSTOCK_INLINE auto with_count(int count, const Function& function) {
    if constexpr (Most > 1)
        if (count < Most) return with_count<Most - 1>(count, function);
    return function(std::integral_constant<int, Most>());
}

// The same for `rows` from 1 to 6.
template <class W, int Columns>
int tile_rows(int rows, int panels, const Activation<W>* a, const Pieces<W>& w, int depth, float* c,
              const Strides& by, bool fresh) {
    return with_count<kTileRows>(rows, PENSTOCK_EACH(count) {
        return tile_panels<W, count(), Columns>(panels, a, w, depth, c, by, fresh);
    });
}

// Calls function(first row, rows) for tiles of nearly equal height.
template <class Function>
PENSTOCK_INLINE void for_tiles(int rows, Function function) {
    const int tiles = divide_up(rows, kTileRows);
    for (int i = 0, start = 0; i < tiles; i++) {
        const int height = (rows - start + tiles - i - 1) / (tiles - i);
        function(start, height);
        start += height;
    }
}

// sums [panels][rows][16] = a [rows][k] times the panels. With several tiles the panels at `ahead`, which come next,
// are fetched meanwhile; with one this would be too much at once, so it is what follows shortly.
template <class W>
void multiply_floats(const Linear& linear, int panel, int panels, const Activation<W>* a, size_t lda, int rows,
                     float* sums, const void* ahead) {
    const int k = linear.depth / (std::is_same_v<W, BFloatPair> ? 2 : 1);  // steps
    const int tiles = divide_up(rows, kTileRows), depth_of_block = tiles == 1 ? k : kDepth;
    const size_t by_panel = static_cast<size_t>(k) * kPanel;
    const Strides by{lda, kPanel, by_panel, kPanel, static_cast<size_t>(rows) * kPanel};
    for (int from = 0; from < k; from += depth_of_block) {
        const int depth = std::min(depth_of_block, k - from);
        for (int p = 0; p < panels;) {
            const size_t at = p * by_panel + static_cast<size_t>(from) * kPanel;
            const int together = std::min(panels - p, tiles == 1 ? panels : kTilePanels);
            const W* w = linear.panel<W>(panel) + at;
            const char* fetched = reinterpret_cast<const char*>(tiles == 1 ? w : static_cast<const W*>(ahead) + at);
            if (tiles == 1) fetched += kStreamAhead;
            int done = 1, turn = 0;
            for_tiles(rows, [&](int start, int height) {
                const size_t share = static_cast<size_t>(depth) * kPanel * sizeof(W) * together / tiles;
                const size_t speed = (kPanel * sizeof(W) * together + tiles - 1) / tiles;
                const Pieces<W> pieces{&w, 0, depth, &fetched, turn++ * share, tiles == 1 ? kPanel * sizeof(W) : speed};
                done = tile_rows<W, kPanel>(height, together, a + start * lda + from, pieces, depth,
                                            sums + p * by.c_panel + start * kPanel, by, from == 0);
            });
            p += done;
        }
    }
}

}  // namespace penstock
