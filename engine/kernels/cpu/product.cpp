// One chunk of a product: sums by the kind of its weights, and the outputs that they become.
#include "gemm_integers.h"
#include "gemms.h"
#include "outputs.h"

namespace penstock {

inline bool by_tiles([[maybe_unused]] const Linear& linear, [[maybe_unused]] int rows) {
#if PENSTOCK_TILES
    return linear.form == Form::bf16 || (linear.form == Form::int8 && rows > kIntegerRows);
#else
    return false;
#endif
}

Cut cut(const Linear& linear, int rows, int threads, int linears) {
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

// Sums of rows, which were those of pairs of them.
inline void add_neighbours(float* sums, int panels, int rows, size_t by_panel) {
    for (int p = 0; p < panels; p++, sums += by_panel)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < kPanel; i += kWide) {
                const float* pair = sums + 2 * r * kPanel + i;
                store(sums + r * kPanel + i, load_as<wide>(pair) + load_as<wide>(pair + kPanel));
            }
}

// One chunk. By vectors, neighbouring chunks share their weights, which are then still in the cache; by tiles they share their
// rows, of which the cache holds more.
void multiply(const Product& job, const Cut& by, uint32_t chunk, float* sums) {
    const Linear& linear = *job.linear;
    const int number = static_cast<int>(chunk);
    const bool shares_rows = by_tiles(linear, job.rows * linear.row_parts());
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
        multiply_floats(linear, panel, panels, x, rows, sums, guess_next(job, by, panel));
    }
    finish(job, panel, panels, row, rows, sums, by_panel);
}

void apply(Team& team, const Linear& linear, const float* x, size_t ldx, int rows, float* out) {
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
