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
    float* logits;          // [P][vocab], working memory
    int32_t width;          // of a row of `hidden`
    int32_t length;
};

// Each pass after the first computes the tokens that the one before it chose.
inline int draft(Team& team, Decoder& decoder, const Linear& head, Chooser& chooser, const DraftArgs& args) {
    const int num = args.first.samples;
    ChooseArgs choose = args.choose;
    choose.logits = args.logits;
    for (int i = 0; i < args.length; i++) {
        Step step = args.first;
        if (i > 0) {
            const int32_t *before = args.ends + (i - 1) * num, *tokens = args.choose.token_ids + (i - 1) * num;
            step = {tokens, before, args.rows, before + num, args.tables, args.rows, num, num, step.max_blocks, num};
        }
        if (const int status = decoder.run(step, args.hidden); status != kOk) return status;
        apply(team, head, args.hidden, static_cast<size_t>(args.width), num, args.logits);
        choose.numbers = args.choose.numbers + i * num;
        choose.token_ids = args.choose.token_ids + i * num;
        if (!chooser.choose(choose)) return kBadSlot;
    }
    return kOk;
}

}  // namespace penstock
