// Per-layer embeddings: what each layer reads of every token that no other does.
#pragma once

#include "program.h"

namespace penstock {

constexpr int kPackedRows = -1;  // the type of rows that a Linear has

// A token's row of the map of embeddings becomes that of all layers: each part is normed, and the token's own added.
inline void combine(const Op& op, int token_id, float eps, float* row) {
    const size_t width = op.linear->n;
    for (size_t at = 0; at < width; at += op.part) rms_norm(row + at, op.norm, op.part, eps, row + at);
    const auto add = [&](const auto* own) {
        for (size_t i = 0; i < width; i++) row[i] = (row[i] + to_float(own[i]) * op.scale) * 0.70710678118654752f;
    };
    if (op.rows_type == kPackedRows) {
        std::vector<float> own(width);
        static_cast<const Linear*>(op.rows)->unpack_row(token_id, own.data());
        return add(own.data());
    }
    with_type(static_cast<Type>(op.rows_type), [&](auto* w) {
        add(static_cast<const std::remove_pointer_t<decltype(w)>*>(op.rows) + token_id * width);
    });
}

}  // namespace penstock
