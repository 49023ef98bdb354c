// Products of weights in floating point by vectors: see gemm.h.
#include "gemms.h"

namespace penstock {

// Calls function with a null pointer of what the weights of a linear are read as.
template <class Function>
auto with_weights(const Linear& linear, Function function) {
#if PENSTOCK_PAIRS
    if (linear.form == Form::bf16) return function(static_cast<BFloatPair*>(nullptr));
#endif
    return with_type(linear.type, function);
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

void multiply_floats(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                     const void* ahead) {
    with_weights(linear, [&](auto* w) {
        using W = std::remove_pointer_t<decltype(w)>;
        const size_t stride = x.stride / sizeof(Activation<W>);
        multiply_floats<W>(linear, panel, panels, x.row<Activation<W>>(0), stride, rows, sums, ahead);
    });
}

}  // namespace penstock
