// One token from each row of logits; the rule is that of engine/sampling/reference.py, its tables are those of
// engine/sampling/tables.py.
//
// A row is read once: for the largest logit of every run where it is greedy or has filters, else for the largest sum
// of logit and noise at once. With fewer rows than threads a row is cut into pieces; what a piece finds does not
// depend on the others, and of equals the lowest id wins, so that the cut cannot be seen in the result.
#pragma once

#include <cstddef>

#include "noise.h"
#include "select.h"
#include "threads.h"

namespace penstock {

// A row of SamplingTables.rows.
struct SamplingRow {
    uint64_t state;
    float temperature, top_p, min_p_depth, repetition, presence, frequency;
    int32_t top_k, min_tokens, num_biases, counts_row;
};

static_assert(sizeof(SamplingRow) == 48, "ROW of tables.py");
static_assert(offsetof(SamplingRow, temperature) == 8 && offsetof(SamplingRow, frequency) == 28, "ROW of tables.py");
static_assert(offsetof(SamplingRow, top_k) == 32 && offsetof(SamplingRow, counts_row) == 44, "ROW of tables.py");

struct ChooseArgs {
    const float* logits;  // [num_rows][vocab]
    const int32_t* slots;
    const int32_t* numbers;
    int32_t* token_ids;
    float* logprobs;            // or null where nobody wants them
    const SamplingRow* table;  // [num_slots]
    const int32_t* biases;     // [num_slots][max_biases][2]
    int32_t* counts;           // [num_counts][vocab]
    int32_t num_rows, vocab, num_slots, max_biases, num_counts;
    int32_t top_k, top_p;  // the step's filters
};

struct Best {
    float score = -kInfinity;
    int id = -1;

    // Of equals the first stays: ids come in ascending order.
    void take(const Best& other) {
        if (other.score > score) *this = other;
    }
};

struct Piece {
    Best best;
    bool finite;
};

struct RowScratch {
    Buffer<float> logits;  // with biases and penalties
    Buffer<float> maxima;
    Candidates candidates;
    Bins bins;
};

// ---- passes over a row -----------------------------------------------------------------------------------------

// x * 0 is 0 for a finite x, NaN for any other, and stays NaN in a sum. Four sums hide each other's latency.
struct FiniteCheck {
    v8 zeros[4] = {};

    PENSTOCK_INLINE void add(int turn, v8 x) { zeros[turn] = fma(x, splat(0.0f), zeros[turn]); }

    bool holds() const { return sum((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])) == 0.0f; }
};

// The largest of each lane of a block, which is all there.
PENSTOCK_INLINE v8 largest_of_block(const float* x, FiniteCheck& check) {
    v8 most[4];
    for (int j = 0; j < 4; j++) {
        most[j] = load(x + j * kLanes);
        check.add(j, most[j]);
    }
    for (int i = 4 * kLanes; i < kBlock; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) {
            const v8 y = load(x + i + j * kLanes);
            check.add(j, y);
            most[j] = max(most[j], y);
        }
    return max(max(most[0], most[1]), max(most[2], most[3]));
}

inline bool all_finite(const float* x, int from, int to) {
    FiniteCheck check;
    int i = from;
    for (; i + kBlock <= to; i += kBlock) largest_of_block(x + i, check);
    for (; i < to; i += kLanes) check.add(0, load_first(x + i, to - i));
    return check.holds();
}

inline float highest(const float* x, int n) {
    v8 most = splat(-kInfinity);
    for (int i = 0; i < n; i += kLanes) most = max(most, load_or_lowest(x + i, n - i));
    return max(most);
}

// The last block may lack some.
inline v8 largest_of_rest(const float* x, int count) {
    v8 most = splat(-kInfinity);
    for (int i = 0; i < count; i += kLanes) most = max(most, load_or_lowest(x + i, count - i));
    return most;
}

inline bool scan_maxima(const float* x, int from, int to, float* maxima) {
    FiniteCheck check;
    int i = from;
    for (; i + kBlock <= to; i += kBlock) store(maxima + i / kRunLength, largest_of_block(x + i, check));
    if (i < to) store(maxima + i / kRunLength, largest_of_rest(x + i, to - i));
    return check.holds() && all_finite(x, i, to);
}

// Keeps the best of eight tokens; those whose noise cannot lift them above the best so far cost no logarithm.
PENSTOCK_INLINE void take_noisy(Best& best, v8i ids, v8 x, float temperature, uint64_t key) {
    const v8 least = splat(best.score), t = splat(temperature);
    if (!any(x + splat(temperature * kMostNoise) > least)) return;
    const v8u bits = hashes(ids, key);
    if (!any(x + t * gumbel_bound(bits) > least)) return;
    const v8 scores = x + t * gumbel(bits);
    for (int lane = 0; lane < kLanes; lane++) best.take({scores[lane], ids[lane]});
}

// The random bits above which no noise lifts a logit of at most `peak` over the best: noise <= -log(u).
inline uint32_t most_bits(const Best& best, float peak, float temperature) {
    const float needed = (best.score - peak) / temperature - 2e-3f;  // less than all the rounding
    return needed > 0.0f ? static_cast<uint32_t>(exp1(-needed) * 4294967040.0f) : 0xffffffffu;
}

// A block whose largest logit is `peak`, of which hardly a token needs more than its random bits.
inline void take_block(Best& best, const float* x, int first, float peak, float temperature, uint64_t key) {
    constexpr int kTogether = 4;
    if (!(peak + temperature * kMostNoise > best.score)) return;
    const v8u most = splat_bits(most_bits(best, peak, temperature));
    const v8i lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < kBlock; i += kTogether * kLanes) {
        v8u bits[kTogether];
        for (int j = 0; j < kTogether; j++) bits[j] = hashes(lanes + splat_int(first + i + j * kLanes), key);
        if (!any((bits[0] <= most) | (bits[1] <= most) | (bits[2] <= most) | (bits[3] <= most))) continue;
        for (int j = 0; j < kTogether; j++)
            take_noisy(best, lanes + splat_int(first + i + j * kLanes), load(x + i + j * kLanes), temperature, key);
    }
}

inline Best scan_noisy(const float* x, int from, int to, float temperature, uint64_t key, bool& finite) {
    Best best;
    FiniteCheck check;
    const v8i lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    int i = from;
    for (; i + kBlock <= to; i += kBlock)
        take_block(best, x + i, i, max(largest_of_block(x + i, check)), temperature, key);
    finite = check.holds() && all_finite(x, i, to);
    for (; i < to; i += kLanes)
        take_noisy(best, lanes + splat_int(i), load_or_lowest(x + i, to - i), temperature, key);
    return best;
}

inline Best best_of(const Candidates& some, float temperature, uint64_t key) {
    Best best;
    for (int i = 0; i < some.count; i += kLanes) {
        v8i ids;
        std::memcpy(&ids, &some.ids[i], sizeof ids);
        take_noisy(best, ids, load(&some.values[i]), temperature, key);
    }
    return best;
}

inline int first_largest(const Scanned& row) {
    for (int block = 0; block < blocks_of(row.n); block++) {
        if (!any(load(row.maxima + block * kLanes) == splat(row.peak))) continue;
        for (int i = block * kBlock; i < row.n; i++)
            if (row.x[i] == row.peak) return i;
    }
    return -1;
}

// ---- biases and penalties --------------------------------------------------------------------------------------

inline float penalised(const SamplingRow& row, float value, int code) {
    if (!(value > -kInfinity)) return value;
    const float count = static_cast<float>(code >> 1), present = code > 1 ? 1.0f : 0.0f;
    float y = value > 0.0f ? value / row.repetition : value * row.repetition;
    y = y - (row.frequency * count + row.presence * present);
    return std::min(std::max(y, -FLT_MAX), FLT_MAX);
}

inline void penalise(const SamplingRow& row, const int32_t* codes, int from, int to, float* x) {
    const auto one = [&](int i) {
        if (codes[i] > 0) x[i] = penalised(row, x[i], codes[i]);
    };
    int i = from;
    for (; i + kLanes <= to; i += kLanes) {
        v8i some;
        std::memcpy(&some, codes + i, sizeof some);
        if (!any(some > splat_int(0))) continue;
        for (int lane = 0; lane < kLanes; lane++) one(i + lane);
    }
    for (; i < to; i++) one(i);
}

// `pairs`: see SamplingTables.biases.
inline void add_biases(const SamplingRow& row, const int32_t* pairs, int count, int number, int from, int to, float* x) {
    for (int i = 0; i < count; i++) {
        const int code = pairs[2 * i], id = code < 0 ? -1 - code : code;
        if (id < from || id >= to) continue;
        float value;
        std::memcpy(&value, pairs + 2 * i + 1, sizeof value);
        x[id] += code < 0 && number < row.min_tokens ? -kInfinity : value;
    }
}

// ---- the program -----------------------------------------------------------------------------------------------

class Chooser {
   public:
    explicit Chooser(Team& team) : team_(team), scratch_(team.size()) {}

    // False where a slot does not exist; nothing has been done then.
    bool choose(const ChooseArgs& args) {
        for (int row = 0; row < args.num_rows; row++)
            if (args.slots[row] >= args.num_slots) return false;
        args_ = &args;
        reserve();
        const int most = args.num_rows < team_.size() ? team_.size() : 1;
        num_pieces_ = std::clamp(args.vocab / kSmallestPiece, 1, most);
        piece_size_ = (blocks_of(args.vocab) + num_pieces_ - 1) / num_pieces_ * kBlock;
        const uint32_t rows = static_cast<uint32_t>(args.num_rows);
        if (num_pieces_ == 1) {
            run_chunks(team_, rows, [this](uint32_t row, int worker) { whole(static_cast<int>(row), worker); });
        } else {
            pieces_.resize(static_cast<size_t>(rows) * num_pieces_);
            run_chunks(team_, rows * num_pieces_, [this](uint32_t at, int) {
                const int row = static_cast<int>(at) / num_pieces_;
                pieces_[at] = scan(row, static_cast<int>(at) % num_pieces_, scratch_[row]);
            });
            run_chunks(team_, rows, [this](uint32_t row, int) {
                finish(static_cast<int>(row), &pieces_[row * num_pieces_], scratch_[row]);
            });
        }
        return true;
    }

   private:
    static constexpr int kSmallestPiece = 16384;

    // Touched only by the rows that need it.
    void reserve() {
        if (args_->vocab <= reserved_) return;
        reserved_ = 0;
        for (RowScratch& scratch : scratch_) {
            scratch.logits = allocate<float>(args_->vocab);
            scratch.maxima = allocate<float>(blocks_of(args_->vocab) * kLanes);
            scratch.candidates.reserve(std::max(args_->vocab, blocks_of(args_->vocab) * kLanes));
        }
        reserved_ = args_->vocab;
    }

    const float* raw(int row) const { return args_->logits + static_cast<size_t>(row) * args_->vocab; }
    const SamplingRow& settings(int row) const { return args_->table[args_->slots[row]]; }
    uint64_t key(int row) const { return noise_key(settings(row).state, args_->numbers[row]); }

    int32_t* counts(int row) const {
        const int at = settings(row).counts_row;
        return at >= 0 && at < args_->num_counts ? args_->counts + static_cast<size_t>(at) * args_->vocab : nullptr;
    }

    bool is_adjusted(int row) const { return settings(row).num_biases > 0 || counts(row) != nullptr; }

    Settings filters(int row) const {
        const SamplingRow& s = settings(row);
        return {s.temperature, args_->top_k && s.top_k < args_->vocab ? s.top_k : 0, args_->top_p ? s.top_p : 1.0f,
                args_->top_k || args_->top_p ? s.min_p_depth : kInfinity};
    }

    bool is_greedy(int row) const { return !(settings(row).temperature > 0.0f); }

    bool is_noisy(int row) const {
        const Settings by = filters(row);
        return !is_greedy(row) && by.top_k <= 0 && !(by.top_p < 1.0f) && !(by.min_p_depth < kInfinity);
    }

    void whole(int row, int worker) {
        const Piece piece = scan(row, 0, scratch_[worker]);
        finish(row, &piece, scratch_[worker]);
    }

    const float* adjusted(int row, int from, int to, RowScratch& scratch) const {
        const SamplingRow& s = settings(row);
        float* x = scratch.logits.get();
        std::memcpy(x + from, raw(row) + from, static_cast<size_t>(to - from) * sizeof(float));
        const int32_t* biases = args_->biases + 2 * static_cast<size_t>(args_->slots[row]) * args_->max_biases;
        add_biases(s, biases, std::min(s.num_biases, args_->max_biases), args_->numbers[row], from, to, x);
        if (const int32_t* codes = counts(row)) penalise(s, codes, from, to, x);
        return x;
    }

    Piece scan(int row, int number, RowScratch& scratch) const {
        if (args_->slots[row] < 0) return {{}, false};
        const int from = std::min(number * piece_size_, args_->vocab), to = std::min(from + piece_size_, args_->vocab);
        const bool changes = is_adjusted(row);
        const bool was_finite = !changes || all_finite(raw(row), from, to);
        const float* x = changes ? adjusted(row, from, to, scratch) : raw(row);
        Piece piece;
        if (is_noisy(row))
            piece.best = scan_noisy(x, from, to, settings(row).temperature, key(row), piece.finite);
        else
            piece.finite = scan_maxima(x, from, to, scratch.maxima.get());
        if (changes) piece.finite = was_finite;  // a ban is infinite
        return piece;
    }

    void finish(int row, const Piece* pieces, RowScratch& scratch) const {
        Best best;
        bool finite = true;
        for (int i = 0; i < num_pieces_; i++) {
            best.take(pieces[i].best);
            finite = finite && pieces[i].finite;
        }
        int id = -1;
        if (finite) id = is_noisy(row) ? best.id : pick(row, scratch);
        args_->token_ids[row] = id;
        if (args_->logprobs != nullptr)
            args_->logprobs[row] = id >= 0 ? logprob(row, id) : std::numeric_limits<float>::quiet_NaN();
        if (id < 0) return;
        if (int32_t* codes = counts(row)) codes[id] += 2;
    }

    // Of a greedy row or one with filters.
    int pick(int row, RowScratch& scratch) const {
        const int n = args_->vocab;
        const float peak = highest(scratch.maxima.get(), blocks_of(n) * kLanes);
        if (!(peak > -kInfinity)) return -1;
        const Scanned scanned{is_adjusted(row) ? scratch.logits.get() : raw(row), n, scratch.maxima.get(), peak};
        if (is_greedy(row)) return first_largest(scanned);
        select(scanned, filters(row), scratch.candidates, scratch.bins);
        return best_of(scratch.candidates, settings(row).temperature, key(row)).id;
    }

    float logprob(int row, int id) const {
        const float* x = raw(row);
        const float peak = highest(x, args_->vocab);
        double total = 0.0;
        for (int from = 0; from < args_->vocab; from += kBlock) {
            v8 sums = splat(0.0f);
            for (int i = from; i < std::min(from + kBlock, args_->vocab); i += kLanes)
                sums += exp(load_or_lowest(x + i, args_->vocab - i) - splat(peak));
            total += sum(sums);
        }
        return static_cast<float>(static_cast<double>(x[id]) - peak - std::log(total));
    }

    Team& team_;
    std::vector<RowScratch> scratch_;  // per worker, or per row where rows are cut into pieces
    std::vector<Piece> pieces_;
    const ChooseArgs* args_ = nullptr;
    int num_pieces_ = 1, piece_size_ = 0, reserved_ = 0;
};

}  // namespace penstock
