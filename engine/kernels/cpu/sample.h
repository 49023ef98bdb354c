// One token from each row of logits; the rule is that of engine/sampling/reference.py, its tables are those of
// engine/sampling/tables.py.
//
// A first pass finds the largest logits of a row; they rule out most of it for the second one, which finds the best sum
// of logit and noise among the logits that are kept. With fewer rows than threads a row is cut into pieces. What a piece
// finds does not depend on the others, and of equals the lowest id wins, so that the cut cannot be seen in the result.
#pragma once

#include "noise.h"
#include "select.h"
#include "threads.h"

namespace penstock {

struct ChooseArgs {
    const float* logits;  // [num_rows][num_logits], of the tokens from `first` on
    const int32_t* seats;
    const int32_t* numbers;
    int32_t* token_ids;
    int32_t* candidates;  // [num_rows][3] in place of tokens, as in `choose_among` of reference.py; or null
    const SamplingRow* table;  // [num_seats]
    const int32_t* biases;     // [num_seats][max_biases][2]
    int32_t* counts;           // [num_counts][vocab]
    const uint32_t* masks;     // [num_rows][ceil(vocab / 32)], a bit for each token that may be chosen; or null
    int32_t num_rows, first, num_logits, vocab, num_seats, max_biases, num_counts;
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

// ---- passes over a row -----------------------------------------------------------------------------------------

// Finds the largest logit of the blocks, and of each lane of a block. x * 0 is 0 for a finite x, NaN for any other, and
// stays NaN in a sum. Four sums hide each other's latency.
inline float scan(const Row& row, int from, int to, bool& finite) {
    v8 zeros[4] = {}, peaks = splat(-kInfinity);
    for (int b = from; b < to; b++) {
        const float* x = row.block(b);
        v8 most[4];
        for (int j = 0; j < 4; j++) most[j] = splat(-kInfinity);
        for (int i = 0; i < kBlock; i += 4 * kLanes)
            for (int j = 0; j < 4; j++) {
                const v8 y = load(x + i + j * kLanes);
                zeros[j] = fma(y, splat(0.0f), zeros[j]);
                most[j] = max(y, most[j]);
            }
        const v8 largest = max(max(most[0], most[1]), max(most[2], most[3]));
        store(row.maxima + b * kLanes, largest);
        peaks = max(peaks, largest);
    }
    finite = sum((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])) == 0.0f;
    return max(peaks);
}

const v8i kEach = {0, 1, 2, 3, 4, 5, 6, 7};

PENSTOCK_INLINE void take_noisy(Best& best, v8i ids, v8 x, float temperature, uint64_t key) {
    const v8 scores = x + splat(temperature) * gumbel(hashes(ids, key));
    for (int lane = 0; lane < kLanes; lane++) best.take({scores[lane], ids[lane]});
}

// The best of some blocks, of which hardly a token needs more than its random bits to be ruled out; `first` is the first
// token of the row.
inline Best best_of(const Row& row, int from, int to, int first, float temperature, uint64_t key) {
    constexpr int kTogether = 4;
    Best best;
    for (int b = from; b < to; b++) {
        const float peak = max(row.largest(b));
        if (!(peak + temperature * kMostNoise > best.score)) continue;
        const v8u most = splat_bits(bits_for((best.score - peak) / temperature));
        for (int i = 0; i < kBlock; i += kTogether * kLanes) {
            v8i hits[kTogether];
            for (int j = 0; j < kTogether; j++)
                hits[j] = hashes(kEach + splat_int(first + b * kBlock + i + j * kLanes), key) <= most;
            if (!any((hits[0] | hits[1]) | (hits[2] | hits[3]))) continue;
            for (int j = i; j < i + kTogether * kLanes; j += kLanes)
                take_noisy(best, kEach + splat_int(first + b * kBlock + j), load(row.block(b) + j), temperature, key);
        }
    }
    return best;
}

// The best of the candidates with a logit of at least `least`; greedy where the temperature is 0.
inline Best best_of(const Candidates& some, float least, float peak, float temperature, uint64_t key) {
    Best best;
    v8u most = splat_bits(0xffffffffu);
    for (int i = 0; i < some.count; i += kLanes) {
        v8i ids;
        std::memcpy(&ids, &some.ids[i], sizeof ids);
        const v8 x = load(&some.logits[i]);
        const v8i kept = x >= splat(least);
        if (!any(kept & (hashes(ids, key) <= most))) continue;
        take_noisy(best, ids, kept ? x : splat(-kInfinity), temperature, key);
        most = splat_bits(bits_for((best.score - peak) / temperature));
    }
    return best;
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
    for (int i = from; i < to;) {
        v8i some = splat_int(1);
        if (i + kLanes <= to) std::memcpy(&some, codes + i, sizeof some);
        if (!any(some > splat_int(0))) {
            i += kLanes;
            continue;
        }
        if (codes[i] > 0) x[i] = penalised(row, x[i], codes[i]);
        i++;
    }
}

// `pairs`: see SamplingTables.biases.
inline void add_biases(const SamplingRow& row, const int32_t* pairs, int count, int number, int first, int from, int to,
                       float* x) {
    for (int i = 0; i < count; i++) {
        const int code = pairs[2 * i], id = (code < 0 ? -1 - code : code) - first;
        if (id < from || id >= to) continue;
        float value;
        std::memcpy(&value, pairs + 2 * i + 1, sizeof value);
        x[id] += code < 0 && number < row.min_tokens ? -kInfinity : value;
    }
}

static_assert(kBlock % 32 == 0, "a word of a mask lies in one block");

// 32 bits of a mask from a bit on; beyond its words they are 0.
inline uint32_t bits_from(const uint32_t* mask, int words, int bit) {
    const int at = bit / 32, shift = bit % 32;
    if (shift == 0) return mask[at];
    return mask[at] >> shift | (at + 1 < words ? mask[at + 1] << (32 - shift) : 0);
}

// `mask` is a row's, of which the logits begin with bit `first`; a piece begins with a block.
inline void apply_mask(const uint32_t* mask, int words, int first, int from, int to, float* x) {
    const v8i bits = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = from; i < to; i += 32) {
        const uint32_t word = bits_from(mask, words, first + i);
        if (word == 0xffffffffu) continue;
        if (word == 0 && i + 32 <= to) {
            std::fill_n(x + i, 32, -kInfinity);
        } else if (i + 32 <= to) {
            for (int j = 0; j < 32; j += kLanes) {
                const v8i some = splat_int(static_cast<int>(word >> j)) & bits;
                store(x + i + j, some != splat_int(0) ? load(x + i + j) : splat(-kInfinity));
            }
        } else {
            for (int j = i; j < to; j++)
                if (!(word >> (j - i) & 1)) x[j] = -kInfinity;
        }
    }
}

// ---- the program -----------------------------------------------------------------------------------------------

// What a row's blocks, or some of them, have told.
struct Piece {
    Best best;                // without filters
    float peak = -kInfinity;  // after biases and penalties
    bool finite = true;

    void join(const Piece& other) {
        best.take(other.best);
        peak = std::max(peak, other.peak);
        finite = finite && other.finite;
    }
};

// What a row needs while it is worked on; `left` counts the pieces that are not scanned.
struct RowScratch {
    Buffer<float> logits;  // with biases and penalties
    Buffer<float> maxima;
    float last[kBlock];
    Candidates candidates;
    std::vector<Piece> pieces;
    std::atomic<int> left;
};

class Chooser {
   public:
    explicit Chooser(Team& team) : team_(team), scratch_(team.size()) {}

    // False where a seat does not exist; nothing has been done then.
    bool choose(const ChooseArgs& args) {
        for (int row = 0; row < args.num_rows; row++)
            if (args.seats[row] >= args.num_seats) return false;
        args_ = &args;
        num_blocks_ = blocks_of(args.num_logits);
        reserve();
        const int most = args.num_rows < team_.size() ? team_.size() : 1;
        num_pieces_ = std::clamp(num_blocks_ / kSmallestPiece, 1, most);
        for (RowScratch& scratch : scratch_) scratch.left = num_pieces_;
        run_chunks(team_, static_cast<uint32_t>(args.num_rows * num_pieces_), [this](uint32_t at, int worker) {
            const int row = static_cast<int>(at) / num_pieces_;
            RowScratch& scratch = scratch_[num_pieces_ > 1 ? row : worker];
            scan_piece(row, static_cast<int>(at) % num_pieces_, scratch);
            if (scratch.left.fetch_sub(1) == 1) finish(row, scratch);
        });
        return true;
    }

   private:
    static constexpr int kSmallestPiece = 64;  // blocks

    // Touched only by the rows that need it.
    void reserve() {
        if (num_blocks_ <= reserved_) return;
        reserved_ = 0;
        for (RowScratch& scratch : scratch_) {
            scratch.logits = allocate<float>(num_blocks_ * kBlock);
            scratch.maxima = allocate<float>(num_blocks_ * kLanes);
            scratch.candidates.reserve(num_blocks_ * kBlock);
            scratch.pieces.resize(team_.size());
        }
        reserved_ = num_blocks_;
    }

    const float* raw(int row) const { return args_->logits + static_cast<size_t>(row) * args_->num_logits; }

    // Without the filters that this step leaves out.
    SamplingRow settings(int row) const {
        SamplingRow s = args_->table[args_->seats[row]];
        if (!args_->top_k || s.top_k >= args_->vocab) s.top_k = 0;
        if (!args_->top_p) s.top_p = 1.0f;
        if (!args_->top_k && !args_->top_p) s.min_p_depth = kInfinity;
        return s;
    }

    int32_t* counts(int row) const {
        const int at = settings(row).counts_row;
        if (at < 0 || at >= args_->num_counts) return nullptr;
        return args_->counts + static_cast<size_t>(at) * args_->vocab + args_->first;
    }

    bool is_adjusted(int row) const {
        return args_->masks != nullptr || settings(row).num_biases > 0 || counts(row) != nullptr;
    }

    // Whether the token can be found without knowing the row's largest logit.
    bool is_unfiltered(int row) const { return !settings(row).is_greedy() && !settings(row).has_filters(); }

    // The logits that the token is chosen from.
    Row chosen_from(int row, RowScratch& scratch) const {
        float* x = scratch.logits.get();
        if (is_adjusted(row)) return {x, x + (num_blocks_ - 1) * kBlock, num_blocks_, scratch.maxima.get()};
        return {raw(row), scratch.last, num_blocks_, scratch.maxima.get()};
    }

    uint64_t key(int row) const { return noise_key(settings(row).state, args_->numbers[row]); }

    void scan_piece(int row, int number, RowScratch& scratch) const {
        Piece& piece = scratch.pieces[number] = {};
        piece.finite = args_->seats[row] >= 0;
        if (!piece.finite) return;
        const int from = number * num_blocks_ / num_pieces_, to = (number + 1) * num_blocks_ / num_pieces_;
        if (to == num_blocks_) {  // filled up with what is finite, and larger than no logit
            std::fill_n(scratch.last, kBlock, -FLT_MAX);
            std::copy(raw(row) + (to - 1) * kBlock, raw(row) + args_->num_logits, scratch.last);
        }
        const Row adjusted = chosen_from(row, scratch);
        piece.peak = scan({raw(row), scratch.last, num_blocks_, adjusted.maxima}, from, to, piece.finite);
        if (is_adjusted(row)) {
            adjust(row, from * kBlock, std::min(to * kBlock, args_->num_logits), scratch.logits.get());
            bool ignored;  // a ban is infinite
            piece.peak = scan(adjusted, from, to, ignored);
        }
        if (is_unfiltered(row))
            piece.best = best_of(adjusted, from, to, args_->first, settings(row).temperature, key(row));
    }

    void adjust(int row, int from, int to, float* x) const {
        const SamplingRow s = settings(row);
        const int32_t* biases = args_->biases + 2 * static_cast<size_t>(args_->seats[row]) * args_->max_biases;
        std::copy(raw(row) + from, raw(row) + to, x + from);
        if (to == args_->num_logits) std::fill(x + to, x + num_blocks_ * kBlock, -kInfinity);
        const int num_biases = std::min(s.num_biases, args_->max_biases), words = (args_->vocab + 31) / 32;
        add_biases(s, biases, num_biases, args_->numbers[row], args_->first, from, to, x);
        if (const int32_t* codes = counts(row)) penalise(s, codes, from, to, x);
        if (args_->masks != nullptr)
            apply_mask(args_->masks + static_cast<size_t>(row) * words, words, args_->first, from, to, x);
    }

    void finish(int row, RowScratch& scratch) const {
        Piece all;
        for (int i = 0; i < num_pieces_; i++) all.join(scratch.pieces[i]);
        scratch.left = num_pieces_;
        if (all.finite && !is_unfiltered(row)) all.best = best_filtered(row, all.peak, scratch);
        if (args_->candidates != nullptr) {
            int32_t* candidate = args_->candidates + 3 * row;
            std::memcpy(candidate, &all.best.score, sizeof all.best.score);
            candidate[1] = all.best.id;
            candidate[2] = !all.finite;
            return;
        }
        const int id = all.finite ? all.best.id : -1;
        args_->token_ids[row] = id;
        if (int32_t* codes = id >= 0 ? counts(row) : nullptr) codes[id] += 2;
    }

    Best best_filtered(int row, float peak, RowScratch& scratch) const {
        if (!(peak > -kInfinity)) return {};
        const float least = select(chosen_from(row, scratch), peak, settings(row), scratch.candidates);
        Best best = best_of(scratch.candidates, least, peak, settings(row).temperature, key(row));
        best.id += args_->first;  // of a part of the vocabulary only greedy rows come here, which have no noise
        return best;
    }

    Team& team_;
    std::vector<RowScratch> scratch_;  // per worker, or per row where rows are cut into pieces
    const ChooseArgs* args_ = nullptr;
    int num_blocks_ = 0, num_pieces_ = 1, reserved_ = 0;
};

}  // namespace penstock
