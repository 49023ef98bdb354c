// A whole linear applied to rows of activations, cut into chunks for the team.
#pragma once

#include "gemm_coded.h"
#include "gemm_integer_tiles.h"

namespace penstock {

constexpr int kRowBlock = 96;      // rows per chunk, by vectors
constexpr int kTileRowBlock = 512; // by tiles, and not more than kHeldBytes, but
constexpr int kLeastRowBlock = 256;
constexpr size_t kHeldBytes = 800 << 10;  // of rows that stay in the second-level cache while panels pass
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
    const int parts = linear.row_parts();
    rows *= parts;
    const bool tiles = by_tiles(linear, rows);
    const int unit = linear.gated || tiles ? 2 : 1;
    const int held = static_cast<int>(kHeldBytes / (std::max(1, linear.depth) * size_of(linear.form))) / 32 * 32;
    const int row_chunks = divide_up(rows, tiles ? std::clamp(held, kLeastRowBlock, kTileRowBlock) : kRowBlock);
    const int worthwhile = static_cast<int>((16 << 10) / (linear.panel_bytes() * std::min(rows, 4)));
    const int fewest = std::max(rows <= 2 ? 2 : 1, worthwhile);  // a row or two need the sums of two to hide latency
    int panels = linear.panels * linears * row_chunks / (threads * 12) / unit * unit;
    panels = std::max(panels, divide_up(fewest, unit) * unit);
    panels = std::min(panels, tiles ? kChunkPanels / 2 : kChunkPanels);
    const int rows_of_chunk = round_up(divide_up(rows, row_chunks), tiles ? 32 : parts);
    return {panels, rows_of_chunk / parts, divide_up(linear.panels, panels), row_chunks, threads};
}

// 1 / (1 + e^-x), from the exponential that cannot overflow.
template <class V>
PENSTOCK_INLINE V sigmoid(V x) {
    const V one = all<V>(1.0f), e = exp_below((V)((IntsOf<V>)x | std::numeric_limits<int32_t>::min()));
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

// Makes outputs of the sums of two panels row by row, where all columns are there and nothing but scales, SiLU and a residual is
// to be done: with finish_panel's bits.
template <class Sum, bool kGated, class Out, bool kResidual>
class SimpleFinisher {
   public:
    SimpleFinisher() = default;
    SimpleFinisher(const Product&, const Outputs<Sum>& to, int rows, int panels)
        : sums_(to.sums),
          by_panel_(to.by_panel),
          out_(to.out),
          residual_(to.residual),
          stride_(to.stride),
          panel_scales_(to.panel_scales),
          row_scales_(to.row_scales),
          outputs_(kGated ? 1 : panels),
          left_(rows),
          fetched_(to.out),
          to_fetch_(rows) {}

    int left() const { return left_; }

    // Fetches the lines of rows that will be written. Where a residual is read, or a line is written in two halves, it does not
    // help.
    PENSTOCK_INLINE void fetch(int rows) {
        if constexpr (sizeof(Out) == sizeof(float) && !kResidual)
            for (rows = std::min(rows, to_fetch_), to_fetch_ -= rows; rows > 0; rows--, fetched_ += stride_)
                for (int o = 0; o < kMostOutputs; o++) __builtin_prefetch(fetched_ + o * kPanel * sizeof(Out), 1);
    }

    PENSTOCK_INLINE void finish(int rows) {
        for (rows = std::min(rows, left_), left_ -= rows; rows > 0; rows--) {
            unrolled<kMostOutputs>(PENSTOCK_EACH(o) {
                if (o < outputs_) unrolled<kParts>(PENSTOCK_EACH(j) { finish_part(o, j * kWide); });
            });
            sums_ += kPanel;
            out_ += stride_;
            if constexpr (kResidual) residual_ += stride_;
            if constexpr (kScaled) row_scales_++;
        }
    }

   private:
    static constexpr bool kScaled = std::is_same_v<Sum, int32_t>;
    static constexpr int kMostOutputs = kGated ? 1 : 2;  // panels of them

    PENSTOCK_INLINE void finish_part(int o, int j) {
        const auto output = [&](int q) __attribute__((always_inline)) {
            const Sum* sums = sums_ + (o + q) * by_panel_ + j;
            if constexpr (kScaled) {
                wide_int exact;
                std::memcpy(&exact, sums, sizeof exact);
                return __builtin_convertvector(exact, wide) * load_as<wide>(panel_scales_ + (o + q) * kPanel + j) * all<wide>(*row_scales_);
            } else {
                return load_as<wide>(sums);
            }
        };
        wide y = output(0);
        if constexpr (kGated) y = silu(y) * output(1);
        if constexpr (kResidual) y = y + load_as<wide>(reinterpret_cast<const float*>(residual_) + o * kPanel + j);
        store_as(reinterpret_cast<Out*>(out_) + o * kPanel + j, y);
    }

    const Sum* sums_ = nullptr;
    size_t by_panel_ = 0;
    char* out_ = nullptr;
    const char* residual_ = nullptr;
    size_t stride_ = 0;
    const float *panel_scales_ = nullptr, *row_scales_ = nullptr;
    int outputs_ = 0, left_ = 0;
    const char* fetched_ = nullptr;
    int to_fetch_ = 0;
};

// The same of any outputs.
template <class Sum>
class AnyFinisher {
   public:
    AnyFinisher() = default;
    AnyFinisher(const Product& job, const Outputs<Sum>& to, int rows, int panels)
        : to_(to), finish_(finish_of<Sum>(job)), unit_(job.linear->gated ? 2 : 1), panels_(panels), left_(rows), end_(rows) {}

    int left() const { return left_; }
    void fetch(int) {}

    // Several rows at a time.
    void finish(int rows) {
        waiting_ += std::min(rows, left_);
        left_ -= std::min(rows, left_);
        if (waiting_ < kTogether && left_ > 0) return;
        for (int p = 0; p < panels_ && waiting_ > 0; p += unit_) finish_(to_, p, end_ - left_ - waiting_, end_ - left_);
        waiting_ = 0;
    }

   private:
    static constexpr int kTogether = 8;

    Outputs<Sum> to_{};
    FinishPanel<Sum> finish_ = nullptr;
    int unit_ = 1, panels_ = 0, left_ = 0, end_ = 0, waiting_ = 0;
};

// Panels that come next, brought into the second-level cache bit by bit: runs of bytes, `stride` apart.
class Ahead {
   public:
    Ahead(const char* from, size_t run, size_t stride) : at_(from), run_(run), left_(run), skip_(stride - run) {}

    PENSTOCK_INLINE void fetch(int bytes) {
        for (int i = 0; i < bytes; i += kTileBytes) __builtin_prefetch(at_ + i, 0, 2);
        at_ += bytes;
        if ((left_ -= bytes) > 0) return;
        at_ += skip_;
        left_ = run_;
    }

   private:
    const char* at_;
    const ptrdiff_t run_;
    ptrdiff_t left_;
    const ptrdiff_t skip_;
};

// So many of `whole` in each of some steps, and as many more as it takes in the last ones.
class Pace {
   public:
    Pace(int whole, int steps) : each_((whole * 256 + steps - 1) / steps) {}

    PENSTOCK_INLINE int next() {
        due_ += each_;
        const int whole = due_ >> 8;
        due_ &= 255;
        return whole;
    }

   private:
    const int each_;
    int due_ = 0;
};

constexpr int kGridRows = 2 * kTileHeight;
constexpr int kLeastBlock = 16;  // steps

// Rows times panels, whose k is one group, in grids of two tiles of rows and two panels. A port of the vectors' is the tiles',
// and no more instructions wait than a few steps have: so the vectors finish a row or two of the grid before beside each
// step. The rows pass through the first-level cache, and leave the panels there. k goes in blocks where rows are long, so
// that they stay in the second-level cache; between blocks, sums pass through memory, exactly.
template <class Sum, class Finisher>
void multiply_grids(const Product& job, int panel, int panels, int row, int rows, const char* next, Sum* sums) {
    constexpr bool kInt8 = std::is_same_v<Sum, int32_t>;
    constexpr int kTile = kTileHeight * kTileBytes, kSums = 4 * kTileHeight * kPanel;
    const Linear& linear = *job.linear;
    const Activations x = job.x.from(row);
    const int steps = linear.depth * (kInt8 ? 1 : 2) / kTileBytes, passes = divide_up(rows, kGridRows);
    const int most = std::max<int>(kLeastBlock, kHeldBytes / (passes * kGridRows * kTileBytes));
    const int blocks = divide_up(steps, most), places = blocks == 1 ? 2 : passes * divide_up(panels, 2);
    const int share = divide_up(2 * kTile, kTileBytes * passes) * kTileBytes;
    const size_t panel_bytes = linear.panel_bytes();
    Finisher waiting;
    int place = 0;
    use_tiles(kWholeTiles);
    for (int block = 0; block < blocks; block++) {
        const int first = steps * block / blocks, end = steps * (block + 1) / blocks, length = end - first;
        const bool is_last = block == blocks - 1;
        for (int p = 0; p < panels; p += 2) {
            const int some = std::min(2, panels - p);
            const char* after = p + 2 < panels ? linear.panel<char>(panel + p + 2) + first * kTile
                                : is_last      ? next
                                               : linear.panel<char>(panel) + end * kTile;
            Ahead ahead(after, static_cast<size_t>(length) * kTile, panel_bytes);
            for (int t = 0; t < rows; t += kGridRows) {
                const int height = std::min(rows - t, kGridRows), tiles = divide_up(height, kTileHeight);
                const TileStrides by{x.stride, panel_bytes, static_cast<size_t>(tiles) * kTileHeight * kPanel, kTileBytes};
                Sum* found = sums + place * kSums;
                place = (place + 1) % places;
                Finisher coming(job, outputs_of(job, panel + p, row + t, found, by.c_panel), is_last ? height : 0, some);
                with_grid<kInt8>(tiles, some, [&](auto grid) {
                    char* c = reinterpret_cast<char*>(found);
                    if (block == 0)
                        grid.clear();
                    else
                        grid.load(c, by);
                    Pace finished(waiting.left(), length), fetched(kGridRows, length);
                    grid.template add</*kStreamed=*/true>(x.row<char>(t) + first * kTileBytes,
                                                          linear.panel<char>(panel + p) + first * kTile, length, by,
                                                          [&](int) __attribute__((always_inline)) {
                                                              ahead.fetch(share);
                                                              coming.fetch(fetched.next());
                                                              waiting.finish(finished.next());
                                                          });
                    waiting.finish(kGridRows);
                    grid.store(c, by);
                });
                waiting = coming;
            }
        }
    }
    waiting.finish(kGridRows);
}

// Whether a SimpleFinisher makes the outputs of these panels.
template <class Sum>
bool is_simple(const Product& job, int panel, int panels) {
    constexpr bool kScaled = std::is_same_v<Sum, int32_t>;
    const bool gated = job.linear->gated;
    const Outputs<Sum> to = outputs_of<Sum>(job, panel, 0, nullptr, 0);
    return (gated ? panels / 2 : panels) * kPanel <= to.columns && (!gated || (to.gate == Gate::silu && !to.residual)) &&
           !to.bend && !to.bias && to.scale == 1.0f && to.softcap == 0.0f && (to.panel_scales != nullptr) == kScaled &&
           (to.row_scales != nullptr) == kScaled;
}

template <class Sum>
void multiply_many_by_tiles(const Product& job, int panel, int panels, int row, int rows, const char* next, Sum* sums) {
    const auto multiply = [&](auto finisher) {
        multiply_grids<Sum, decltype(finisher)>(job, panel, panels, row, rows, next, sums);
    };
    const bool narrows = job.out_form == Form::bf16;
    if (!is_simple<Sum>(job, panel, panels)) return multiply(AnyFinisher<Sum>());
    if (job.linear->gated && narrows) return multiply(SimpleFinisher<Sum, true, BFloat, false>());
    if (job.linear->gated) return multiply(SimpleFinisher<Sum, true, float, false>());
    if (narrows) return multiply(SimpleFinisher<Sum, false, BFloat, false>());
    if (job.residual) return multiply(SimpleFinisher<Sum, false, float, true>());
    multiply(SimpleFinisher<Sum, false, float, false>());
}

// Up to two tiles of rows: the weights come from memory, once.
template <class Sum>
void multiply_few_by_tiles(const Product& job, int panel, int panels, int row, int rows, Sum* sums) {
    constexpr bool kInt8 = std::is_same_v<Sum, int32_t>;
    constexpr int kTile = kTileHeight * kTileBytes;
    constexpr int kPieces = 4;  // of a grid's k, and of the rows that are finished after each
    const Linear& linear = *job.linear;
    const Activations x = job.x.from(row);
    const auto finish = finish_of<Sum>(job);
    const int unit = linear.gated ? 2 : 1, steps = linear.depth * (kInt8 ? 1 : 2) / kTileBytes;
    const int tiles = divide_up(rows, kTileHeight), together = tiles == 1 ? 4 : 2;
    const size_t panel_bytes = linear.panel_bytes(), out_bytes = kPanel * size_of(job.out_form);
    const TileStrides by{x.stride, panel_bytes, static_cast<size_t>(tiles) * kTileHeight * kPanel, kTileBytes};
    Outputs<Sum> waiting{};
    int waiting_panels = 0, turn = 0;
    const auto finish_waiting = [&](int from, int end) __attribute__((always_inline)) {
        for (int p = 0; p < waiting_panels; p += unit) finish(waiting, p, from, end);
    };
    use_tiles(kWholeTiles);
    for (int p = 0; p < panels; p += together) {
        const int some = std::min(together, panels - p);
        Sum* found = sums + turn * (4 * kTileHeight * kPanel);
        turn ^= 1;
        const Outputs<Sum> to = outputs_of(job, panel + p, row, found, by.c_panel);
        for (int q = 0; q < some;)
            q += with_grid<kInt8>(tiles, some - q, [&](auto grid) {
                const char *a = x.row<char>(0), *b = linear.panel<char>(panel + p + q);
                grid.clear();
                for (int piece = 0; piece < kPieces; piece++) {
                    const auto share_of = [&](int n, int i) { return n * i / kPieces; };
                    const int from = share_of(steps, piece), end = share_of(steps, piece + 1);
                    const char* b_from = b + from * kTile;
                    grid.add(a + from * kTileBytes, b_from, end - from, by, [&](int s) __attribute__((always_inline)) {
                        fetch_streamed(b_from + s * kTile, some, by);
                    });
                    if (q > 0) continue;  // the first grid of a few panels has done it all
                    for (int o = 0; o < some; o += unit)
                        fetch_outputs(to, o / unit * out_bytes, share_of(rows, piece), share_of(rows, piece + 1));
                    finish_waiting(share_of(rows, piece), share_of(rows, piece + 1));
                }
                grid.store(reinterpret_cast<char*>(found + q * by.c_panel), by);
            });
        waiting = to;
        waiting_panels = some;
    }
    finish_waiting(0, rows);
}

template <class Sum>
void multiply_by_tiles(const Product& job, int panel, int panels, int row, int rows, const char* next, Sum* sums) {
    if (rows <= kGridRows) return multiply_few_by_tiles(job, panel, panels, row, rows, sums);
    multiply_many_by_tiles(job, panel, panels, row, rows, next, sums);
}

#endif

// Where the chunk lies that this thread will probably claim next: in this linear, else at the start of the next.
inline const void* guess_next(const Product& job, const Cut& by, int panel) {
    const int next = panel + by.panels * by.ahead;
    if (next < job.linear->panels) return job.linear->panel<char>(next);
    return job.next && job.next->type == job.linear->type ? job.next->panel<char>(0) : job.linear->panel<char>(panel);
}

// One chunk. By vectors, neighbouring chunks share their weights, which are then still in the cache; by tiles they share their
// Sums of rows, which were those of pairs of them.
inline void add_neighbours(float* sums, int panels, int rows, size_t by_panel) {
    for (int p = 0; p < panels; p++, sums += by_panel)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < kPanel; i += kWide) {
                const float* pair = sums + 2 * r * kPanel + i;
                store(sums + r * kPanel + i, load_as<wide>(pair) + load_as<wide>(pair + kPanel));
            }
}

// rows, of which the cache holds more.
inline void multiply(const Product& job, const Cut& by, uint32_t chunk, float* sums) {
    const Linear& linear = *job.linear;
    const int number = static_cast<int>(chunk);
    const bool shares_rows = by_tiles(linear, job.rows);
    const int panel = (shares_rows ? number % by.panel_chunks : number / by.row_chunks) * by.panels;
    const int row = (shares_rows ? number / by.panel_chunks : number % by.row_chunks) * by.rows;
    const int panels = std::min(by.panels, linear.panels - panel);
    const int rows = std::min(by.rows, job.rows - row);
    if (rows <= 0) return;
    const Activations x = job.x.from(row);
#if PENSTOCK_TILES
    const char* next = static_cast<const char*>(guess_next(job, by, panel));
    if (linear.type == Type::bf16) return multiply_by_tiles(job, panel, panels, row, rows, next, sums);
    if (linear.type == Type::int8 && by_tiles(linear, rows) && linear.groups() == 1 && !linear.offsets &&
        linear.rounding == Rounding::row)
        return multiply_by_tiles(job, panel, panels, row, rows, next, reinterpret_cast<int32_t*>(sums));
#endif
    const int parts = linear.row_parts();
    size_t by_panel = static_cast<size_t>(round_up(rows * parts, 16)) * kPanel;
    if (linear.form == Form::int8) {
        multiply_integers(linear, panel, panels, x.apart(), rows * parts, sums);
        if (parts == 2) add_neighbours(sums, panels, rows, by_panel);
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
        activations = prepared.activations(linear);
    }
    const Product job{&linear,   activations, rows,       out,          static_cast<size_t>(linear.n), Form::f32,
                      nullptr,   nullptr,     Gate::silu, linear.scale, linear.softcap};
    const Cut by = cut(linear, rows, team.size());
    const auto work = [&](uint32_t chunk, int worker) { multiply(job, by, chunk, team.scratch(worker)); };
    run_chunks(team, by.chunks(), work, Kind::head);
}

}  // namespace penstock
