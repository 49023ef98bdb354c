// Drafting: a few tokens of every sequence, one pass after another, without the host between them.
#pragma once

#include "decoder.h"
#include "sample.h"

namespace penstock {

struct DraftArgs {
    Step first;          // samples the P sequences that are drafted for
    ChooseArgs choose;   // of the P rows; numbers are [length][P], token_ids are written, [length][P]
    const int32_t* ends;    // [length][P]: tokens of each sequence before its first draft, its second, ...
    const int32_t* rows;    // 0, 1, ..., P
    const int32_t* tables;  // [P][first.max_blocks]
    float* hidden;          // [P][hidden], working memory
    float* logits;          // [P][vocab], working memory; of tokens that are not drafted, what is never chosen
    const int32_t* drafted;  // the tokens whose logits the output head makes, or null: all
    float* narrow;           // [P][drafted], working memory, if not all
    int32_t width;          // of a row of `hidden`
    int32_t num_drafted;
    int32_t length;
};

// Puts the logits that there are where those of all tokens are.
inline void spread(const DraftArgs& args, int rows) {
    for (int r = 0; r < rows; r++) {
        const float* from = args.narrow + static_cast<size_t>(r) * args.num_drafted;
        float* to = args.logits + static_cast<size_t>(r) * args.choose.vocab;
        for (int i = 0; i < args.num_drafted; i++) to[args.drafted[i]] = from[i];
    }
}

// Each pass after the first computes the tokens that the one before it chose.
inline int draft(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const DraftArgs& args) {
    const int num = args.first.samples;
    ChooseArgs choose = args.choose;
    choose.logits = args.logits;
    std::vector<int32_t> known(num);
    for (int i = 0; i < args.length; i++) {
        Step step = args.first;
        if (i > 0) {
            const int32_t *before = args.ends + (i - 1) * num, *tokens = args.choose.token_ids + (i - 1) * num;
            // A row without a finite logit chose -1: its other drafts count for nothing, and those of others go on.
            for (int r = 0; r < num; r++) known[r] = std::max(tokens[r], 0);
            step = {known.data(), before, args.rows, before + num, args.tables, args.rows, num, num, step.max_blocks, num};
        }
        if (const int status = decoder.run(step, args.hidden, i > 0); status != kOk) return status;
        float* out = args.drafted ? args.narrow : args.logits;
        apply(team, head, args.hidden, static_cast<size_t>(args.width), num, out);
        if (args.drafted) spread(args, num);
        choose.numbers = args.choose.numbers + i * num;
        choose.token_ids = args.choose.token_ids + i * num;
        if (!chooser.choose(choose)) return kBadSlot;
    }
    return kOk;
}

}  // namespace penstock
