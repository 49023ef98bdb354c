// Mixers with a state: each row of a sequence is made of those before it, through a state of fixed size.
//
// First, for all rows at once, what follows from a few neighbours: the convolution, and each head's gates. Then the
// states, row after row, by columns of heads; meanwhile, what later steps need of the rows themselves goes into the
// slots. Rows that are pending in a sequence's source go through it all before those of the step.
//
// Nobody else reads or writes a slot that a sequence writes, but it may be the sequence's own source.
#pragma once

#include "gating.h"
#include "scan.h"

namespace penstock {

class StatesWork {
   public:
    enum class Part : uint32_t { convolve, advance };
    static constexpr uint32_t kParts = 2;

    StatesWork(const Model& model, int threads)
        : num_slots_(model.num_slots), slot_floats_(static_cast<size_t>(model.slot_floats)), room_(threads) {}

    // Rows that go through a mixer.
    struct Rows {
        const Mixer* mixer;
        const float* from;
        size_t ld_from;
        const float* gates;  // of a gated delta net
        size_t ld_gates;
        float* to;
        size_t ld_to;
    };

    // A new step begins.
    void start(const Step& step) {
        step_ = step;
        has_slots_ = num_slots_ > 0 && step.state_slots;
        planned_.clear();
        sequences_.clear();
        sequence_of_.clear();
        for (int i = 0; i < step.sequences; i++) sequences_.push_back(sequence(i));
        writes_.clear();
        for (int i = 0; i < step.saves && has_slots_; i++) {
            const int32_t* save = step.state_saves + 4 * i;
            if (save[0] >= 0) writes_.push_back({save[0], save[1], save[2], save[3]});
        }
        for (int i = 0; i < step.sequences; i++)
            if (const Sequence& own = sequences_[i]; own.target)
                writes_.push_back({i, own.certain, own.target, own.tokens - own.certain});
        std::stable_sort(writes_.begin(), writes_.end(),
                         [](const Write& a, const Write& b) { return a.sequence < b.sequence; });
        for (size_t w = writes_.size(); w-- > 0;) sequences_[writes_[w].sequence].first_write = static_cast<int>(w);
        order_.resize(sequences_.size());
        for (size_t i = 0; i < order_.size(); i++) order_[i] = static_cast<int>(i);
        std::stable_sort(order_.begin(), order_.end(),
                         [&](int a, int b) { return sequences_[a].rows() > sequences_[b].rows(); });
    }

    // Adds the phases by add(argument, chunks, kind); run(argument, chunk, worker) does them.
    template <class Add>
    void plan(const Rows& of, const Add& add) {
        const Mixer& m = *of.mixer;
        const int rows = static_cast<int>(sequence_of_.size()), threads = static_cast<int>(room_.size());
        Plan plan{of, 1, 1, 0};
        plan.pieces = std::max(1, kChannelsTogether / kPiece / std::clamp(rows, 1, 4));
        const int heads = static_cast<int>(order_.size()) * m.heads;
        plan.blocks = std::clamp(heads * blocks(m) / (threads * 16), 1, std::max(1, blocks(m)));
        plan.kept = writes_.empty() ? 0 : divide_up(m.channels, kChannelsTogether);
        reserve(m, rows);
        const uint32_t number = static_cast<uint32_t>(planned_.size()) * kParts;
        planned_.push_back(plan);
        const int of_rows = divide_up(rows, kRowsPerChunk), of_heads = heads * divide_up(blocks(m), plan.blocks);
        add(number + static_cast<uint32_t>(Part::convolve), of_rows * divide_up(pieces(m), plan.pieces), Kind::conv);
        add(number + static_cast<uint32_t>(Part::advance), step_.sequences * plan.kept + of_heads, Kind::state);
    }

    void run(uint32_t argument, int chunk, int worker) {
        const Plan& plan = planned_[argument / kParts];
        if (static_cast<Part>(argument % kParts) == Part::convolve) return convolve(plan, chunk);
        const int keeping = step_.sequences * plan.kept;
        if (chunk < keeping) return keep(plan, chunk / plan.kept, chunk % plan.kept * kChannelsTogether);
        advance(plan, chunk - keeping, room_[worker].state.get());
    }

   private:
    static constexpr int kPiece = 128, kChannelsTogether = 2048;

    struct Sequence {
        int source, target, replayed, certain, tokens;
        int first;        // of all rows, replayed ones included
        int first_token;
        int first_write;  // or -1

        int rows() const { return replayed + tokens; }
    };

    // The state after so many rows of a sequence in this step goes to a slot, and so many of the next become pending.
    struct Write {
        int sequence, rows, slot, kept;
    };

    struct Plan {
        Rows of;
        int pieces;  // per chunk
        int blocks;  // of columns, per chunk
        int kept;    // chunks for each sequence, of what goes into slots beside states
    };

    // A row of channels: what is at `x`, times what is at `by`, if there is any.
    struct Channels {
        const float *x, *by;
    };

    struct Room {
        Buffer<float> state;
        int keys = 0;
    };

    Sequence sequence(int i) {
        const int from = step_.query_starts[i], tokens = step_.query_starts[i + 1] - from;
        Sequence own{0, 0, 0, tokens, tokens, static_cast<int>(sequence_of_.size()), from, -1};
        if (has_slots_) {
            const int32_t* slots = step_.state_slots + 4 * i;
            own.source = slots[0], own.target = slots[1], own.replayed = slots[2], own.certain = slots[3];
        }
        sequence_of_.insert(sequence_of_.end(), own.rows(), i);
        return own;
    }

    void reserve(const Mixer& m, int rows) {
        ld_ = std::max(ld_, padded(m.channels + 2 * m.heads));
        if (m.heads && rows * ld_ > capacity_) {
            convolved_ = allocate_hot<float>(rows * ld_);
            capacity_ = rows * ld_;
        }
        if (m.channels > num_zeros_) {
            zeros_ = allocate<float>(m.channels);
            num_zeros_ = m.channels;
            std::memset(zeros_.get(), 0, num_zeros_ * sizeof(float));
        }
        for (Room& room : room_)
            if (m.keys > room.keys) {
                room.state = allocate<float>(static_cast<size_t>(m.keys) * kColumns);
                room.keys = m.keys;
            }
    }

    static int blocks(const Mixer& m) { return divide_up(m.values, kColumns); }

    // Queries and keys of each head, runs of other channels, and the gates.
    static int normed_heads(const Mixer& m) { return m.kind == MixerKind::delta ? 2 * m.key_heads : 0; }
    static int runs(const Mixer& m) { return divide_up(m.channels - normed_heads(m) * m.keys, kPiece); }
    static int pieces(const Mixer& m) { return normed_heads(m) + runs(m) + (m.heads > 0); }

    float* row(int r) const { return convolved_.get() + r * ld_; }

    float* in_slot(float* part, int slot) const { return part + slot * slot_floats_; }

    float* pending(const Mixer& m, int slot, int number) const {
        return in_slot(m.pending, slot) + number * m.row_floats();
    }

    // Of a row of a sequence, counted from its first one, or of one before.
    Channels channels(const Rows& of, const Sequence& own, int number) const {
        const Mixer& m = *of.mixer;
        if (number >= own.replayed) {
            const float* token = of.from + (own.first_token + number - own.replayed) * of.ld_from;
            if (m.kind == MixerKind::conv) return {token + 2 * m.channels, token};
            return {token + m.first_channel(), nullptr};
        }
        if (own.source == 0) return {zeros_.get(), nullptr};
        if (number >= 0) return {pending(m, own.source, number), nullptr};
        return {in_slot(m.history, own.source) + (m.kernel - 1 + number) * m.channels, nullptr};
    }

    const float* gates(const Rows& of, const Sequence& own, int number) const {
        const Mixer& m = *of.mixer;
        const size_t token = own.first_token + number - own.replayed;
        if (number < own.replayed) return pending(m, own.source, number) + m.channels;
        if (m.kind == MixerKind::delta) return of.gates + token * of.ld_gates;
        return of.from + token * of.ld_from + m.first_channel() + m.channels;
    }

    // ---- rows and their neighbours -----------------------------------------------------------------------------

    void convolve(const Plan& plan, int chunk) const {
        const Mixer& m = *plan.of.mixer;
        const int together = divide_up(pieces(m), plan.pieces), rows = static_cast<int>(sequence_of_.size());
        const int from = chunk % together * plan.pieces, first = chunk / together * kRowsPerChunk;
        for (int r = first; r < std::min(rows, first + kRowsPerChunk); r++) {
            const Sequence& own = sequences_[sequence_of_[r]];
            Channels taps[kMostTaps];
            for (int tap = 0; tap < m.kernel; tap++)
                taps[tap] = channels(plan.of, own, r - own.first + tap - (m.kernel - 1));
            if (m.kind == MixerKind::conv && r - own.first < own.replayed) continue;  // nothing comes of it
            for (int p = from; p < std::min(pieces(m), from + plan.pieces); p++) convolve_piece(plan, own, r, taps, p);
        }
    }

    void convolve_piece(const Plan& plan, const Sequence& own, int r, const Channels* taps, int piece) const {
        const Mixer& m = *plan.of.mixer;
        const int heads = normed_heads(m), at = heads * m.keys + (piece - heads) * kPiece;
        const int count = std::min(kPiece, m.channels - at);
        if (piece < heads) {
            float* head = row(r) + piece * m.keys;
            convolve_run(m, taps, piece * m.keys, m.keys, head);
            const float scale = 1.0f / std::sqrt(sum_of_squares(head, m.keys) + 1e-6f);
            const bool is_query = piece < m.key_heads;
            multiply(head, m.keys, is_query ? scale / std::sqrt(static_cast<float>(m.keys)) : scale);
        } else if (piece == heads + runs(m)) {
            read_gates(m, gates(plan.of, own, r - own.first), row(r) + m.channels);
        } else if (m.kind == MixerKind::conv) {
            const size_t token = own.first_token + r - own.first - own.replayed;
            float* out = plan.of.to + token * plan.of.ld_to + at;
            const float* behind = plan.of.from + token * plan.of.ld_from + m.channels + at;
            convolve_run<0, true>(m, taps, at, count, out);
            let_through(behind, out, count, out, [](auto x) { return x; });
        } else {
            convolve_run(m, taps, at, count, row(r) + at);
        }
    }

    static void convolve_run(const Mixer& m, const Channels* taps, int from, int count, float* out) {
        (m.kernel == 4 ? convolve_run<4, false> : convolve_run<0, false>)(m, taps, from, count, out);
    }

    // Taps are added in their order, each product rounded; there are kTaps of them, or another number if that is 0. Then
    // there is SiLU, unless channels are products.
    template <int kTaps, bool kAreProducts>
    static void convolve_run(const Mixer& m, const Channels* taps, int from, int count, float* out) {
        const int kernel = kTaps ? kTaps : m.kernel;
        const size_t stride = m.channels;
        const float *weights = m.conv + from, *bias = m.conv_bias ? m.conv_bias + from : nullptr;
        const float *x[kMostTaps], *by[kMostTaps];
        for (int tap = 0; tap < kernel; tap++) {
            x[tap] = taps[tap].x + from;
            by[tap] = taps[tap].by ? taps[tap].by + from : nullptr;
        }
        for_vectors(count, PENSTOCK_VECTORS(v, i, left) {
            using V = decltype(v);
            V sum = bias ? load_first<V>(bias + i, left) : V{};
            for (int tap = 0; tap < kernel; tap++) {
                V channels = load_first<V>(x[tap] + i, left);
                if (kAreProducts && by[tap]) channels = channels * load_first<V>(by[tap] + i, left);
                sum = sum + channels * load_first<V>(weights + tap * stride + i, left);
            }
            store_first(out + i, kAreProducts ? sum : silu(sum), left);
        });
    }

    // Writes how much of each head's state stays, [heads], and what its values are multiplied by, [heads].
    static void read_gates(const Mixer& m, const float* gates, float* out) {
        const float* steps = m.kind == MixerKind::delta ? gates + m.heads : gates;
        for (int h = 0; h < m.heads; h += kLanes) {
            const int count = m.heads - h;
            v8 step = softplus(load_first<v8>(steps + h, count) + load_first<v8>(m.step_bias + h, count)), weight;
            if (m.kind == MixerKind::delta) {
                weight = sigmoid(load_first<v8>(gates + h, count));
            } else {
                const v8 least = splat(m.least_step), most = splat(m.most_step);
                weight = step = step < least ? least : (step > most ? most : step);
            }
            store_first(out + h, exp(load_first<v8>(m.decay + h, count) * step), count);
            store_first(out + m.heads + h, weight, count);
        }
    }

    // ---- states ------------------------------------------------------------------------------------------------

    // Some columns of a head of a sequence.
    void advance(const Plan& plan, int chunk, float* state) const {
        const Mixer& m = *plan.of.mixer;
        const int chunks = divide_up(blocks(m), plan.blocks), block = chunk % chunks * plan.blocks;
        const int sequence = order_[chunk / chunks / m.heads], head = chunk / chunks % m.heads;
        for (int b = block; b < std::min(blocks(m), block + plan.blocks); b++)
            advance_columns(plan, sequence, head, b * kColumns, state);
    }

    void advance_columns(const Plan& plan, int sequence, int head, int from, float* state) const {
        const Mixer& m = *plan.of.mixer;
        const Sequence& own = sequences_[sequence];
        const int count = std::min(kColumns, m.values - from);
        const size_t place = (static_cast<size_t>(head) * m.values + from) * m.keys;
        if (own.source)
            read_columns(in_slot(m.state, own.source) + place, m.keys, count, state);
        else
            std::memset(state, 0, static_cast<size_t>(m.keys) * kColumns * sizeof(float));
        const bool is_delta = m.kind == MixerKind::delta;
        const int width = m.key_heads * m.keys, key_at = m.key_head(head) * m.keys;
        const int values = (is_delta ? 2 * width : 0) + head * m.values + from;
        const int keys = (is_delta ? width : m.width()) + key_at, queries = is_delta ? key_at : keys + width;
        alignas(64) float change[kColumns] = {}, found[kColumns], made[kColumns];
        write_states(m, sequence, -own.replayed, count, place, state);
        for (int number = 0; number < own.rows(); number++) {
            const float *x = row(own.first + number), *by = x + m.channels + head;
            if (number + 1 < own.rows()) fetch(x + ld_, keys, queries, values, m.keys);
            const float shrink = by[0], weight = by[m.heads];
            std::memcpy(change, x + values, count * sizeof(float));
            if (is_delta) {
                find(state, x + keys, m.keys, found);
                for (int i = 0; i < kColumns; i += kWide)
                    store(change + i, all<wide>(weight) *
                                          (load_as<wide>(change + i) - load_as<wide>(found + i) * all<wide>(shrink)));
            } else {
                multiply(change, kColumns, weight);
            }
            update(state, shrink, x + keys, change, x + queries, m.keys, made);
            const int token = number - own.replayed;
            write_states(m, sequence, token + 1, count, place, state);
            if (token < 0) continue;
            float* out = plan.of.to + (own.first_token + token) * plan.of.ld_to + head * m.values + from;
            if (!is_delta)
                for (int i = 0; i < count; i++) made[i] += m.skip[head] * x[values + i];
            std::memcpy(out, made, count * sizeof(float));
        }
    }

    static void fetch(const float* x, int keys, int queries, int values, int num_keys) {
        for (int i = 0; i < num_keys; i += 16) __builtin_prefetch(x + keys + i), __builtin_prefetch(x + queries + i);
        __builtin_prefetch(x + values);
        __builtin_prefetch(x + values + 16);
    }

    // Those that are to be kept after so many rows of this step.
    void write_states(const Mixer& m, int sequence, int rows, int count, size_t place, const float* state) const {
        for_writes(sequence, [&](const Write& write) {
            if (write.rows == rows) write_columns(state, m.keys, count, in_slot(m.state, write.slot) + place);
        });
    }

    template <class Function>
    void for_writes(int sequence, const Function& function) const {
        for (size_t w = sequences_[sequence].first_write; w < writes_.size() && writes_[w].sequence == sequence; w++)
            function(writes_[w]);
    }

    // ---- what later rows need of these -------------------------------------------------------------------------

    // The next numbers of rows, from one channel on, go into the slots; the last of them bring the gates with them. The
    // target comes last: it may be the source.
    void keep(const Plan& plan, int sequence, int from) const {
        const Mixer& m = *plan.of.mixer;
        const Sequence& own = sequences_[sequence];
        const int count = std::min(kChannelsTogether, m.channels - from);
        const auto copy = [&](int number, float* to) {
            const Channels channels = this->channels(plan.of, own, number);
            if (!channels.by) return (void)std::memmove(to + from, channels.x + from, count * sizeof(float));
            for (int c = from; c < from + count; c++) to[c] = channels.x[c] * channels.by[c];
        };
        for_writes(sequence, [&](const Write& write) {
            const int next = own.replayed + write.rows;
            for (int i = 0; i < m.kernel - 1; i++)
                copy(next - (m.kernel - 1) + i, in_slot(m.history, write.slot) + i * m.channels);
            for (int i = 0; i < write.kept; i++) {
                float* to = pending(m, write.slot, i);
                copy(next + i, to);
                if (m.gates() && from + count == m.channels)
                    std::memcpy(to + m.channels, gates(plan.of, own, next + i), m.gates() * sizeof(float));
            }
        });
    }

    static constexpr int kMostTaps = 64;

    const int num_slots_;
    const size_t slot_floats_;
    Step step_{};
    bool has_slots_ = false;
    std::vector<Sequence> sequences_;
    std::vector<int> sequence_of_;  // of all rows, replayed ones included
    std::vector<int> order_;        // the longest sequences first
    std::vector<Write> writes_;     // by sequence
    std::vector<Plan> planned_;

    size_t ld_ = 0, capacity_ = 0;
    int num_zeros_ = 0;
    Buffer<float> convolved_;  // [rows][ld_]: channels, how much of each head's state stays, what its values are times
    Buffer<float> zeros_;
    std::vector<Room> room_;  // per worker: some columns of a head
};

}  // namespace penstock
