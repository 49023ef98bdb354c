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

}  // namespace penstock
