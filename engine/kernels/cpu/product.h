// A whole linear applied to rows of activations, cut into chunks for the team.
#pragma once

#include "gemm_integers.h"

namespace penstock {

constexpr int kRowBlock = 96;      // rows per chunk, by vectors
constexpr int kTileRowBlock = 256; // by tiles
constexpr int kChunkPanels = 16;   // at most, per chunk; half as many by tiles

// What the sums of one chunk take: the scratch of a team's worker.
constexpr size_t kSumsBytes = sizeof(float) * kPanel * std::max(kChunkPanels * kRowBlock, kChunkPanels / 2 * kTileRowBlock);

// out [rows][n] = x times the linear, + bias, + residual; of a gated one silu(gate) * up. `out` may be `residual`.
struct Product {
    const Linear* linear;
    Activations x;
    int rows;
    void* out;
    size_t ldo;
    Form out_form;          // float32, or bfloat16 without a residual
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

inline bool by_tiles([[maybe_unused]] const Linear& linear, [[maybe_unused]] int rows) {
#if PENSTOCK_TILES
    return linear.form == Form::bf16 || (linear.form == Form::int8 && rows > kIntegerRows);
#else
    return false;
#endif
}

// Enough chunks that a thread which loses its core leaves the others work, none so small that claiming it shows.
inline Cut cut(const Linear& linear, int rows, int threads) {
    const bool tiles = by_tiles(linear, rows);
    const int unit = linear.gated || tiles ? 2 : 1;
    const int row_chunks = divide_up(rows, tiles ? kTileRowBlock : kRowBlock);
    const int worthwhile = static_cast<int>((16 << 10) / (linear.panel_bytes() * std::min(rows, 4)));
    const int fewest = std::max(rows <= 2 ? 2 : 1, worthwhile);  // a row or two need the sums of two to hide latency
    int panels = linear.panels * row_chunks / (threads * 12) / unit * unit;
    panels = std::max(panels, divide_up(fewest, unit) * unit);
    panels = std::min(panels, tiles ? kChunkPanels / 2 : kChunkPanels);
    const int rows_of_chunk = divide_up(rows, row_chunks);
    return {panels, tiles ? round_up(rows_of_chunk, 32) : rows_of_chunk, divide_up(linear.panels, panels), row_chunks,
            threads};
}

// x * sigmoid(x), from the exponential that cannot overflow.
PENSTOCK_INLINE wide silu(wide x) {
    const wide one = all<wide>(1.0f), e = exp(x < wide{} ? x : -x);
    return x * (x < wide{} ? e : one) / (one + e);
}

// The first `count` of a vector at out[place], with the residual.
PENSTOCK_INLINE void put(const Product& job, size_t place, wide y, int count) {
    if (count >= kWide) {
        if (job.residual) y += load_as<wide>(job.residual + place);
        if (job.out_form == Form::bf16) return store_operands(static_cast<BFloat*>(job.out) + place, y);
        return store(static_cast<float*>(job.out) + place, y);
    }
    for (int i = 0; i < count; i++) {
        const float sum = job.residual ? job.residual[place + i] + y[i] : y[i];
        if (job.out_form == Form::bf16)
            static_cast<BFloat*>(job.out)[place + i] = tile_operand(sum);
        else
            static_cast<float*>(job.out)[place + i] = sum;
    }
}

constexpr int kRowsAhead = 12;

// The lines of a row that will be written lie in the other core's cache, often, and writes wait for one another.
PENSTOCK_INLINE void prefetch_row(const Product& job, size_t place) {
    __builtin_prefetch(static_cast<char*>(job.out) + place * size_of(job.out_form), 1);
}

inline void finish(const Product& job, int panel, int panels, int row, int rows, const float* sums, size_t by_panel) {
    const Linear& linear = *job.linear;
    const int unit = linear.gated ? 2 : 1;
    for (int p = 0; p < panels; p += unit) {
        const int column = (panel + p) / unit * kPanel;
        for (int r = 0; r < rows; r++) {
            prefetch_row(job, static_cast<size_t>(row + r + kRowsAhead) * job.ldo + column);
            for (int j = 0; j < kPanel && column + j < linear.n; j += kWide) {
                const float* at = sums + p * by_panel + r * kPanel + j;
                const float* bias = linear.bias ? linear.bias.get() + (panel + p) * kPanel + j : nullptr;
                const wide scale = all<wide>(job.x.form == Form::int8 ? job.x.scales[row + r] : 1.0f);
                const auto output = [&](const float* sum, const float* added) __attribute__((always_inline)) {
                    const wide y = load_as<wide>(sum) * scale;
                    return added ? y + load_as<wide>(added) : y;
                };
                wide y = output(at, bias);
                if (linear.gated) y = silu(y) * output(at + by_panel, bias ? bias + kPanel : nullptr);
                put(job, static_cast<size_t>(row + r) * job.ldo + column + j, y, linear.n - column - j);
            }
        }
    }
}

// Where the chunk lies that this thread will probably claim next: in this linear, else at the start of the next.
inline const void* guess_next(const Product& job, const Cut& by, int panel) {
    const int next = panel + by.panels * by.ahead;
    if (next < job.linear->panels) return job.linear->panel<char>(next);
    return job.next && job.next->type == job.linear->type ? job.next->panel<char>(0) : job.linear->panel<char>(panel);
}

// One chunk; neighbouring chunks share their weights, which are then still in the cache.
inline void multiply(const Product& job, const Cut& by, uint32_t chunk, float* sums) {
    const Linear& linear = *job.linear;
    const int panel = static_cast<int>(chunk) / by.row_chunks * by.panels;
    const int row = static_cast<int>(chunk) % by.row_chunks * by.rows;
    const int panels = std::min(by.panels, linear.panels - panel);
    const int rows = std::min(by.rows, job.rows - row);
    if (rows <= 0) return;
    const Activations x = job.x.from(row);
    size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
    if (linear.form == Form::int8) {
        if (linear.type == Type::int4)
            multiply_integers<true>(linear, panel, panels, x, rows, sums);
        else
            multiply_integers<false>(linear, panel, panels, x, rows, sums);
#if PENSTOCK_TILES
    } else if (linear.form == Form::bf16) {
        multiply_bfloats(linear, panel, panels, x, rows, sums);
#endif
    } else {
        by_panel = static_cast<size_t>(rows) * kPanel;
        with_weights(linear, [&](auto* w) {
            using W = std::remove_pointer_t<decltype(w)>;
            multiply_floats<W>(linear, panel, panels, x.row<Activation<W>>(0), x.stride / sizeof(Activation<W>), rows,
                               sums, guess_next(job, by, panel));
        });
    }
    finish(job, panel, panels, row, rows, sums, by_panel);
}

// One product of float32 rows as a program of its own; rows are converted first where the linear wants them otherwise.
inline void apply(Team& team, const Linear& linear, const float* x, size_t ldx, int rows, float* out) {
    Prepared prepared;
    Activations activations = floats(x, ldx);
    if (linear.form != Form::f32) {
        prepared.reserve(rows, linear.depth);
        const auto convert = [&](uint32_t r, int) { prepared.convert(linear, static_cast<int>(r), x + r * ldx); };
        run_chunks(team, static_cast<uint32_t>(rows), convert, Kind::prepare);
        activations = prepared.activations(linear.form);
    }
    const Product job{&linear, activations, rows, out, static_cast<size_t>(linear.n), Form::f32, nullptr, nullptr};
    const Cut by = cut(linear, rows, team.size());
    const auto work = [&](uint32_t chunk, int worker) { multiply(job, by, chunk, team.scratch(worker)); };
    run_chunks(team, by.chunks(), work, Kind::head);
}

}  // namespace penstock
