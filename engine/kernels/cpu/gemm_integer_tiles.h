// Products of integers by tiles, for many rows: see gemm_integers.h. One or the other multiplies.
#pragma once

#include "gemm_integers.h"

namespace penstock {

#if PENSTOCK_TILES

// Steps of a half and a quarter of the depth, for groups that are no multiple of a whole one.
constexpr TileShapes kHalfTiles = {1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};
constexpr TileShapes kQuarterTiles = {1, 0, {}, {64, 64, 64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 16, 16, 4, 4}};

constexpr int kTileSums = kTileHeight * kPanel;
constexpr int kGroupsAtOnce = 4;   // each has a tile of sums
constexpr int kPanelsAtOnce = 2;   // weights of so many panels, and
constexpr int kDepthAtOnce = 256;  // of so many k, if they are in groups, stay in the first-level cache for all rows

typedef GroupFactors<kPanelsAtOnce, kDepthAtOnce / kLeastGroup> TileFactors;

// Adds the groups [from, to) to the first Rows rows of a tile of sums. What the tiles find passes through memory to the
// sums, which are in registers.
template <int Rows>
void add_tile_groups(const Linear& linear, const TileFactors& factors, int panel, int from, int to, const Activations& x,
                     const char* b, int step, bool streamed, float* sums) {
    alignas(64) int32_t found[kGroupsAtOnce * kTileSums];
    wide total[Rows * kParts];
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { total[i] = from == 0 ? wide{} : load_as<wide>(sums + i * kWide); });
    const size_t b_step = static_cast<size_t>(step) * kPanel;
    const char* a = x.row<char>(0) + from * linear.group;
    for (int g = from; g < to; g += kGroupsAtOnce) {
        const int some = std::min(kGroupsAtOnce, to - g);
        unrolled<kGroupsAtOnce>(PENSTOCK_EACH(j) {
            if (j >= some) return;
            constexpr int kA = 4 + j % 2, kB = 6 + j % 2;
            tile_zero<j>();
            for (int k = 0; k < linear.group; k += step, a += step, b += b_step) {
                if (streamed)
                    for (size_t i = 0; i < b_step; i += 64) __builtin_prefetch(b + kStreamAhead + i);
                tile_load<kA>(a, x.stride);
                tile_load<kB>(b, 64);
                tile_dot_int8<j, kA, kB>();
            }
            tile_store<j>(found + j * kTileSums, kPanel * sizeof(int32_t));
        });
        for (int j = 0; j < some; j++) {
            const Factors by = factors.of(panel, g + j);
            unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
                total[i] = add_scaled(load_ints(found + j * kTileSums + i * kWide), by, i % kParts, total[i]);
            });
            if (!by.offsets) continue;
            const float* activations = x.sums + (g + j) * x.sums_stride;
            unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
                total[i] = add_offset(activations[i / kParts], by, i % kParts, total[i]);
            });
        }
    }
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { store(sums + i * kWide, total[i]); });
}

// sums [panels][rows, padded to tiles][16] by tiles. Of the weights, no more are taken at a time than the first-level
// cache has room for.
inline void integers_by_tiles(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                              size_t by_panel) {
    alignas(64) uint8_t unpacked[kPanelsAtOnce * kMostUnpacked * kPanel];
    const bool unpacks = linear.type != Type::int8;
    const int length = linear.group_depth(), step = length % 64 == 0 ? 64 : length % 32 == 0 ? 32 : 16;
    const bool is_whole = linear.groups() == 1;
    const int at_once = is_whole ? kMostUnpacked : std::max(1, kDepthAtOnce / length) * length;
    const size_t b_panel = unpacks ? static_cast<size_t>(at_once) * kPanel : linear.panel_bytes();
    const TileStrides by{x.stride, b_panel, by_panel, step};
    const auto add = rows > kTileHeight / 2 ? add_tile_groups<kTileHeight> : add_tile_groups<kTileHeight / 2>;
    use_tiles(step == 64 ? kWholeTiles : step == 32 ? kHalfTiles : kQuarterTiles);
    for (int p = 0; p < panels; p += kPanelsAtOnce) {
        const int some = std::min(kPanelsAtOnce, panels - p);
        TileFactors factors(linear, panel + p);
        for (int k = 0; k < linear.depth; k += at_once) {
            const int count = std::min(at_once, linear.depth - k);
            const char* b = linear.panel<char>(panel + p) + static_cast<size_t>(k) * kPanel;
            if (!is_whole) factors.prepare(k / length, (k + count) / length);
            if (unpacks) {
                for (int q = 0; q < some; q++)
                    unpack_weights(linear, panel + p + q, k, count, linear.lowest(), unpacked + q * b_panel);
                b = reinterpret_cast<const char*>(unpacked);
            }
            for (int t = 0; t < rows; t += is_whole ? 2 * kTileHeight : kTileHeight) {
                float* out = sums + p * by_panel + t * kPanel;
                const bool streamed = !unpacks && t == 0;
                if (is_whole)
                    tile_panels<true>(rows - t > kTileHeight ? 2 : 1, some, x.row<char>(t) + k, b, count / step,
                                      reinterpret_cast<char*>(out), by, k == 0, streamed);
                else
                    for (int q = 0; q < some; q++)
                        add(linear, factors, q, k / length, (k + count) / length, x.from(t), b + q * b_panel, step,
                            streamed, out + q * by_panel);
            }
        }
        if (is_whole)
            for (int q = p; q < p + some; q++) fold_rows(linear, panel + q, x, rows, nullptr, sums + q * by_panel);
    }
}

#endif

// sums [panels][rows, padded to tiles][16] = rows of int8 times the panels.
inline void multiply_integers(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums) {
    const size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
#if PENSTOCK_TILES
    if (rows > kIntegerRows) return integers_by_tiles(linear, panel, panels, x, rows, sums, by_panel);
#endif
    multiply_by_vectors(linear, panel, panels, x, rows, sums, by_panel);
}

}  // namespace penstock
