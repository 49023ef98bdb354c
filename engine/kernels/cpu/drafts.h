// Drafting: a few tokens of every sequence, one pass after another, without the host between them.
#pragma once

#include "decoder.h"
#include "sample.h"

namespace penstock {

struct DraftArgs {
    Step first;         // its first P sequences are drafted for, and sample their last rows
    ChooseArgs choose;  // of the P rows; token_ids are written, [counts[0]][P], where there is a draft
    const int32_t* counts;  // [P]: the drafts of each sequence; none has more than the one before it
    const int32_t* rows;    // 0, 1, ..., P
    float* hidden;          // [P][hidden], working memory
    float* logits;          // [P][vocab], working memory; of tokens that are not drafted, what is never chosen
    const int32_t* drafted;  // the tokens whose logits the output head makes, or null: all
    float* narrow;           // [P][drafted], working memory, if not all
    int32_t width;          // of a row of `hidden`
    int32_t num_drafted;
};

// Puts the logits that there are where those of all tokens are.
inline void spread(const DraftArgs& args, int rows) {
    for (int r = 0; r < rows; r++) {
        const float* from = args.narrow + static_cast<size_t>(r) * args.num_drafted;
        float* to = args.logits + static_cast<size_t>(r) * args.choose.vocab;
        for (int i = 0; i < args.num_drafted; i++) to[args.drafted[i]] = from[i];
    }
}

// Each pass after the first computes the tokens that the one before it chose, of the sequences that want more drafts.
inline int draft(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const DraftArgs& args) {
    const Step& first = args.first;
    const int all = first.samples;
    ChooseArgs choose = args.choose;
    choose.logits = args.logits;
    std::vector<int32_t> known(all), positions(all), contexts(first.context_lens, first.context_lens + all);
    std::vector<int32_t> numbers(choose.numbers, choose.numbers + all);
    choose.numbers = numbers.data();
    if (all == 0) return decoder.run(first, args.hidden);
    Step step = first;
    for (int i = 0, num = all; i < args.counts[0]; i++) {
        while (args.counts[num - 1] <= i) num--;
        if (i > 0) {
            for (int r = 0; r < num; r++) {
                // A row without a finite logit chose -1: its other drafts count for nothing, and those of others go on.
                known[r] = std::max(choose.token_ids[r], 0);
                positions[r] = contexts[r]++;
                numbers[r]++;
            }
            step = {known.data(), positions.data(), args.rows, contexts.data(), first.block_tables, args.rows, num, num,
                    first.max_blocks, num};
            choose.token_ids += all;
        }
        if (const int status = decoder.run(step, args.hidden, i > 0); status != kOk) return status;
        float* out = args.drafted ? args.narrow : args.logits;
        apply(team, head, args.hidden, static_cast<size_t>(args.width), num, out);
        if (args.drafted) spread(args, num);
        choose.num_rows = num;
        if (!chooser.choose(choose)) return kBadSlot;
    }
    return kOk;
}

}  // namespace penstock
