// The matrix products: rows of float32 activations times a packed linear, float32 sums.
//
// The one invariant: every output is a single chain of fused multiply-adds over k, ascending, from 0. Which tile
// computes it, how many rows and panels that tile has, and where k was cut into blocks (the sum then passes through
// memory, exactly) cannot change a bit of it.
#pragma once

#include <type_traits>

#include "pack.h"

namespace penstock {

constexpr int kTileRows = 6;      // 6 x 16 sums, 2 weights and a broadcast: 15 of 16 registers
constexpr int kDepth = 512;       // k per block: keeps the rows of a chunk in the second-level cache
constexpr int kRowBlock = 96;     // rows per chunk
constexpr int kChunkPanels = 16;  // at most, per chunk
constexpr int kStreamAhead = 6144;  // bytes: how far ahead weights that are read only once are fetched

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

// Calls function with the constants 0 to Count - 1. A loop would do if every compiler unrolled it early enough to
// keep the sums in registers; GCC does not.
template <int Count, int At = 0, class Function>
PENSTOCK_INLINE void unrolled(const Function& function) {
    if constexpr (At < Count) {
        function(std::integral_constant<int, At>());
        unrolled<Count, At + 1>(function);
    }
}

#define PENSTOCK_EACH(name) [&](auto name) __attribute__((always_inline))

// Rows x (Panels * Vectors * 8) sums over `depth` steps of k, added to c, or set where fresh.
template <class W, int Rows, int Panels, int Vectors>
PENSTOCK_INLINE void tile(const float* a, const Pieces<W>& pieces, int depth, float* c, const Strides& by,
                          bool fresh) {
    constexpr int kColumns = Panels * Vectors;
    v8 sums[Rows][kColumns];
    const auto place = [&](int r, int j) __attribute__((always_inline)) {
        return c + r * by.c + (j / Vectors) * by.c_panel + (j % Vectors) * kLanes;
    };
    unrolled<Rows>(PENSTOCK_EACH(r) {
        unrolled<kColumns>(PENSTOCK_EACH(j) { sums[r][j] = fresh ? splat(0.0f) : load(place(r, j)); });
    });
    for (int from = 0, piece = 0; from < depth; from += pieces.length, piece++) {
        const W* w = pieces.starts[piece] + pieces.offset;
        const char* ahead = pieces.ahead[piece] + pieces.ahead_offset;
        const int to = std::min(depth, from + pieces.length);
        for (int k = from; k < to; k++) {
            const auto weight = [&](int j) __attribute__((always_inline)) {
                return load(w + (j / Vectors) * by.w_panel + (j % Vectors) * kLanes);
            };
            const auto value = [&](int r) __attribute__((always_inline)) { return splat(a[r * by.a + k]); };
            if constexpr (Rows < kColumns) {  // the fewer operands stay in registers, the others pass through
                v8 x[Rows];
                unrolled<Rows>(PENSTOCK_EACH(r) { x[r] = value(r); });
                unrolled<kColumns>(PENSTOCK_EACH(j) {
                    const v8 y = weight(j);
                    unrolled<Rows>(PENSTOCK_EACH(r) { sums[r][j] = fma(x[r], y, sums[r][j]); });
                });
            } else {
                v8 y[kColumns];
                unrolled<kColumns>(PENSTOCK_EACH(j) { y[j] = weight(j); });
                unrolled<Rows>(PENSTOCK_EACH(r) {
                    const v8 x = value(r);
                    unrolled<kColumns>(PENSTOCK_EACH(j) { sums[r][j] = fma(x, y[j], sums[r][j]); });
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

// `rows` (1 to 6) rows of as many panels as go into the registers at once; returns how many panels that was.
template <class W, int Vectors>
int tile_rows(int rows, int panels, const float* a, const Pieces<W>& w, int depth, float* c,
              const Strides& by, bool fresh) {
    switch (rows) {
        case 1:
            if (panels >= 4) return tile<W, 1, 4, Vectors>(a, w, depth, c, by, fresh), 4;
            if (panels >= 2) return tile<W, 1, 2, Vectors>(a, w, depth, c, by, fresh), 2;
            return tile<W, 1, 1, Vectors>(a, w, depth, c, by, fresh), 1;
        case 2:
            if (panels >= 2) return tile<W, 2, 2, Vectors>(a, w, depth, c, by, fresh), 2;
            return tile<W, 2, 1, Vectors>(a, w, depth, c, by, fresh), 1;
        case 3:
            if (panels >= 2) return tile<W, 3, 2, Vectors>(a, w, depth, c, by, fresh), 2;
            return tile<W, 3, 1, Vectors>(a, w, depth, c, by, fresh), 1;
        case 4:
            return tile<W, 4, 1, Vectors>(a, w, depth, c, by, fresh), 1;
        case 5:
            return tile<W, 5, 1, Vectors>(a, w, depth, c, by, fresh), 1;
        default:
            return tile<W, 6, 1, Vectors>(a, w, depth, c, by, fresh), 1;
    }
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
void product(const Linear& linear, int panel, int panels, const float* a, size_t lda, int rows, float* sums,
             const W* ahead) {
    const int k = linear.k, tiles = divide_up(rows, kTileRows), depth_of_block = tiles == 1 ? k : kDepth;
    const size_t by_panel = static_cast<size_t>(k) * kPanel;
    const Strides by{lda, kPanel, by_panel, kPanel, static_cast<size_t>(rows) * kPanel};
    for (int from = 0; from < k; from += depth_of_block) {
        const int depth = std::min(depth_of_block, k - from);
        for (int p = 0; p < panels;) {
            const size_t at = p * by_panel + static_cast<size_t>(from) * kPanel;
            const W* w = linear.panel<W>(panel) + at;
            const char* fetched = reinterpret_cast<const char*>(tiles == 1 ? w : ahead + at);
            if (tiles == 1) fetched += kStreamAhead;
            int done = 1, turn = 0;
            for_tiles(rows, [&](int start, int height) {
                const size_t share = static_cast<size_t>(depth) * kPanel * sizeof(W) / tiles;
                const size_t speed = (kPanel * sizeof(W) + tiles - 1) / tiles;
                const Pieces<W> pieces{&w, 0, depth, &fetched, turn++ * share, speed};
                done = tile_rows<W, 2>(height, tiles == 1 ? panels - p : 1, a + start * lda + from, pieces, depth,
                                       sums + p * by.c_panel + start * kPanel, by, from == 0);
            });
            p += done;
        }
    }
}

// ---- a whole linear, cut into chunks ---------------------------------------------------------------------------

// out [rows][n] = x times the linear, + bias, + residual; of a gated one silu(gate) * up. `out` may be `residual`.
struct Product {
    const Linear* linear;
    const float* x;
    size_t ldx;
    int rows;
    float* out;
    size_t ldo;
    const float* residual;  // with out's stride, or null
    const Linear* next;     // the linear of the next product, or null
};

struct Cut {
    int panels;  // per chunk
    int rows;    // per chunk
    int panel_chunks;
    int row_chunks;
    int ahead;  // chunks of panels from the one in work to the same thread's next

    uint32_t chunks() const { return static_cast<uint32_t>(panel_chunks * row_chunks); }
};

// Enough chunks that a thread which loses its core leaves the others work, none so small that claiming it shows.
inline Cut cut(const Linear& linear, int rows, int threads) {
    const int unit = linear.gated ? 2 : 1;
    const int row_chunks = divide_up(rows, kRowBlock);
    const size_t panel_bytes = static_cast<size_t>(linear.k) * kPanel * size_of(linear.type);
    const int worthwhile = static_cast<int>((16 << 10) / (panel_bytes * std::min(rows, 4)));
    const int fewest = std::max(rows <= 2 ? 2 : 1, worthwhile);  // a row or two need the sums of two to hide latency
    int panels = linear.panels * row_chunks / (threads * 12) / unit * unit;
    panels = std::clamp(divide_up(std::max(panels, fewest), unit) * unit, unit, kChunkPanels);
    return {panels, divide_up(rows, row_chunks), divide_up(linear.panels, panels), row_chunks, threads};
}

// x * sigmoid(x), from the exponential that cannot overflow.
PENSTOCK_INLINE v8 silu(v8 x) {
    const v8 one = splat(1.0f), zero = splat(0.0f), e = exp(x < zero ? x : -x);
    return x * (x < zero ? e : one) / (one + e);
}

inline void finish(const Product& job, int panel, int panels, int row, int rows, const float* sums) {
    const Linear& linear = *job.linear;
    const size_t by_panel = static_cast<size_t>(rows) * kPanel;
    const int unit = linear.gated ? 2 : 1;
    for (int p = 0; p < panels; p += unit) {
        const int column = (panel + p) / unit * kPanel;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < kPanel; j += kLanes) {
                const int count = linear.n - column - j;
                if (count <= 0) break;
                const float* at = sums + p * by_panel + r * kPanel + j;
                const float* bias = linear.bias ? linear.bias.get() + (panel + p) * kPanel + j : nullptr;
                v8 y = load(at);
                if (bias) y += load(bias);
                if (linear.gated) {
                    v8 up = load(at + by_panel);
                    if (bias) up += load(bias + kPanel);
                    y = silu(y) * up;
                }
                const size_t place = static_cast<size_t>(row + r) * job.ldo + column + j;
                if (job.residual) y += load_first(job.residual + place, count);
                store_first(job.out + place, y, count);
            }
    }
}

// What the sums of one chunk take: the scratch of a team's worker.
constexpr size_t kSumsBytes = sizeof(float) * kChunkPanels * kRowBlock * kPanel;

// Where the chunk lies that this thread will probably claim next: in this linear, else at the start of the next.
template <class W>
const W* guess_next(const Product& job, const Cut& by, int panel) {
    const int next = panel + by.panels * by.ahead;
    if (next < job.linear->panels) return job.linear->panel<W>(next);
    return job.next ? job.next->panel<W>(0) : job.linear->panel<W>(panel);
}

// One chunk; neighbouring chunks share their weights, which are then still in the cache.
inline void multiply(const Product& job, const Cut& by, uint32_t chunk, float* sums) {
    const int panel = static_cast<int>(chunk) / by.row_chunks * by.panels;
    const int row = static_cast<int>(chunk) % by.row_chunks * by.rows;
    const int panels = std::min(by.panels, job.linear->panels - panel);
    const int rows = std::min(by.rows, job.rows - row);
    if (rows <= 0) return;
    with_type(job.linear->type, [&](auto* w) {
        using W = std::remove_pointer_t<decltype(w)>;
        product<W>(*job.linear, panel, panels, job.x + static_cast<size_t>(row) * job.ldx, job.ldx, rows, sums,
                   guess_next<W>(job, by, panel));
    });
    finish(job, panel, panels, row, rows, sums);
}

// One product as a program of its own.
inline void apply(Team& team, const Product& job) {
    const Cut by = cut(*job.linear, job.rows, team.size());
    const auto work = [&](uint32_t chunk, int worker) { multiply(job, by, chunk, team.scratch(worker)); };
    run_chunks(team, by.chunks(), work, Kind::head);
}

}  // namespace penstock
