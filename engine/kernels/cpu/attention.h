// Rotary embedding, the paged KV cache and attention over it.
//
// A block of the cache holds 16 tokens of one layer, keys and values apart: keys [kv head][head_dim][16 tokens],
// values [kv head][16 tokens][head_dim], so that both products of attention are the tile of gemm.h, with a block in
// the place of a weight panel.
//
// The order of sums is fixed by absolute positions alone: spans of 128 tokens, ascending, are folded one after
// another into the running maximum, sum and output. A span or block that a row cannot see contributes exactly
// nothing, so neither the batch nor the cut of a prompt into chunks changes a bit.
#pragma once

#include <limits>

#include "gemm.h"

namespace penstock {

constexpr int kBlockTokens = 16;
constexpr int kSpan = 128;         // tokens per fold
constexpr int kAttentionRows = 48;  // rows per task, where one token's heads are not more

struct Shape {
    int num_heads, num_kv_heads, head_dim;
    float eps;
    const float* cos;  // [max position][head_dim / 2]
    const float* sin;

    int group() const { return num_heads / num_kv_heads; }
    int q_size() const { return num_heads * head_dim; }
    int kv_size() const { return num_kv_heads * head_dim; }
};

struct Task {
    int sequence;
    int token;  // first one
    int tokens;
    int kv_head;
    int64_t cost;
};

// What attention needs to know of a step and a layer.
struct AttentionStep {
    const Shape* shape;
    const int32_t* positions;
    const int32_t* block_tables;
    size_t max_blocks;
    int window;
    char* keys;  // of this layer
    char* values;
    float* qkv;  // [T][ld]: queries, keys, values; the queries ready and scaled
    size_t ld;
    float* out;  // [T][ldo]
    size_t ldo;
};

// x / rms(x) * weight; `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    v8 squares = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) {
        const v8 part = load_first(x + i, n - i);
        squares = fma(part, part, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
    for (int i = 0; i < n; i += kLanes) {
        const v8 y = load_first(x + i, n - i) * splat(scale) * load_first(weight + i, n - i);
        store_first(out + i, y, n - i);
    }
}

inline void rotate(float* head, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const v8 a = load_first(head + i, half - i), b = load_first(head + half + i, half - i);
        const v8 c = load_first(cos + i, half - i), s = load_first(sin + i, half - i);
        store_first(head + half + i, b * c + a * s, half - i);
        store_first(head + i, a * c - b * s, half - i);
    }
}

// One token's queries in place (normalised, rotated, scaled), its keys and values into the cache.
template <class W>
void place_token(const AttentionStep& step, const float* q_norm, const float* k_norm, int token, int block) {
    const Shape& shape = *step.shape;
    const int d = shape.head_dim, position = step.positions[token], slot = position % kBlockTokens;
    const float* cos = shape.cos + static_cast<size_t>(position) * (d / 2);
    const float* sin = shape.sin + static_cast<size_t>(position) * (d / 2);
    float* row = step.qkv + token * step.ld;
    const v8 scale = splat(1.0f / std::sqrt(static_cast<float>(d)));
    for (int h = 0; h < shape.num_heads + shape.num_kv_heads; h++) {
        float* head = row + h * d;
        const bool query = h < shape.num_heads;
        if (q_norm) rms_norm(head, query ? q_norm : k_norm, d, shape.eps, head);
        rotate(head, cos, sin, d);
        if (query)
            for (int i = 0; i < d; i += kLanes) store(head + i, load(head + i) * scale);
    }
    const size_t block_at = static_cast<size_t>(block) * shape.kv_size() * kBlockTokens;
    W* keys = reinterpret_cast<W*>(step.keys) + block_at;
    W* values = reinterpret_cast<W*>(step.values) + block_at;
    const float* k = row + shape.q_size();
    const float* v = k + shape.kv_size();
    for (int i = 0; i < shape.kv_size(); i++) keys[i * kBlockTokens + slot] = from_float<W>(k[i]);
    for (int h = 0; h < shape.num_kv_heads; h++)
        for (int i = 0; i < d; i++)
            values[(h * kBlockTokens + slot) * d + i] = from_float<W>(v[h * d + i]);
}

struct AttentionScratch {
    Buffer<float> q, out, scores, peak, total;
    Buffer<int32_t> first, limit;  // per row: the tokens it sees

    explicit AttentionScratch(const Shape& shape) {
        const size_t rows = std::max(kAttentionRows, shape.group());
        q = allocate<float>(rows * shape.head_dim);
        out = allocate<float>(rows * shape.head_dim);
        scores = allocate<float>(rows * kSpan);
        peak = allocate<float>(rows);
        total = allocate<float>(rows);
        first = allocate<int32_t>(rows);
        limit = allocate<int32_t>(rows);
    }
};

inline int tokens_per_task(const Shape& shape) { return std::max(1, kAttentionRows / shape.group()); }

// Scores of a span become weights; the row's output so far is scaled to the new maximum.
inline void fold_row(AttentionScratch& s, int row, int head_dim, int span, int from, int to) {
    float* scores = s.scores.get() + row * kSpan;
    float* out = s.out.get() + row * head_dim;
    const int first = std::max(s.first[row], from) - span, limit = std::min(s.limit[row], to) - span;
    const int begin = from - span, end = divide_up(to - span, kLanes) * kLanes;
    if (first >= limit) {
        for (int i = begin; i < end; i += kLanes) store(scores + i, splat(0.0f));
        return;
    }
    const v8i lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const v8 nothing = splat(-std::numeric_limits<float>::infinity());
    v8 highest = nothing;
    for (int i = begin; i < end; i += kLanes) {
        const v8i at = lanes + splat_int(i);
        const v8i seen = (at >= splat_int(first)) & (at < splat_int(limit));
        const v8 x = seen ? load(scores + i) : nothing;
        store(scores + i, x);
        highest = max(highest, x);
    }
    const float before = s.peak[row], peak = std::max(before, max(highest));
    v8 weights = splat(0.0f);
    for (int i = begin; i < end; i += kLanes) {
        const v8 w = exp(load(scores + i) - splat(peak));
        store(scores + i, w);
        weights += w;
    }
    s.peak[row] = peak;
    if (peak == before) {
        s.total[row] += sum(weights);
        return;
    }
    const float shrink = exp1(before - peak);
    s.total[row] = s.total[row] * shrink + sum(weights);
    for (int i = 0; i < head_dim; i += kLanes) store(out + i, load(out + i) * splat(shrink));
}

template <class W>
void prefetch(const W* p, int count) {
    for (int i = 0; i < count; i += 64 / static_cast<int>(sizeof(W))) __builtin_prefetch(p + i);
}

// scores [rows][tokens of the span] = queries times keys; a few rows take two blocks at a time, as panels.
template <class W>
void score(const AttentionScratch& s, const W* const* keys, const W* const* values, int blocks, int rows, int head_dim,
           int column) {
    const int together = rows <= 3 ? 2 : 1;
    for (int b = 0; b < blocks;) {
        const int panels = std::min(together, blocks - b);
        for (int i = b; i < b + panels; i++) {
            if (i + 6 < blocks) prefetch(keys[i + 6], head_dim * kBlockTokens);
            prefetch(values[i], head_dim * kBlockTokens);
        }
        const size_t apart = panels == 2 ? keys[b + 1] - keys[b] : 0;
        const Strides by{static_cast<size_t>(head_dim), kBlockTokens, apart, kSpan, kPanel};
        for_tiles(rows, [&](int start, int height) {
            float* scores = s.scores.get() + start * kSpan + column + b * kBlockTokens;
            const Pieces<W> pieces{keys + b, 0, head_dim, reinterpret_cast<const char*>(keys[b]), 0};
            tile_rows<W, 2>(height, panels, s.q.get() + start * head_dim, pieces, head_dim, scores, by, true);
        });
        b += panels;
    }
}

// out += weights of the span times its values; the last columns of a head_dim of 8 modulo 16 go alone.
template <class W>
void add_values(const AttentionScratch& s, const W* const* values, int rows, int head_dim, int column, int tokens) {
    const Strides by{kSpan, static_cast<size_t>(head_dim), kPanel, static_cast<size_t>(head_dim), kPanel};
    const int panels = head_dim / kPanel;
    const char* here = reinterpret_cast<const char*>(values[0]);
    for_tiles(rows, [&](int start, int height) {
        const float* weights = s.scores.get() + start * kSpan + column;
        float* out = s.out.get() + start * head_dim;
        for (int p = 0; p < panels;) {
            const Pieces<W> pieces{values, static_cast<size_t>(p) * kPanel, kBlockTokens, here, 0};
            p += tile_rows<W, 2>(height, panels - p, weights, pieces, tokens, out + p * kPanel, by, false);
        }
        const Pieces<W> rest{values, static_cast<size_t>(panels) * kPanel, kBlockTokens, here, 0};
        if (head_dim % kPanel) tile_rows<W, 1>(height, 1, weights, rest, tokens, out + panels * kPanel, by, false);
    });
}

template <class W>
void attend(const AttentionStep& step, const Task& task, AttentionScratch& s) {
    const Shape& shape = *step.shape;
    const int d = shape.head_dim, group = shape.group(), rows = task.tokens * group;
    const int32_t* table = step.block_tables + task.sequence * step.max_blocks;
    const size_t block_size = static_cast<size_t>(shape.kv_size()) * kBlockTokens;
    const size_t head_at = static_cast<size_t>(task.kv_head) * d * kBlockTokens;
    const W* keys = reinterpret_cast<const W*>(step.keys) + head_at;
    const W* values = reinterpret_cast<const W*>(step.values) + head_at;
    int begin = std::numeric_limits<int>::max(), end = 0;
    for (int r = 0; r < rows; r++) {
        const int token = task.token + r / group, position = step.positions[token];
        const float* q = step.qkv + token * step.ld + (task.kv_head * group + r % group) * d;
        std::memcpy(s.q.get() + r * d, q, d * sizeof(float));
        s.first[r] = step.window > 0 ? std::max(0, position + 1 - step.window) : 0;
        s.limit[r] = position + 1;
        s.peak[r] = -std::numeric_limits<float>::infinity();
        s.total[r] = 0.0f;
        begin = std::min(begin, s.first[r]);
        end = std::max(end, s.limit[r]);
    }
    std::memset(s.out.get(), 0, static_cast<size_t>(rows) * d * sizeof(float));
    const W* span_keys[kSpan / kBlockTokens];
    const W* span_values[kSpan / kBlockTokens];
    for (int span = begin / kSpan * kSpan; span < end; span += kSpan) {
        const int from = std::max(span, begin / kBlockTokens * kBlockTokens), to = std::min(span + kSpan, end);
        const int blocks = divide_up(to - from, kBlockTokens);
        for (int b = 0; b < blocks; b++) {
            const size_t at = table[from / kBlockTokens + b] * block_size;
            span_keys[b] = keys + at;
            span_values[b] = values + at;
        }
        score(s, span_keys, span_values, blocks, rows, d, from - span);
        for (int r = 0; r < rows; r++) fold_row(s, r, d, span, from, to);
        add_values(s, span_values, rows, d, from - span, to - from);
    }
    for (int r = 0; r < rows; r++) {
        float* out = step.out + (task.token + r / group) * step.ldo + (task.kv_head * group + r % group) * d;
        for (int i = 0; i < d; i += kLanes) store(out + i, load(s.out.get() + r * d + i) / splat(s.total[r]));
    }
}

}  // namespace penstock
