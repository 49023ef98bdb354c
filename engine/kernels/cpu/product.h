// A whole linear applied to rows of activations, cut into chunks for the team.
#pragma once

#include "gemm_coded.h"
#include "gemm_integer_tiles.h"

namespace penstock {

constexpr int kRowBlock = 96;      // rows per chunk, by vectors
constexpr int kTileRowBlock = 256; // by tiles
constexpr int kChunkPanels = 16;   // at most, per chunk; half as many by tiles

// What the sums of one chunk take: the scratch of a team's worker.
constexpr size_t kSumsBytes = sizeof(float) * kPanel * std::max(kChunkPanels * kRowBlock, kChunkPanels / 2 * kTileRowBlock);

// Of a gated linear, the activation of the gates; the last, that of the outputs of one that is not.
enum class Gate : int32_t { silu = 0, gelu = 1, relu2 = 2 };

// An activation with more to it: f(min(gate, limit)) * (clamp(up, -limit, limit) + shift), where silu is
// x * sigmoid(alpha * x). Of a linear that is not gated, f(min(x, limit)).
struct Bend {
    Gate f;
    float limit;  // or infinity
    float alpha, shift;
};

constexpr Bend kSquaredRelu{Gate::relu2, std::numeric_limits<float>::infinity(), 1.0f, 0.0f};

// out [rows][n] = (x times the linear, + bias; of a gated one activation(gate) * up; or relu2 of it) * scale, capped, +
// residual. `out` may be `residual`.
struct Product {
    const Linear* linear;
    Activations x;
    int rows;
    void* out;
    size_t ldo;
    Form out_form;          // float32, or bfloat16 without a residual
    const float* residual;  // with out's stride, or null
    const Linear* next;     // the linear of the next product, or null
    Gate gate = Gate::silu;
    float scale = 1.0f;
    float softcap = 0.0f;   // c: y becomes c tanh(y / c); 0 is none
    const Bend* bend = nullptr;  // in place of the gate, or null
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

// Enough chunks that a thread which loses its core leaves the others work, none so small that claiming it shows. There
// may be several such linears in a phase.
inline Cut cut(const Linear& linear, int rows, int threads, int linears = 1) {
    const bool tiles = by_tiles(linear, rows);
    const int unit = linear.gated || tiles ? 2 : 1;
    const int row_chunks = divide_up(rows, tiles ? kTileRowBlock : kRowBlock);
    const int worthwhile = static_cast<int>((16 << 10) / (linear.panel_bytes() * std::min(rows, 4)));
    const int fewest = std::max(rows <= 2 ? 2 : 1, worthwhile);  // a row or two need the sums of two to hide latency
    int panels = linear.panels * linears * row_chunks / (threads * 12) / unit * unit;
    panels = std::max(panels, divide_up(fewest, unit) * unit);
    panels = std::min(panels, tiles ? kChunkPanels / 2 : kChunkPanels);
    const int rows_of_chunk = divide_up(rows, row_chunks);
    return {panels, tiles ? round_up(rows_of_chunk, 32) : rows_of_chunk, divide_up(linear.panels, panels), row_chunks,
            threads};
}

// 1 / (1 + e^-x), from the exponential that cannot overflow.
template <class V>
PENSTOCK_INLINE V sigmoid(V x) {
    const V one = all<V>(1.0f), e = exp(x < V{} ? x : -x);
    return (x < V{} ? e : one) / (one + e);
}

template <class V>
PENSTOCK_INLINE V silu(V x) {
    return x * sigmoid(x);
}

// x * Phi(x) by its approximation with tanh, which is x * sigmoid(2 u).
template <class V>
PENSTOCK_INLINE V gelu(V x) {
    return x * sigmoid(all<V>(1.5957691216057308f) * (x + all<V>(0.044715f) * x * x * x));
}

// f(min(x, limit)); NaN stays as it is.
PENSTOCK_INLINE wide bent(const Bend& by, wide x) {
    const wide limit = all<wide>(by.limit), y = x > limit ? limit : x;
    if (by.f == Gate::gelu) return gelu(y);
    if (by.f == Gate::relu2) return y < wide{} ? wide{} : y * y;
    return y * sigmoid(y * all<wide>(by.alpha));
}

PENSTOCK_INLINE wide lifted(const Bend& by, wide up) {
    const wide limit = all<wide>(by.limit), below = up > limit ? limit : up;
    return (below < -limit ? -limit : below) + all<wide>(by.shift);
}

// Some rows of sums, and the outputs that they become: times scales, plus bias, through the activation, plus residual.
template <class Sum>
struct Outputs {
    const Sum* sums;  // [panels][by_panel / 16][16]
    size_t by_panel;
    const float* panel_scales;  // [panels][16], or null
    const float* row_scales;    // of int8 rows, or null
    const float* bias;          // [panels][16], or null
    char* out;
    const char* residual;  // or null
    size_t stride;         // bytes between rows of out, and of the residual
    int columns;           // from the first to the last that there is
    Gate gate;
    float scale, softcap;
    const Bend* bend;
};

template <class Sum>
Outputs<Sum> outputs_of(const Product& job, int panel, int row, const Sum* sums, size_t by_panel) {
    const Linear& linear = *job.linear;
    const int column = (linear.gated ? panel / 2 : panel) * kPanel;
    const size_t size = size_of(job.out_form), place = static_cast<size_t>(row) * job.ldo + column;
    const bool is_scaled = std::is_same_v<Sum, int32_t> || linear.scales_sums();
    return {sums,
            by_panel,
            is_scaled ? linear.panel_scales(panel) : nullptr,
            job.x.form == Form::int8 ? job.x.scales + row : nullptr,
            linear.bias.data ? linear.bias.at<float>(panel, 0) : nullptr,
            static_cast<char*>(job.out) + place * size,
            job.residual ? reinterpret_cast<const char*>(job.residual + place) : nullptr,
            job.ldo * size,
            linear.n - column,
            job.gate,
            job.scale,
            job.softcap,
            job.gate == Gate::relu2 ? &kSquaredRelu : job.bend};
}

PENSTOCK_INLINE void store_as(float* out, wide y) { store(out, y); }
PENSTOCK_INLINE void store_as(BFloat* out, wide y) { store_operands(out, y); }
PENSTOCK_INLINE void store_as(float* out, float y) { *out = y; }
PENSTOCK_INLINE void store_as(BFloat* out, float y) { *out = tile_operand(y); }

// Writes the first `count` of y plus the residual.
template <class Out>
PENSTOCK_INLINE void put(Out* out, const float* residual, wide y, int count) {
    if (count >= kWide) return store_as(out, residual ? y + load_as<wide>(residual) : y);
    for (int i = 0; i < count; i++) store_as(out + i, residual ? residual[i] + y[i] : y[i]);
}

// Rows [from, end) of a panel, or of a gated linear's two that belong together.
template <class Sum, bool kGated, class Out>
void finish_panel(const Outputs<Sum>& to, int panel, int from, int end) {
    const float scale = to.scale, softcap = to.softcap;  // here, where no store can change them
    const bool is_silu = to.gate == Gate::silu, is_plain = scale == 1.0f && softcap == 0.0f;
    for (int j = 0; j < kPanel; j += kWide) {
        const int column = (kGated ? panel / 2 : panel) * kPanel + j, count = to.columns - column;
        if (count <= 0) return;
        const size_t factor = static_cast<size_t>(panel) * kPanel + j;
        for (int r = from; r < end; r++) {
            const auto output = [&](int q) __attribute__((always_inline)) {
                const Sum* sums = to.sums + (panel + q) * to.by_panel + r * kPanel + j;
                wide y;
                if constexpr (std::is_same_v<Sum, int32_t>) {
                    wide_int exact;
                    std::memcpy(&exact, sums, sizeof exact);
                    y = __builtin_convertvector(exact, wide);
                } else {
                    y = load_as<wide>(sums);
                }
                if (to.panel_scales) y = y * load_as<wide>(to.panel_scales + factor + q * kPanel);
                if (to.row_scales) y = y * all<wide>(to.row_scales[r]);
                if (to.bias) y = y + load_as<wide>(to.bias + factor + q * kPanel);
                return y;
            };
            wide y = output(0);
            if (to.bend)
                y = kGated ? bent(*to.bend, y) * lifted(*to.bend, output(kGated)) : bent(*to.bend, y);
            else if constexpr (kGated)
                y = (is_silu ? silu(y) : gelu(y)) * output(1);
            if (!is_plain) {
                y = y * all<wide>(scale);
                if (softcap > 0.0f) y = all<wide>(softcap) * tanh(y / all<wide>(softcap));
            }
            const char* residual = to.residual ? to.residual + r * to.stride : nullptr;
            put(reinterpret_cast<Out*>(to.out + r * to.stride) + column,
                residual ? reinterpret_cast<const float*>(residual) + column : nullptr, y, count);
        }
    }
}

template <class Sum>
using FinishPanel = void (*)(const Outputs<Sum>&, int panel, int from, int end);

template <class Sum>
FinishPanel<Sum> finish_of(const Product& job) {
    if (job.out_form == Form::bf16)
        return job.linear->gated ? finish_panel<Sum, true, BFloat> : finish_panel<Sum, false, BFloat>;
    return job.linear->gated ? finish_panel<Sum, true, float> : finish_panel<Sum, false, float>;
}

constexpr int kRowsAhead = 12;

// The lines of outputs that will be written lie in the other core's cache, often, and writes wait for one another.
template <class Sum>
PENSTOCK_INLINE void fetch_outputs(const Outputs<Sum>& to, size_t column, int from, int end) {
    for (int r = from; r < end; r++) __builtin_prefetch(to.out + r * to.stride + column, 1);
}

inline void finish(const Product& job, int panel, int panels, int row, int rows, const float* sums, size_t by_panel) {
    const Outputs<float> to = outputs_of(job, panel, row, sums, by_panel);
    const auto finish = finish_of<float>(job);
    const int unit = job.linear->gated ? 2 : 1;
    const size_t bytes = kPanel * size_of(job.out_form);
    for (int p = 0; p < panels; p += unit)
        for (int r = 0; r < rows; r += kRowsAhead) {
            const int end = std::min(r + kRowsAhead, rows);
            fetch_outputs(to, p / unit * bytes, end, std::min(end + kRowsAhead, rows));
            finish(to, p, r, end);
        }
}

#if PENSTOCK_TILES

// How many steps of k go at a time where rows take several passes: the weights of two panels stay in the first-level cache,
// 48 KB, beside as much of the rows of a pass. One more is as well if that is all.
constexpr int kBlockSteps = 8;

// Rows times panels, whose k is one group, grid by grid: the vectors finish one while the tiles multiply the next. The
// panels at `next`, which come next, are fetched meanwhile. Between blocks of k, sums pass through memory, exactly.
template <class Sum>
void multiply_by_tiles(const Product& job, int panel, int panels, int row, int rows, const char* next, Sum* sums) {
    constexpr bool kInt8 = std::is_same_v<Sum, int32_t>;
    constexpr int kGridRows = 2 * kTileHeight, kTile = kTileHeight * kTileBytes;
    constexpr int kPieces = 4;  // of a grid's k, and of the rows that are finished after each
    const Linear& linear = *job.linear;
    const Activations x = job.x.from(row);
    const auto finish = finish_of<Sum>(job);
    const int unit = linear.gated ? 2 : 1, steps = linear.depth * (kInt8 ? 1 : 2) / kTileBytes;
    const int together = rows <= kTileHeight ? 4 : 2, passes = divide_up(rows, kGridRows);
    const int blocks = passes == 1 || steps <= kBlockSteps + 1 ? 1 : divide_up(steps, kBlockSteps);
    const int places = blocks == 1 ? 2 : passes;  // of sums: of a grid and the one before, or of all
    const int share = divide_up(together * kTile, kTileBytes * passes) * kTileBytes;
    const size_t panel_bytes = linear.panel_bytes(), out_bytes = kPanel * size_of(job.out_form);
    Outputs<Sum> waiting{};
    int waiting_rows = 0, waiting_panels = 0, place = 0;
    const auto finish_waiting = [&](int from, int end) __attribute__((always_inline)) {
        for (int p = 0; p < waiting_panels; p += unit) finish(waiting, p, from, end);
    };
    use_tiles(kWholeTiles);
    for (int p = 0; p < panels; p += together) {
        const int some = std::min(together, panels - p);
        const char* ahead = p + together < panels ? linear.panel<char>(panel + p + together) : next;
        for (int i = 0; i < blocks * passes; i++) {
            const int block = i / passes, t = i % passes * kGridRows;
            const int height = std::min(rows - t, kGridRows), tiles = divide_up(height, kTileHeight);
            const TileStrides by{x.stride, panel_bytes, static_cast<size_t>(tiles) * kTileHeight * kPanel, kTileBytes};
            const bool is_last = block == blocks - 1;
            Sum* found = sums + place * (4 * kTileHeight * kPanel);
            place = (place + 1) % places;
            const Outputs<Sum> to = outputs_of(job, panel + p, row + t, found, by.c_panel);
            for (int q = 0; q < some;)
                q += with_grid<kInt8>(tiles, some - q, [&](auto grid) {
                    const char *a = x.row<char>(t), *b = linear.panel<char>(panel + p + q);
                    char* c = reinterpret_cast<char*>(found + q * by.c_panel);
                    if (block == 0)
                        grid.clear();
                    else
                        grid.load(c, by);
                    for (int piece = 0; piece < kPieces; piece++) {
                        const auto share_of = [&](int n, int i) { return n * i / kPieces; };
                        const auto step_at = [&](int i) { return steps * (block * kPieces + i) / (blocks * kPieces); };
                        const int from = step_at(piece), end = step_at(piece + 1);
                        const char* b_from = b + from * kTile;
                        grid.add(a + from * kTileBytes, b_from, end - from, by, [&](int s) __attribute__((always_inline)) {
                            if (passes == 1) return fetch_streamed(b_from + s * kTile, some, by);
                            for (int i = 0; i < share; i += kTileBytes) __builtin_prefetch(ahead + i, 0, 2);
                            ahead += share;
                        });
                        if (q > 0) continue;  // the first grid of a few panels has done it all
                        for (int o = 0; o < some && is_last; o += unit)
                            fetch_outputs(to, o / unit * out_bytes, share_of(height, piece), share_of(height, piece + 1));
                        finish_waiting(share_of(waiting_rows, piece), share_of(waiting_rows, piece + 1));
                    }
                    grid.store(c, by);
                });
            waiting = to;
            waiting_rows = is_last ? height : 0;
            waiting_panels = some;
        }
    }
    finish_waiting(0, waiting_rows);
}

#endif

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
#if PENSTOCK_TILES
    const char* next = static_cast<const char*>(guess_next(job, by, panel));
    if (linear.type == Type::bf16) return multiply_by_tiles(job, panel, panels, row, rows, next, sums);
    if (linear.type == Type::int8 && by_tiles(linear, rows) && linear.groups() == 1 && !linear.offsets)
        return multiply_by_tiles(job, panel, panels, row, rows, next, reinterpret_cast<int32_t*>(sums));
#endif
    size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
    if (linear.form == Form::int8) {
        multiply_integers(linear, panel, panels, x, rows, sums);
    } else if (is_coded(linear.type)) {
        multiply_coded(linear, panel, panels, x, rows, sums, by_panel);
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
    const Product job{&linear,   activations, rows,       out,          static_cast<size_t>(linear.n), Form::f32,
                      nullptr,   nullptr,     Gate::silu, linear.scale, linear.softcap};
    const Cut by = cut(linear, rows, team.size());
    const auto work = [&](uint32_t chunk, int worker) { multiply(job, by, chunk, team.scratch(worker)); };
    run_chunks(team, by.chunks(), work, Kind::head);
}

}  // namespace penstock
