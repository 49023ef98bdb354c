// The blocks of a span: where they lie, and what is to be fetched while they are read.
//
// Blocks lie scattered, so the processor cannot guess what comes next: work on a span's keys fetches the span's values
// on the way, work on its values the keys that are read next.
#pragma once

#include "attention_rows.h"

namespace penstock {

PENSTOCK_INLINE void fetch(const void* start, size_t from, size_t to) {
    for (size_t at = from; at < to; at += kCacheLine) __builtin_prefetch(static_cast<const char*>(start) + at);
}

// Of one sequence and kv head.
template <class W>
struct Span {
    int blocks;
    const W* keys[kSpanBlocks];
    const W* values[kSpanBlocks];
    const ScaleOf<W>* key_scales[kSpanBlocks];
    const ScaleOf<W>* value_scales[kSpanBlocks];
    const char* fetched_values[kSpanBlocks + 1];
    const char* fetched_keys[kSpanBlocks];
};

// Where the keys and values of one kv head of a sequence are.
template <class W>
class History {
   public:
    History(const AttentionStep& step, const Task& task, int kv_head, int end)
        : step_(step),
          table_(step.block_tables + task.sequence * step.max_blocks),
          kv_head_(kv_head),
          last_((end - 1) / kBlockTokens) {}

    HeadInBlock<W> keys(int block) const { return {step_.keys + place(block), *step_.shape, kv_head_}; }
    HeadInBlock<W> values(int block) const { return {step_.values + place(block), *step_.shape, kv_head_}; }

   private:
    // A block past the end is only fetched.
    size_t place(int block) const { return table_[std::min(block, last_)] * step_.stride; }

    const AttentionStep& step_;
    const int32_t* table_;
    int kv_head_;
    int last_;
};

// `next` has the keys that are read after this span, from block `next_block`.
template <class W>
Span<W> make_span(const History<W>& history, int block, int blocks, const History<W>& next, int next_block) {
    Span<W> span;
    span.blocks = blocks;
    for (int b = 0; b < blocks; b++) {
        const HeadInBlock<W> keys = history.keys(block + b), values = history.values(block + b);
        const HeadInBlock<W> next_keys = next.keys(next_block + b);
        span.keys[b] = keys.elements;
        span.values[b] = values.elements;
        span.fetched_values[b] = reinterpret_cast<const char*>(values.elements);
        span.fetched_keys[b] = reinterpret_cast<const char*>(next_keys.elements);
        if constexpr (kIsScaled<W>) {
            span.key_scales[b] = keys.scales;
            span.value_scales[b] = values.scales;
            __builtin_prefetch(next_keys.scales);
            __builtin_prefetch(next.values(next_block + b).scales);
        }
    }
    span.fetched_values[blocks] = span.fetched_values[0];  // an odd block fetches one more
    return span;
}

// Brings the scales of a span together, or returns null where the type has none.
template <class W>
const SpanScales* gather_scales(const Span<W>& span, const SpanTokens& tokens, AttentionScratch& scratch) {
    if constexpr (!kIsScaled<W>) return nullptr;
    SpanScales& scales = scratch.scales[0];
    for (int b = 0; b < span.blocks; b++) {
        const int at = tokens.column() + b * kBlockTokens;
        std::memcpy(scales.keys + at, span.key_scales[b], kBlockTokens * sizeof(float));
        std::memcpy(scales.values + at, span.value_scales[b], kBlockTokens * sizeof(float));
    }
    const int limit = tokens.to - tokens.start, end = tokens.column() + span.blocks * kBlockTokens;
    std::fill(scales.values + limit, scales.values + end, 0.0f);
    return &scales;
}

}  // namespace penstock
