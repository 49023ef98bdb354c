// The inputs of a step made from the table of sequences; engine/kernels/sequence_table.py is the specification.
#pragma once

#include "program.h"

namespace penstock {

struct GatherArgs {
    // The table: [num_rows] each, then [num_rows][max_blocks]. The last row belongs to no seat.
    int32_t* lengths;
    const int32_t *prompt_lens, *last_tokens, *dropped, *block_tables;
    int32_t num_rows, max_blocks;
    // The step.
    const int32_t *seats, *query_starts, *token_ids;
    int32_t num_sequences, num_tokens, num_blocks;
    // What is made of it, one after another.
    int32_t* out;

    int32_t* out_token_ids() const { return out; }                                // [T]
    int32_t* positions() const { return out_token_ids() + num_tokens; }           // [T]
    int32_t* rotary_positions() const { return positions() + num_tokens; }        // [T]
    int32_t* context_lens() const { return rotary_positions() + num_tokens; }     // [S]
    int32_t* sample_rows() const { return context_lens() + num_sequences; }       // [S]
    int32_t* numbers() const { return sample_rows() + num_sequences; }            // [S]
    int32_t* out_block_tables() const { return numbers() + num_sequences; }       // [S][num_blocks]

    // The words of all of these.
    size_t size() const { return 3 * num_tokens + 3 * num_sequences + static_cast<size_t>(num_sequences) * num_blocks; }
};

inline Status check(const GatherArgs& a) {
    for (int s = 0; s < a.num_sequences; s++) {
        if (a.seats[s] < -1 || a.seats[s] >= a.num_rows - 1) return kBadSeat;
        if (a.query_starts[s] < 0 || a.query_starts[s + 1] < a.query_starts[s]) return kBadStarts;
    }
    return a.query_starts[a.num_sequences] <= a.num_tokens ? kOk : kBadStarts;
}

// The rows of padding: of a seat that nobody has, or of no sequence.
inline void blank_tokens(const GatherArgs& a, int from, int to) {
    std::fill(a.out_token_ids() + from, a.out_token_ids() + to, 0);
    std::fill(a.positions() + from, a.positions() + to, -1);
    std::fill(a.rotary_positions() + from, a.rotary_positions() + to, -1);
}

inline void gather_tokens(const GatherArgs& a, int row, int from, int to) {
    for (int t = from; t < to; t++) {
        const int id = a.token_ids[t] < 0 ? a.last_tokens[row] : a.token_ids[t];
        a.out_token_ids()[t] = std::max(0, id);  // -1 could not be sampled: its sequence ends soon
        a.positions()[t] = a.lengths[row] + t - from;
        a.rotary_positions()[t] = a.positions()[t] + a.dropped[row];
    }
}

inline void gather_sequence(const GatherArgs& a, int s) {
    const int from = a.query_starts[s], to = a.query_starts[s + 1];
    const bool is_padding = a.seats[s] < 0;
    const int row = is_padding ? a.num_rows - 1 : a.seats[s];
    if (is_padding)
        blank_tokens(a, from, to);
    else
        gather_tokens(a, row, from, to);
    const int context = is_padding ? 0 : a.lengths[row] + to - from;
    a.lengths[row] = context;
    a.context_lens()[s] = context;
    a.numbers()[s] = context - a.prompt_lens[row];
    a.sample_rows()[s] = std::max(0, to - 1);
    std::memcpy(a.out_block_tables() + static_cast<size_t>(s) * a.num_blocks,
                a.block_tables + static_cast<size_t>(row) * a.max_blocks, a.num_blocks * sizeof(int32_t));
}

// Nothing is changed where the step is refused.
inline Status gather(const GatherArgs& a) {
    const Status checked = check(a);
    if (checked != kOk) return checked;
    for (int s = 0; s < a.num_sequences; s++) gather_sequence(a, s);
    blank_tokens(a, a.query_starts[a.num_sequences], a.num_tokens);
    return checked;
}

}  // namespace penstock
