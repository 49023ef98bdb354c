// Drafting: a few tokens of every sequence, one pass after another, without the host between them.
#pragma once

#include "table_steps.h"

namespace penstock {

class Drafts {
   public:
    Drafts(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const StepTables& tables)
        : decoder_(decoder), rows_(team, head, chooser, tables), inputs_(tables), width_(tables.width) {}

    // Runs the first pass, then one after another over the tokens that the one before it chose, of the sequences that want
    // more drafts.
    //
    //   counts     [num]: the drafts of the first sequences; none has more than the one before it. The others are read
    //   token_ids  [counts[0]][num]: written where there is a draft
    int run(const TableStep& first, const int32_t* counts, int num, int32_t* token_ids) {
        if (num > first.num_sequences) return kBadStarts;
        if (const Status status = inputs_.make(first); status != kOk) return status;
        const GatherArgs& made = inputs_.made();
        Step step = inputs_.step(made.sample_rows(), num);
        std::vector<int32_t> known(num), positions(num), contexts(made.context_lens(), made.context_lens() + num);
        std::vector<int32_t> numbers(made.numbers(), made.numbers() + num);
        hidden_.resize(static_cast<size_t>(num) * width_);
        const int32_t* rows = inputs_.counting(num + 1);
        if (num == 0) return decoder_.run(step, hidden_.data());
        for (int i = 0, all = num; i < counts[0]; i++, token_ids += all) {
            while (counts[num - 1] <= i) num--;
            if (i > 0) {
                for (int r = 0; r < num; r++) {
                    // A row without a finite logit chose -1: its other drafts count for nothing, and those of others go on.
                    known[r] = std::max(token_ids[r - all], 0);
                    positions[r] = contexts[r]++;
                    numbers[r]++;
                }
                step = {known.data(), positions.data(), rows, contexts.data(), step.block_tables, rows, num, num,
                        step.max_blocks, num};
            }
            if (const int status = decoder_.run(step, hidden_.data(), i > 0); status != kOk) return status;
            if (!rows_.choose(first, hidden_.data(), first.seats(), numbers.data(), num, token_ids)) return kBadSeat;
        }
        return kOk;
    }

   private:
    Decoder& decoder_;
    RowChooser rows_;
    TableInputs inputs_;
    const int width_;
    std::vector<float> hidden_;
};

}  // namespace penstock
