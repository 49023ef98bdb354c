// Packs weights from rows of ggml's blocks, as they lie in a GGUF file: see blocks.cpp.
#pragma once

#include "panels.h"

namespace penstock {

struct LinearSource;

// ggml's types; TYPES of quant/storages/gguf.py has their names in the same order.
enum class BlockType : int32_t { q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4 };

// A weight of one type, which may be one of several that are packed as one.
struct BlockRows {
    const uint8_t* rows;
    int64_t row_bytes;     // from one row to the next
    BlockType type;
    int32_t num_rows;
    int32_t raised;        // what is added to its integers, where others have offsets and it has none
    int32_t fault;         // set to what is not finite: 1 for scales, 2 for offsets, 3 for both
    const int32_t* order;  // [num_rows]: the row for each of ours; or null
};

struct BlocksSource {
    const LinearSource* linear;  // without weight, values and units, whose types are those that they are packed as
    int32_t has_offset, num_parts;
    BlockRows* parts;
};

// Null if there is a fault in a part, or no such linear.
std::unique_ptr<Linear> pack_blocks(Team& team, const BlocksSource& source);

}  // namespace penstock
