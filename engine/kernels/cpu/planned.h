// What the phases of a step work on, as far as it is not their operation's alone.
#pragma once

#include "attention_tasks.h"
#include "experts.h"
#include "per_layer.h"
#include "states.h"

namespace penstock {

// A norm of rows: as the input of a linear, added to others, or as the output.
struct PlannedNorm {
    const float* x;
    size_t ldx;
    int width;
    const Op* op;
    int rows;
    const Linear* next;
    float* to;  // where it is added
};

struct Conversion {
    const float* x;
    size_t ldx;
    int rows;
    const Linear* next;
    const Op* through;  // says what is read of the rows, or of others by them; or null
    bool is_gathered;
};

struct PlannedProduct {
    Product product;
    Cut cut;
};

// A linear of each head, applied to the head's numbers of each row.
struct PlannedHeads {
    const Linear* const* linears;
    int heads;
    const float* x;
    size_t ldx, x_apart;  // between rows, and between heads
    float* out;
    size_t ldo, out_apart;
    int rows;
    Cut cut;  // of one
};

struct PlannedAttention {
    AttentionStep step;
    const std::vector<Task>* tasks;
    int rows;
};

}  // namespace penstock
