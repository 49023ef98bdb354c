// Products by tiles: rows of bfloat16 or int8 activations times panels of weights.
//
// Sums of bfloat16 are float32 in the tiles' own order (tiles.h), ascending over k in steps of 32, whatever the rows;
// sums of int8 are exact.
#pragma once

#include "activations.h"
#include "gemm.h"

#if PENSTOCK_TILES

namespace penstock {


struct TileStrides {
    size_t a;        // bytes between rows of activations
    size_t b_panel;  // bytes between panels of weights
    size_t c_panel;  // sums between panels of sums
    int step;        // bytes of a row of A in a step: 64 or 32
};

template <bool kInt8, int C, int A, int B>
PENSTOCK_INLINE void tile_dot() {
    if constexpr (kInt8)
        tile_dot_int8<C, A, B>();
    else
        tile_dot_bf16<C, A, B>();
}

// Rows x Panels tiles of sums, [panels][rows of tiles][16][16] in memory: one row of tiles and up to four panels, or two
// and two. A goes through tiles 4 and 5, B through 6 and 7.
template <bool kInt8, int Rows, int Panels>
struct TileGrid {
    static PENSTOCK_INLINE void clear() {
        each([](auto r, auto p) __attribute__((always_inline)) { tile_zero<r * Panels + p>(); });
    }

    static PENSTOCK_INLINE void load(const char* sums, const TileStrides& by) {
        each([&](auto r, auto p) __attribute__((always_inline)) {
            tile_load<r * Panels + p>(sums + place(r, p, by), kTileBytes);
        });
    }

    static PENSTOCK_INLINE void store(char* sums, const TileStrides& by) {
        each([&](auto r, auto p) __attribute__((always_inline)) {
            tile_store<r * Panels + p>(sums + place(r, p, by), kTileBytes);
        });
    }

    // Adds the products of some steps of k; beside(step) is what else is done in a step. kStreamed: the rows of B stay in the
    // first-level cache, those of A pass through.
    template <bool kStreamed = false, class Beside>
    static PENSTOCK_INLINE void add(const char* a, const char* b, int steps, const TileStrides& by,
                                    const Beside& beside) {
        const size_t a_stride = by.a, b_panel = by.b_panel, a_step = by.step, b_step = a_step * kPanel;
        for (int s = 0; s < steps; s++, a += a_step, b += b_step) {
            unrolled<Rows>(PENSTOCK_EACH(r) {
                const char* from = a + r * kTileHeight * a_stride;
                kStreamed ? tile_load_streamed<4 + r>(from, a_stride) : tile_load<4 + r>(from, a_stride);
            });
            unrolled<Panels>(PENSTOCK_EACH(p) {
                constexpr int kB = 6 + p % 2;
                tile_load<kB>(b + p * b_panel, kTileBytes);
                unrolled<Rows>(PENSTOCK_EACH(r) { tile_dot<kInt8, r * Panels + p, 4 + r, kB>(); });
            });
            beside(s);
        }
    }

   private:
    template <class Function>
    static PENSTOCK_INLINE void each(const Function& function) {
        unrolled<Rows>(PENSTOCK_EACH(r) { unrolled<Panels>(PENSTOCK_EACH(p) { function(r, p); }); });
    }

    static PENSTOCK_INLINE size_t place(int r, int p, const TileStrides& by) {
        return (p * by.c_panel + r * kTileHeight * kPanel) * sizeof(float);
    }
};

// Calls function with a grid of two rows of tiles, or of one, and of as many panels as it takes; returns how many.
template <bool kInt8, class Function>
PENSTOCK_INLINE int with_grid(int row_tiles, int panels, const Function& function) {
    if (row_tiles >= 2) {
        if (panels >= 2) return function(TileGrid<kInt8, 2, 2>()), 2;
        return function(TileGrid<kInt8, 2, 1>()), 1;
    }
    if (panels >= 4) return function(TileGrid<kInt8, 1, 4>()), 4;
    if (panels >= 2) return function(TileGrid<kInt8, 1, 2>()), 2;
    return function(TileGrid<kInt8, 1, 1>()), 1;
}

// Fetches a step of panels that are read once, and so come from memory.
PENSTOCK_INLINE void fetch_streamed(const char* b, int panels, const TileStrides& by) {
    for (int p = 0; p < panels; p++)
        for (int i = 0; i < by.step * kPanel; i += kTileBytes) __builtin_prefetch(b + p * by.b_panel + kStreamAhead + i);
}

// c, or 0 where fresh, + A B over `steps` of k, for as many panels as go at once; returns how many that was.
template <bool kInt8>
int tile_panels(int row_tiles, int panels, const char* a, const char* b, int steps, char* c, const TileStrides& by,
                bool fresh, bool streamed) {
    return with_grid<kInt8>(row_tiles, panels, [&](auto grid) {
        const int fetched = streamed ? std::min(panels, row_tiles >= 2 ? 2 : 4) : 0;
        if (fresh)
            grid.clear();
        else
            grid.load(c, by);
        grid.add(a, b, steps, by, [&](int s) __attribute__((always_inline)) {
            if (streamed) fetch_streamed(b + static_cast<size_t>(s) * by.step * kPanel, fetched, by);
        });
        grid.store(c, by);
    });
}

}  // namespace penstock

#endif  // PENSTOCK_TILES
