// Attention over the paged KV cache.
//
// The order of sums is fixed by absolute positions alone: spans of 128 tokens, ascending, are folded one after
// another into the running maximum, sum and output; every 2,048 tokens these begin anew, and what such segments left is
// merged, ascending, too. A span or block that a row cannot see contributes exactly nothing, so neither the batch nor the
// cut of a prompt into chunks changes a bit, nor whether the segments of a long context are computed by one thread or by
// many.
//
// The products are those of floats, of integers or of tiles. Which it is depends on the build and the type of the cache,
// and never on the step, because their sums differ. Vectors that give the bits of tiles stand in for these where rows are
// few.
#pragma once

#include "attention_floats.h"
#include "attention_integers.h"
#include "attention_latents.h"
#include "attention_packed.h"
#include "attention_vectors.h"

namespace penstock {

inline void to_operands(const float* x, int n, int, float* out) { std::memcpy(out, x, n * sizeof(float)); }

#if PENSTOCK_TILES
inline void to_operands(const float* x, int n, int, WideOperand* out) {
    for (int i = 0; i < n; i += kLanes) store_operands(out + i, load(x + i));
}
#endif

// Before the first token of a segment. A sink is as one more token before all that a row sees.
template <class Operand>
void start_segment(const AttentionStep& step, const HeadRange& heads, const Rows<Operand>& rows, int segment) {
    std::fill(rows.peak, rows.peak + rows.count, kNone);
    std::memset(rows.total, 0, rows.count * kBlockTokens * sizeof(float));
    std::memset(rows.out, 0, rows.count * rows.out_stride * sizeof(float));
    for (int r = 0; r < rows.count && step.shape->sinks; r++) {
        if (rows.first[r] / kSegment != segment) continue;
        rows.peak[r] = step.shape->sinks[heads.first + r % heads.count] * 1.44269504088896341f;  // a power of 2, as scores are
        rows.total[r * kBlockTokens] = 1.0f;
    }
}

// Copies the queries of some heads in and says what each row sees.
template <class Operand>
void start_rows(const AttentionStep& step, const Task& task, const HeadRange& heads, const Rows<Operand>& rows, int segment) {
    const int d = rows.head_dim;
    for (int r = 0; r < rows.count; r++) {
        const int token = task.token + r / heads.count, position = step.positions[token];
        const float* q = step.qkv + token * step.ld + (heads.first + r % heads.count) * d;
        if constexpr (std::is_integral_v<Operand>)  // the sums of its products fit 32 bits
            rows.query_scale(r) = to_integers(q, d, std::min(kMostShort, kMostSum / (127 * d)), rows.q + r * rows.q_stride);
        else
            to_operands(q, d, static_cast<int>(rows.q_stride), rows.q + r * rows.q_stride);
        rows.first[r] = first_seen(step, position);
        rows.limit[r] = position + 1;
        rows.record(r)[0] = kNone;
    }
    start_segment(step, heads, rows, segment);
}

// Adds a segment to what those before it left.
template <class Operand>
void end_segment(const Rows<Operand>& rows) {
    for (int r = 0; r < rows.count; r++)
        merge(rows.record(r), rows.value_dim, rows.peak[r], total_of(rows, r), rows.out + r * rows.out_stride);
}

template <class W>
void finish_row(const AttentionStep& step, const Task& task, const HeadRange& heads, int row, float total,
                       const float* sums) {
    const Shape& shape = *step.shape;
    float* out = step.out + (task.token + row / heads.count) * step.ldo + (heads.first + row % heads.count) * shape.head_dim;
    for (int i = 0; i < shape.value_dim(); i += kLanes) store(out + i, load(sums + i) / splat(total));
    if constexpr (kIsPacked<W>) {  // values were spread
        rotate_back(out, shape.head_dim, shape.spread());
        multiply(out, shape.head_dim, 1.0f / static_cast<float>(shape.spread()));
    }
}

template <class W, class Operand>
void finish_rows(const AttentionStep& step, const Task& task, const HeadRange& heads, const Rows<Operand>& rows,
                 bool has_records) {
    for (int r = 0; r < rows.count; r++) {
        const float* record = rows.record(r);
        if (has_records)
            finish_row<W>(step, task, heads, r, record[1], record + kRecordStart);
        else
            finish_row<W>(step, task, heads, r, total_of(rows, r), rows.out + r * rows.out_stride);
    }
}

// The query heads of a task, by the kv head that they read. All read the same latents.
class TaskHeads {
   public:
    TaskHeads(const Shape& shape, const Task& task)
        : is_latent_(shape.latent > 0), part_(task.part), each_(is_latent_ ? task.parts : shape.group()),
          kv_heads_(is_latent_ ? 1 : task.parts) {}

    int kv_heads() const { return kv_heads_; }
    int each() const { return each_; }
    int kv_head(int i) const { return is_latent_ ? 0 : part_ + i; }
    HeadRange range(int i) const { return {is_latent_ ? part_ : (part_ + i) * each_, each_}; }

   private:
    const bool is_latent_;
    const int part_, each_, kv_heads_;
};

// Leaves a segment's records. Whoever leaves the last merges those of all.
template <class W, class RowsOf>
void finish_split(const AttentionStep& step, const Task& task, const TaskHeads& heads, const RowsOf& rows) {
    Split& split = *task.split;
    const int d = step.shape->value_dim(), count = rows(0).count;
    const size_t by_segment = heads.kv_heads() * count * record_size(d);
    float* record = split.records + (task.segment - split.first) * by_segment;
    for (int head = 0; head < heads.kv_heads(); head++)
        for (int r = 0; r < count; r++, record += record_size(d)) {
            record[0] = kNone;
            merge(record, d, rows(head).peak[r], total_of(rows(head), r), rows(head).out + r * rows(head).out_stride);
        }
    if (split.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    split.left.store(split.segments, std::memory_order_relaxed);  // of the next layer
    record = split.records;
    for (int head = 0; head < heads.kv_heads(); head++)
        for (int r = 0; r < count; r++, record += record_size(d)) {
            for (int i = 1; i < split.segments; i++) {
                const float* other = record + i * by_segment;
                merge(record, d, other[0], other[1], other + kRecordStart);
            }
            finish_row<W>(step, task, heads.range(head), r, record[1], record + kRecordStart);
        }
}

// Several kv heads of a task advance together, span by span: their parts of a block are neighbours in memory.
template <class W, class Products>
void attend_by(const AttentionStep& step, const Task& task, AttentionScratch& scratch) {
    const Shape& shape = *step.shape;
    const TaskHeads heads(shape, task);
    const int count = task.tokens * heads.each(), padded = kRowLimits<W>.padded(count);
    const int first = first_seen(step, step.positions[task.token]);
    const int last = step.positions[task.token + task.tokens - 1] + 1;
    const int begin = task.split ? std::max(first, task.segment * kSegment) : first;
    const int end = task.split ? std::min(last, (task.segment + 1) * kSegment) : last;
    const int lowest = begin / kBlockTokens;
    const auto buffers = scratch.rows<typename Products::Operand>(shape);
    const auto rows = [&](int head) { return buffers.part(head * padded, count); };
    const auto history = [&](int head) { return History<W>(step, task, heads.kv_head(head), end); };
    for (int b = lowest; b < lowest + kSpanBlocks; b++)
        fetch(history(0).keys(b).elements, 0, stored_elements<W>(shape) * sizeof(W));
    Products::begin(count);
    for (int head = 0; head < heads.kv_heads(); head++)
        start_rows(step, task, heads.range(head), rows(head), begin / kSegment);
    bool has_records = false;
    for (int at = begin / kSpan * kSpan; at < end; at += kSpan) {
        const int block = std::max(at / kBlockTokens, lowest);
        const SpanTokens tokens{at, block * kBlockTokens, std::min(at + kSpan, end)};
        const bool is_next = at > begin && at % kSegment == 0;
        has_records |= is_next;
        for (int head = 0; head < heads.kv_heads(); head++) {
            const bool more = head + 1 < heads.kv_heads();
            const Span<W> span = make_span(history(head), block, tokens.blocks(), history(more ? head + 1 : 0),
                                           more ? block : block + tokens.blocks());
            if (is_next) {
                end_segment(rows(head));
                start_segment(step, heads.range(head), rows(head), at / kSegment);
            }
            Products::advance(rows(head), span, tokens, scratch);
        }
    }
    if (task.split) return finish_split<W>(step, task, heads, rows);
    for (int head = 0; head < heads.kv_heads(); head++) {
        if (has_records) end_segment(rows(head));
        finish_rows<W>(step, task, heads.range(head), rows(head), has_records);
    }
}

template <class W>
using UntiledProducts = std::conditional_t<std::is_same_v<W, Int8>, IntegerProducts,
                                           std::conditional_t<kIsPacked<W>, PackedProducts, FloatProducts<W>>>;

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
        attend_by<W, UntiledProducts<W>>(step, task, scratch);
}

template <class W>
void attend_latents(const AttentionStep& step, const Task& task, AttentionScratch& scratch) {
#if PENSTOCK_TILES
    if constexpr (kIsTiled<W>) {
        const FlushedDenormals flushed;
        attend_by<W, TileProducts<W>>(step, task, scratch);
    } else
#endif
        attend_by<W, LatentProducts<W>>(step, task, scratch);
}

// What a decoder does with a cache of one storage type.
struct Attention {
    void (*place)(const AttentionStep&, int token, size_t block);
    void (*attend)(const AttentionStep&, const Task&, AttentionScratch&);
    RowLimits limits;
};

template <class W>
Attention attention_of() {
    return {&place_token<W>, &attend<W>, kRowLimits<W>};
}

template <class W>
Attention latents_of() {
    typedef std::conditional_t<std::is_same_v<W, Int8>, GroupedInt8, W> Stored;
    return {&place_latent<Stored>, &attend_latents<Stored>, kRowLimits<Stored>};
}

// Each is compiled in a unit of its own, attention_*.cpp.
extern template Attention attention_of<float>();
extern template Attention attention_of<Half>();
extern template Attention attention_of<BFloat>();
extern template Attention attention_of<Int8>();
extern template Attention attention_of<Int4Pair>();
extern template Attention latents_of<float>();
extern template Attention latents_of<Half>();
extern template Attention latents_of<BFloat>();
extern template Attention latents_of<Int8>();

inline Attention attention_over(Type kv_type, bool is_latent) {
    return with_kv_type(kv_type, [&](auto* w) {
        typedef std::remove_pointer_t<decltype(w)> W;
        if constexpr (kIsPacked<W>) return attention_of<W>();  // of latents there is no such cache
        else return is_latent ? latents_of<W>() : attention_of<W>();
    });
}

}  // namespace penstock
