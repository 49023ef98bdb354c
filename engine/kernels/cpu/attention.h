// Attention over the paged KV cache.
//
// The order of sums is fixed by absolute positions alone: spans of 128 tokens, ascending, are folded one after
// another into the running maximum, sum and output. A span or block that a row cannot see contributes exactly
// nothing, so neither the batch nor the cut of a prompt into chunks changes a bit.
//
// The products are those of floats or of tiles. Which it is depends on the build and the type of the cache, and never
// on the step, because their orders of sums differ. Vectors that give the bits of tiles stand in for these where rows
// are few.
#pragma once

#include "attention_floats.h"
#include "attention_vectors.h"

namespace penstock {

inline void to_operands(const float* x, int n, int, float* out) { std::memcpy(out, x, n * sizeof(float)); }

#if PENSTOCK_TILES
inline void to_operands(const float* x, int n, int, WideOperand* out) {
    for (int i = 0; i < n; i += kLanes) store_operands(out + i, load(x + i));
}
#endif

// Copies the queries of one kv head in and says what each row sees.
template <class Operand>
void start_rows(const AttentionStep& step, const Task& task, int kv_head, const Rows<Operand>& rows) {
    const int d = rows.head_dim, group = step.shape->group();
    for (int r = 0; r < rows.count; r++) {
        const int token = task.token + r / group, position = step.positions[token];
        const float* q = step.qkv + token * step.ld + (kv_head * group + r % group) * d;
        to_operands(q, d, static_cast<int>(rows.q_stride), rows.q + r * rows.q_stride);
        rows.first[r] = first_seen(step, position);
        rows.limit[r] = position + 1;
        rows.peak[r] = -std::numeric_limits<float>::infinity();
    }
    std::memset(rows.total, 0, rows.count * kBlockTokens * sizeof(float));
    if (const float* sinks = step.shape->sinks)
        for (int r = 0; r < rows.count; r++) {
            rows.peak[r] = sinks[kv_head * group + r % group] * 1.44269504088896341f;  // a power of 2, as scores are
            rows.total[r * kBlockTokens] = 1.0f;
        }
    std::memset(rows.out, 0, rows.count * rows.out_stride * sizeof(float));
}

template <class Operand>
void finish_rows(const AttentionStep& step, const Task& task, int kv_head, const Rows<Operand>& rows) {
    const int d = rows.head_dim, group = step.shape->group();
    for (int r = 0; r < rows.count; r++) {
        float* out = step.out + (task.token + r / group) * step.ldo + (kv_head * group + r % group) * d;
        const v8 total = splat(total_of(rows, r));
        for (int i = 0; i < d; i += kLanes) store(out + i, load(rows.out + r * rows.out_stride + i) / total);
    }
}

// Several heads of a task advance together, span by span: their parts of a block are neighbours in memory.
template <class W, class Products>
void attend_by(const AttentionStep& step, const Task& task, AttentionScratch& scratch) {
    const Shape& shape = *step.shape;
    const int count = task.tokens * shape.group(), padded = kRowLimits<W>.padded(count);
    const int first = step.positions[task.token], end = step.positions[task.token + task.tokens - 1] + 1;
    const int begin = first_seen(step, first), lowest = begin / kBlockTokens;
    const auto buffers = scratch.rows<typename Products::Operand>(shape);
    const auto rows = [&](int head) { return buffers.part(head * padded, count); };
    const auto history = [&](int head) { return History<W>(step, task, task.kv_head + head, end); };
    for (int b = lowest; b < lowest + kSpanBlocks; b++)
        fetch(history(0).keys(b).elements, 0, shape.head_elements() * sizeof(W));
    Products::begin(count);
    for (int head = 0; head < task.kv_heads; head++) start_rows(step, task, task.kv_head + head, rows(head));
    for (int at = begin / kSpan * kSpan; at < end; at += kSpan) {
        const int block = std::max(at / kBlockTokens, lowest);
        const SpanTokens tokens{at, block * kBlockTokens, std::min(at + kSpan, end)};
        for (int head = 0; head < task.kv_heads; head++) {
            const bool more = head + 1 < task.kv_heads;
            const Span<W> span = make_span(history(head), block, tokens.blocks(), history(more ? head + 1 : 0),
                                           more ? block : block + tokens.blocks());
            Products::advance(rows(head), span, tokens, scratch);
        }
    }
    for (int head = 0; head < task.kv_heads; head++) finish_rows(step, task, task.kv_head + head, rows(head));
}

template <class W>
void attend(const AttentionStep& step, const Task& task, AttentionScratch& scratch) {
#if PENSTOCK_TILES
    if constexpr (kIsTiled<W>) {
        const FlushedDenormals flushed;  // by tiles and by vectors alike
        if (task.tokens * step.shape->group() <= kFewRows)
            return attend_by<W, VectorProducts<W>>(step, task, scratch);
        return attend_by<W, TileProducts<W>>(step, task, scratch);
    } else
#endif
        attend_by<W, FloatProducts<W>>(step, task, scratch);
}

// What a decoder does with a cache of one storage type.
struct Attention {
    void (*place)(const AttentionStep&, int token, size_t block);
    void (*attend)(const AttentionStep&, const Task&, AttentionScratch&);
    RowLimits limits;
};

inline Attention attention_over(Type kv_type) {
    return with_kv_type(kv_type, [&](auto* w) {
        using W = std::remove_pointer_t<decltype(w)>;
        return Attention{&place_token<W>, &attend<W>, kRowLimits<W>};
    });
}

}  // namespace penstock
