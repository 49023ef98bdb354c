// Products of integers by tiles, for many rows: see gemm_integers.h. One or the other multiplies.
#include "gemm_integers.h"
#include "gemms.h"

namespace penstock {

#if PENSTOCK_TILES

// Steps of a half and a quarter of the depth, for groups that are no multiple of a whole one.
constexpr TileShapes kHalfTiles = {1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};
constexpr TileShapes kQuarterTiles = {1, 0, {}, {64, 64, 64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 16, 16, 4, 4}};

constexpr int kTileSums = kTileHeight * kPanel;
constexpr int kGroupsAtOnce = 4;   // each has a tile of sums
constexpr int kGroupsBehind = 8;   // are multiplied before vectors read what the tiles found: see add_tile_groups
constexpr int kPanelsAtOnce = 2;   // weights of so many panels, and
constexpr int kDepthAtOnce = 256;  // of so many k, if they are in groups, stay in the first-level cache for all rows

typedef GroupFactors<kPanelsAtOnce, kDepthAtOnce / kLeastGroup> TileFactors;

// The groups [from, to) of the panels of the tiles of rows, one after another.
struct GroupPlace {
    int from, to, panels;
    int row = 0, panel = 0, group = from;

    bool is_first() const { return group == from; }
    bool is_last() const { return group == to - 1; }

    void move_on() {
        if (++group < to) return;
        group = from;
        if (++panel < panels) return;
        panel = 0;
        row += kTileHeight;
    }
};

template <int T>
PENSTOCK_INLINE void multiply_group(const char* a, size_t a_stride, const char* b, int length, int step, bool streamed) {
    constexpr int kA = 4 + T % 2, kB = 6 + T % 2;
    const size_t b_step = static_cast<size_t>(step) * kPanel;
    tile_zero<T>();
    for (int k = 0; k < length; k += step, a += step, b += b_step) {
        if (streamed)
            for (size_t i = 0; i < b_step; i += 64) __builtin_prefetch(b + kStreamAhead + i);
        tile_load<kA>(a, a_stride);
        tile_load<kB>(b, 64);
        tile_dot_int8<T, kA, kB>();
    }
}

// Adds what the tiles found of a group to the sums of Rows rows, which x begins with.
template <int Rows>
PENSTOCK_INLINE void fold_group(const int32_t* found, const Factors& by, const Activations& x, int group,
                                wide (&total)[Rows * kParts]) {
    const float *scales = x.group_scales + group * x.by_group, *activations = x.sums + group * x.by_group;
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
        total[i] = add_scaled(load_ints(found + i * kWide), scales[i / kParts], by, i % kParts, total[i]);
    });
    if (!by.offsets) return;
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
        total[i] = add_offset(activations[i / kParts] * scales[i / kParts], by, i % kParts, total[i]);
    });
}

// Adds the groups [from, to) of some panels to sums [panels][by_panel / 16][16], of tiles of which Rows rows count. What the
// tiles find passes through memory to sums that are in registers. A vector that is loaded while the store of its tile is on
// its way waits for the store's end, long. So the vectors fold a group when the tiles have multiplied eight more: their
// stores fill the store buffer, and the group's has left it.
template <int Rows>
void add_tile_groups(const Linear& linear, const TileFactors& factors, int panels, int from, int to, const Activations& x,
                     int rows, const char* b, const TileStrides& by, bool streamed, float* sums) {
    alignas(64) int32_t found[kGroupsBehind * kTileSums];
    wide total[Rows * kParts] = {};
    GroupPlace multiplied{from, to, panels}, folded = multiplied;
    const int count = divide_up(rows, kTileHeight) * panels * (to - from);
    for (int n = 0; n < count + kGroupsBehind; n += kGroupsAtOnce)
        unrolled<kGroupsAtOnce>(PENSTOCK_EACH(j) {
            int32_t* place = found + (n + j) % kGroupsBehind * kTileSums;
            const bool is_more = n + j < count;
            if (is_more) {
                const char* w = b + multiplied.panel * by.b_panel + (multiplied.group - from) * linear.group * kPanel;
                multiply_group<j>(x.row<char>(multiplied.row) + multiplied.group * linear.group, x.stride, w, linear.group,
                                  by.step, streamed && multiplied.row == 0);
                multiplied.move_on();
            }
            if (n >= kGroupsBehind && n + j < count + kGroupsBehind) {
                float* out = sums + folded.panel * by.c_panel + folded.row * kPanel;
                if (folded.is_first())
                    unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
                        total[i] = from == 0 ? wide{} : load_as<wide>(out + i * kWide);
                    });
                fold_group<Rows>(place, factors.of(folded.panel, folded.group), x.from(folded.row), folded.group, total);
                if (folded.is_last())
                    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { store(out + i * kWide, total[i]); });
                folded.move_on();
            }
            if (is_more) tile_store<j>(place, kPanel * sizeof(int32_t));
        });
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
            float* out = sums + p * by_panel;
            if (!is_whole) add(linear, factors, some, k / length, (k + count) / length, x, rows, b, by, !unpacks, out);
            for (int t = 0; t < rows && is_whole; t += 2 * kTileHeight)
                tile_panels<true>(rows - t > kTileHeight ? 2 : 1, some, x.row<char>(t) + k, b, count / step,
                                  reinterpret_cast<char*>(out + t * kPanel), by, k == 0, !unpacks && t == 0);
        }
        if (is_whole)
            for (int q = p; q < p + some; q++) fold_rows(linear, panel + q, x, rows, nullptr, sums + q * by_panel);
    }
}

#endif

void multiply_integers(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums) {
    const size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
#if PENSTOCK_TILES
    if (rows > kIntegerRows) return integers_by_tiles(linear, panel, panels, x, rows, sums, by_panel);
#endif
    multiply_by_vectors(linear, panel, panels, x, rows, sums, by_panel);
}

}  // namespace penstock
