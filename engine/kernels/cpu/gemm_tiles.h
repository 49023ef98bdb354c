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

// Calls function with the place of each of the Rows x Panels tiles of sums.
template <int Rows, int Panels, class Function>
PENSTOCK_INLINE void each_sum(const Function& function) {
    unrolled<Rows>(PENSTOCK_EACH(r) { unrolled<Panels>(PENSTOCK_EACH(p) { function(r, p); }); });
}

// Rows x Panels tiles of sums over `steps` of k, added to c, or set where fresh. One row of tiles and up to four
// panels, or two and two: A in tiles 4 and 5, B in 6 and 7. What is streamed from memory is fetched ahead.
template <bool kInt8, int Rows, int Panels>
void tile_block(const char* a, const char* b, int steps, char* c, const TileStrides& by, bool fresh, bool streamed) {
    const auto sums = [&](auto r, auto p) { return c + (p * by.c_panel + r * kTileHeight * kPanel) * sizeof(float); };
    each_sum<Rows, Panels>([&](auto r, auto p) __attribute__((always_inline)) {
        if (fresh)
            tile_zero<r * Panels + p>();
        else
            tile_load<r * Panels + p>(sums(r, p), kPanel * sizeof(float));
    });
    const size_t b_step = static_cast<size_t>(by.step) * kPanel;
    for (int s = 0; s < steps; s++, a += by.step, b += b_step) {
        if (streamed)
            unrolled<Panels>(PENSTOCK_EACH(p) {
                for (size_t i = 0; i < b_step; i += 64) __builtin_prefetch(b + p * by.b_panel + kStreamAhead + i);
            });
        unrolled<Rows>(PENSTOCK_EACH(r) { tile_load<4 + r>(a + r * kTileHeight * by.a, by.a); });
        unrolled<Panels>(PENSTOCK_EACH(p) {
            constexpr int kB = 6 + p % 2;
            tile_load<kB>(b + p * by.b_panel, 64);
            unrolled<Rows>(PENSTOCK_EACH(r) { tile_dot<kInt8, r * Panels + p, 4 + r, kB>(); });
        });
    }
    each_sum<Rows, Panels>([&](auto r, auto p) __attribute__((always_inline)) { tile_store<r * Panels + p>(sums(r, p), kPanel * sizeof(float)); });
}

// As many panels as one call takes beside so many rows of tiles; returns how many that was.
template <bool kInt8>
int tile_panels(int row_tiles, int panels, const char* a, const char* b, int steps, char* c, const TileStrides& by,
                bool fresh, bool streamed) {
    if (row_tiles >= 2) {
        if (panels >= 2) return tile_block<kInt8, 2, 2>(a, b, steps, c, by, fresh, streamed), 2;
        return tile_block<kInt8, 2, 1>(a, b, steps, c, by, fresh, streamed), 1;
    }
    if (panels >= 4) return tile_block<kInt8, 1, 4>(a, b, steps, c, by, fresh, streamed), 4;
    if (panels >= 2) return tile_block<kInt8, 1, 2>(a, b, steps, c, by, fresh, streamed), 2;
    return tile_block<kInt8, 1, 1>(a, b, steps, c, by, fresh, streamed), 1;
}

// sums [panels][rows, padded to tiles][16] = rows of bfloat16 times the panels.
inline void multiply_bfloats(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums) {
    constexpr int kSteps = kDepth / 32;
    use_tiles(kWholeTiles);
    const int steps = linear.depth / 32, row_tiles = divide_up(rows, kTileHeight);
    const size_t by_panel = static_cast<size_t>(row_tiles) * kTileHeight * kPanel;
    const TileStrides by{x.stride, linear.panel_bytes(), by_panel, 64};
    const int together = row_tiles == 1 ? 4 : 2, steps_of_block = row_tiles <= 2 ? steps : kSteps;
    for (int p = 0; p < panels; p += together)
        for (int from = 0; from < steps; from += steps_of_block) {
            const int count = std::min(steps_of_block, steps - from);
            for (int t = 0; t < row_tiles; t += 2)
                for (int q = p; q < std::min(panels, p + together);)
                    q += tile_panels<false>(row_tiles - t, std::min(panels, p + together) - q,
                                            x.row<char>(t * kTileHeight) + from * 64,
                                            linear.panel<char>(panel + q) + from * 1024, count,
                                            reinterpret_cast<char*>(sums + q * by_panel + t * kTileHeight * kPanel),
                                            by, from == 0, t == 0);
        }
}

}  // namespace penstock

#endif  // PENSTOCK_TILES
