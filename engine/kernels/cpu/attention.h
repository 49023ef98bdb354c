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

#include "product.h"

namespace penstock {

constexpr int kBlockTokens = 16;
constexpr int kSpan = 128;          // tokens per fold
constexpr size_t kCacheLine = 64;
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
    int kv_head;  // first one
    int kv_heads;
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

// The rows of one kv head in a task: its query heads of each token.
struct Rows {
    int count;
    float *q, *out;  // [count][head_dim]
    float* scores;   // [count][kSpan]
    float *peak, *total;
    int32_t *first, *limit;  // the tokens that a row sees
};

struct AttentionScratch {
    Buffer<float> q, out, scores, peak, total;
    Buffer<int32_t> first, limit;

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

    Rows rows(int from, int count, int head_dim) const {
        return {count,
                q.get() + from * head_dim,
                out.get() + from * head_dim,
                scores.get(),  // nothing of them outlasts a span
                peak.get() + from,
                total.get() + from,
                first.get() + from,
                limit.get() + from};
    }
};

inline int tokens_per_task(const Shape& shape) { return std::max(1, kAttentionRows / shape.group()); }

// Scores of a span become weights; the row's output so far is scaled to the new maximum.
inline void fold_row(const Rows& s, int row, int head_dim, int span, int from, int to) {
    float* scores = s.scores + row * kSpan;
    float* out = s.out + row * head_dim;
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

constexpr int kSpanBlocks = kSpan / kBlockTokens;

// The blocks of a span, of one sequence and kv head. Blocks lie scattered, so the processor cannot guess what comes
// next: the scores fetch their span's values on the way, the values the next span's keys.
template <class W>
struct Span {
    int blocks;
    const W* keys[kSpanBlocks];
    const W* values[kSpanBlocks];
    const char* fetched_values[kSpanBlocks + 1];
    const char* fetched_keys[kSpanBlocks];
};

// scores [rows][tokens of the span] = queries times keys; a few rows take two blocks at a time, as panels.
template <class W>
void score(const Rows& rows, const Span<W>& span, int head_dim, int column) {
    const int together = rows.count <= 3 ? 2 : 1, half = head_dim / 2;
    for (int b = 0; b < span.blocks;) {
        const int panels = std::min(together, span.blocks - b);
        const W* halves[] = {span.keys[b], span.keys[b] + half * kBlockTokens};
        const size_t apart = panels == 2 ? span.keys[b + 1] - span.keys[b] : 0;
        const Strides by{static_cast<size_t>(head_dim), kBlockTokens, apart, kSpan, kPanel};
        const Pieces<W> pieces{halves, 0, half, span.fetched_values + b, 0, kCacheLine};
        for_tiles(rows.count, [&](int start, int height) {
            float* scores = rows.scores + start * kSpan + column + b * kBlockTokens;
            tile_rows<W, 16>(height, panels, rows.q + start * head_dim, pieces, head_dim, scores, by, true);
        });
        b += panels;
    }
}

// out += weights of the span times its values; the last columns of a head_dim of 8 modulo 16 go alone.
template <class W>
void add_values(const Rows& rows, const Span<W>& span, int head_dim, int column, int tokens) {
    const Strides by{kSpan, static_cast<size_t>(head_dim), kPanel, static_cast<size_t>(head_dim), kPanel};
    const int panels = head_dim / kPanel;
    for_tiles(rows.count, [&](int start, int height) {
        const float* weights = rows.scores + start * kSpan + column;
        float* out = rows.out + start * head_dim;
        const auto pieces = [&](int p) {
            return Pieces<W>{span.values,       static_cast<size_t>(p) * kPanel,          kBlockTokens,
                             span.fetched_keys, static_cast<size_t>(p) * kCacheLine * 8, kCacheLine};
        };
        for (int p = 0; p < panels;)
            p += tile_rows<W, 16>(height, panels - p, weights, pieces(p), tokens, out + p * kPanel, by, false);
        if (head_dim % kPanel)
            tile_rows<W, 8>(height, 1, weights, pieces(panels), tokens, out + panels * kPanel, by, false);
    });
}

// Copies the queries of one head in and says what each row sees.
inline void start_rows(const AttentionStep& step, const Task& task, int kv_head, const Rows& rows) {
    const int d = step.shape->head_dim, group = step.shape->group();
    for (int r = 0; r < rows.count; r++) {
        const int token = task.token + r / group, position = step.positions[token];
        const float* q = step.qkv + token * step.ld + (kv_head * group + r % group) * d;
        std::memcpy(rows.q + r * d, q, d * sizeof(float));
        rows.first[r] = step.window > 0 ? std::max(0, position + 1 - step.window) : 0;
        rows.limit[r] = position + 1;
        rows.peak[r] = -std::numeric_limits<float>::infinity();
        rows.total[r] = 0.0f;
    }
    std::memset(rows.out, 0, static_cast<size_t>(rows.count) * d * sizeof(float));
}

inline void finish_rows(const AttentionStep& step, const Task& task, int kv_head, const Rows& rows) {
    const int d = step.shape->head_dim, group = step.shape->group();
    for (int r = 0; r < rows.count; r++) {
        float* out = step.out + (task.token + r / group) * step.ldo + (kv_head * group + r % group) * d;
        for (int i = 0; i < d; i += kLanes) store(out + i, load(rows.out + r * d + i) / splat(rows.total[r]));
    }
}

// Where the keys and values of one head of a sequence are.
template <class W>
struct History {
    const W* keys;
    const W* values;
    const int32_t* table;
    size_t block_size;
    int last;  // block

    const W* key(int block) const { return keys + table[std::min(block, last)] * block_size; }
    const W* value(int block) const { return values + table[block] * block_size; }

    History(const AttentionStep& step, const Task& task, int kv_head, int end)
        : table(step.block_tables + task.sequence * step.max_blocks),
          block_size(static_cast<size_t>(step.shape->kv_size()) * kBlockTokens),
          last((end - 1) / kBlockTokens) {
        const size_t at = static_cast<size_t>(kv_head) * step.shape->head_dim * kBlockTokens;
        keys = reinterpret_cast<const W*>(step.keys) + at;
        values = reinterpret_cast<const W*>(step.values) + at;
    }
};

// `next` has the keys that are read after this span, from block `next_block`.
template <class W>
Span<W> make_span(const History<W>& history, int block, int blocks, const History<W>& next, int next_block) {
    Span<W> span;
    span.blocks = blocks;
    for (int b = 0; b < blocks; b++) {
        span.keys[b] = history.key(block + b);
        span.values[b] = history.value(block + b);
        span.fetched_values[b] = reinterpret_cast<const char*>(span.values[b]);
        span.fetched_keys[b] = reinterpret_cast<const char*>(next.key(next_block + b));
    }
    span.fetched_values[blocks] = span.fetched_values[0];  // an odd block fetches one more
    return span;
}

// Several heads of a task advance together, span by span: their parts of a block are neighbours in memory.
template <class W>
void attend(const AttentionStep& step, const Task& task, AttentionScratch& scratch) {
    const int d = step.shape->head_dim, count = task.tokens * step.shape->group();
    const int first = step.positions[task.token], end = step.positions[task.token + task.tokens - 1] + 1;
    const int begin = step.window > 0 ? std::max(0, first + 1 - step.window) : 0, lowest = begin / kBlockTokens;
    const auto rows = [&](int head) { return scratch.rows(head * count, count, d); };
    const auto history = [&](int head) { return History<W>(step, task, task.kv_head + head, end); };
    for (int b = lowest; b < lowest + kSpanBlocks; b++)
        for (int i = 0; i < d * kBlockTokens; i += kCacheLine / sizeof(W)) __builtin_prefetch(history(0).key(b) + i);
    for (int head = 0; head < task.kv_heads; head++) start_rows(step, task, task.kv_head + head, rows(head));
    for (int at = begin / kSpan * kSpan; at < end; at += kSpan) {
        const int block = std::max(at / kBlockTokens, lowest), from = block * kBlockTokens;
        const int to = std::min(at + kSpan, end), blocks = divide_up(to - from, kBlockTokens);
        for (int head = 0; head < task.kv_heads; head++) {
            const bool more = head + 1 < task.kv_heads;
            const Span<W> span = make_span(history(head), block, blocks, history(more ? head + 1 : 0),
                                           more ? block : block + blocks);
            score(rows(head), span, d, from - at);
            for (int r = 0; r < count; r++) fold_row(rows(head), r, d, at, from, to);
            add_values(rows(head), span, d, from - at, to - from);
        }
    }
    for (int head = 0; head < task.kv_heads; head++) finish_rows(step, task, task.kv_head + head, rows(head));
}

}  // namespace penstock
