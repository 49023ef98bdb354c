// Steps that need hardly anything of the host but words: all else is in the table of sequences and in those of sampling.
#pragma once

#include "decoder.h"
#include "inputs.h"
#include "sample.h"

namespace penstock {

// What all steps of a model have in common.
struct StepTables {
    int32_t* words;  // of the table of sequences, as a whole
    int32_t *lengths, *prompt_lens, *last_tokens, *dropped, *block_tables;
    int32_t num_rows, max_blocks;
    int32_t num_tables;  // block tables of a sequence, whose entries for the same tokens lie side by side
    int32_t width;       // of a row of hidden states
    ChooseArgs choose;   // its tables
    const int32_t* choosable;  // the tokens whose logits the output head makes, no others are chosen; or null: all
    int32_t num_choosable;
};

struct TableStep {
    const int32_t* words;  // what follows, one after another
    int32_t num_sequences, num_tokens, num_changes;
    int32_t num_blocks;  // no sequence has more, in all its tables
    int32_t top_k, top_p;
    int32_t has_states, num_saves;

    const int32_t* seats() const { return words; }                              // [num_sequences]
    const int32_t* starts() const { return seats() + num_sequences; }           // [num_sequences + 1]: of their tokens
    const int32_t* token_ids() const { return starts() + num_sequences + 1; }   // -1 is the one that was sampled last
    const int32_t* places() const { return token_ids() + num_tokens; }          // words of the table that get
    const int32_t* values() const { return places() + num_changes; }            // new values before the step
    const int32_t* state_slots() const { return values() + num_changes; }       // [num_sequences][4], if it has states:
    const int32_t* state_saves() const { return state_slots() + 4 * num_sequences; }  // [num_saves][4], see Step
    size_t size() const {
        return 2 * num_sequences + 1 + num_tokens + 2 * num_changes + (has_states ? 4 * (num_sequences + num_saves) : 0);
    }
};

// Makes the inputs of one step after another.
class TableInputs {
   public:
    explicit TableInputs(const StepTables& tables) : tables_(tables) {}

    // What is made is valid until the next call.
    Status make(const TableStep& step) {
        for (int i = 0; i < step.num_changes; i++) tables_.words[step.places()[i]] = step.values()[i];
        const size_t num = step.num_sequences, num_entries = num * step.num_blocks;
        blocks_.resize(tables_.num_tables > 1 ? num_entries : 0);
        made_ = {tables_.lengths, tables_.prompt_lens, tables_.last_tokens, tables_.dropped, tables_.block_tables,
                 tables_.num_rows, tables_.max_blocks, step.seats(), step.starts(), step.token_ids(), step.num_sequences,
                 step.num_tokens, step.num_blocks, nullptr};
        words_.resize(made_.size());
        made_.out = words_.data();
        state_slots_ = step.has_states ? step.state_slots() : nullptr;
        state_saves_ = step.has_states ? step.state_saves() : nullptr;
        num_saves_ = step.num_saves;
        return step.starts()[num] == step.num_tokens ? gather(made_) : kBadStarts;
    }

    const GatherArgs& made() const { return made_; }

    Step step(const int32_t* sample_rows, int samples) {
        return {made_.out_token_ids(), made_.positions(), made_.query_starts, made_.context_lens(), block_tables(),
                sample_rows, made_.num_tokens, made_.num_sequences, made_.num_blocks / tables_.num_tables, samples,
                state_slots_, state_saves_, num_saves_, made_.rotary_positions()};
    }

    // 0, 1, ..., num - 1: valid until more are asked for.
    const int32_t* counting(int num) {
        while (static_cast<int>(counting_.size()) < num) counting_.push_back(static_cast<int32_t>(counting_.size()));
        return counting_.data();
    }

   private:
    // [num_tables][sequences][blocks]
    const int32_t* block_tables() {
        const int32_t* entries = made_.out_block_tables();
        if (tables_.num_tables == 1) return entries;
        int32_t* out = blocks_.data();
        for (int table = 0; table < tables_.num_tables; table++)
            for (int i = table; i < made_.num_sequences * made_.num_blocks; i += tables_.num_tables) *out++ = entries[i];
        return blocks_.data();
    }

    const StepTables tables_;
    GatherArgs made_{};
    const int32_t *state_slots_ = nullptr, *state_saves_ = nullptr;
    int num_saves_ = 0;
    std::vector<int32_t> words_, blocks_, counting_;
};

// Chooses the token that follows each of some rows from their hidden states.
class RowChooser {
   public:
    RowChooser(Team& team, const Linear& head, Chooser& chooser, const StepTables& tables)
        : team_(team), head_(head), chooser_(chooser), tables_(tables) {}

    // False if a seat does not exist.
    bool choose(const TableStep& step, const float* hidden, const int32_t* seats, const int32_t* numbers, int rows,
                int32_t* token_ids) {
        reserve(std::min(rows, kTogether));
        for (int from = 0; from < rows; from += kTogether) {
            ChooseArgs choose = tables_.choose;
            choose.num_rows = std::min(kTogether, rows - from);
            make_logits(hidden + static_cast<size_t>(from) * tables_.width, choose.num_rows);
            choose.logits = logits_.get();
            choose.seats = seats + from;
            choose.numbers = numbers + from;
            choose.token_ids = token_ids + from;
            choose.masks = nullptr;
            choose.top_k = step.top_k;
            choose.top_p = step.top_p;
            if (!chooser_.choose(choose)) return false;
        }
        return true;
    }

   private:
    static constexpr int kTogether = 64;  // rows of logits: where more have theirs at once, their memory is what costs
    static constexpr float kVeryUnlikely = -1e30f;

    void make_logits(const float* hidden, int rows) {
        const size_t width = tables_.width, num = tables_.num_choosable;
        float* out = tables_.choosable ? narrow_.get() : logits_.get();
        apply(team_, head_, hidden, width, rows, out);
        if (!tables_.choosable) return;
        for (int r = 0; r < rows; r++)
            for (size_t i = 0; i < num; i++)
                logits_[r * static_cast<size_t>(tables_.choose.vocab) + tables_.choosable[i]] = out[r * num + i];
    }

    void reserve(int rows) {
        if (rows <= reserved_) return;
        reserved_ = 0;
        const size_t num_logits = static_cast<size_t>(rows) * tables_.choose.vocab;
        logits_ = allocate<float>(num_logits);
        if (tables_.choosable) {
            std::fill_n(logits_.get(), num_logits, kVeryUnlikely);
            narrow_ = allocate<float>(static_cast<size_t>(rows) * tables_.num_choosable);
        }
        reserved_ = rows;
    }

    Team& team_;
    const Linear& head_;
    Chooser& chooser_;
    const StepTables tables_;
    Buffer<float> logits_, narrow_;
    int reserved_ = 0;  // rows
};

}  // namespace penstock
