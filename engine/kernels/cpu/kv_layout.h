// The paged KV cache: what a block holds, and how a token's keys and values get there.
//
// A block of the cache holds 16 tokens of one layer, keys and values apart. Its layout lets both products of attention
// read it as the weights that they multiply with, without a conversion:
//
//                              keys, per kv head               values, per kv head
//     products in float32      [head_dim][16 tokens]           [16 tokens][head_dim]
//     of tiles and integers    [head_dim / 2][16 tokens][2]    [8 pairs of tokens][head_dim][2]
//
// bfloat16 and int8 are multiplied by tiles where the build has them, int8 by integers elsewhere. In int8, the integers
// of all kv heads are followed by float32 scales [kv head][16 tokens]: a number is its integer times the scale of its token
// and head. In 4 bits, an element is two numbers of a token, eight apart, so that 16 neighbours are eight elements, keys and
// values are [head_dim / 2][16 tokens] and [16 tokens][head_dim / 2], and float16 scales [kv head][groups][16 tokens] follow.
// Products are those of floats, on every level.
//
// A layer of latents has one plane and no heads: a token's numbers lie as keys do, and the first of them are its value, too.
// Products with values take them from there, some columns at a time. In int8, as many neighbours as are rotated share a
// scale, [groups][16 tokens], and products are those of floats, on every level.
#pragma once

#include <limits>

#include "activations.h"
#include "gemm.h"
#include "rotation.h"
#include "tiles.h"

namespace penstock {

constexpr int kBlockTokens = 16;
constexpr int kMostGroup = 32;  // numbers of 4 bits that share a scale

// The heads of one layer's attention, and what becomes of queries and keys before it.
struct Shape {
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t norms_rows;    // all heads are normed as one row, rather than each
    int32_t norms_last;    // the norms follow the rotation
    int32_t shares;        // keys and values are another layer's: there are queries alone
    int32_t latent;        // the first numbers of a key, so many, are its value, too, and all query heads read them; or 0
    int32_t plain;         // of latents, the numbers of a head's query before its matrix K that are not rotated
    float eps;
    float divisor;         // of scores
    float softcap;         // c: scores become c tanh(score / c); 0 is none
    const float* q_norm;   // or null
    const float* k_norm;   // of latents, [latent]
    const float* v_norm;   // of each head
    const float* cos;      // [max position][rotated() / 2]
    const float* sin;
    const float* q_scales; // [max position], or null: queries are multiplied by them
    const float* sinks;    // [num_heads], or null: one more score of the softmax, which has no value

    // What tasks are made of: the query heads of a kv head; of latents, each query head by itself.
    int parts() const { return latent ? num_heads : num_kv_heads; }
    int group() const { return num_heads / parts(); }
    int rotated() const { return head_dim - latent; }
    int value_dim() const { return latent ? latent : head_dim; }
    int q_size() const { return num_heads * head_dim; }
    int spread() const { return std::min(kMostRotated, head_dim / 2 & -(head_dim / 2)); }  // inputs of a rotated block
    int group_of_scales() const { return std::min(kMostGroup, spread()); }  // of 4 bits: numbers that share one
    int kv_size() const { return num_kv_heads * head_dim; }
    size_t head_elements() const { return static_cast<size_t>(head_dim) * kBlockTokens; }  // of a block
};

#if PENSTOCK_TILES
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Two numbers of 4 bits, eight apart, the first in the lower bits.
struct Int4Pair {
    uint8_t both;
};

// A number of a latent in int8.
struct GroupedInt8 {
    int8_t value;
};

// Whether a storage type of the cache comes with scales, is multiplied by tiles, and lies in pairs.
template <class W>
constexpr bool kIsPacked = std::is_same_v<W, Int4Pair>;
template <class W>
constexpr bool kIsScaled = std::is_same_v<W, Int8> || kIsPacked<W>;
template <class W>
constexpr bool kIsTiled = kHasTiles && (std::is_same_v<W, BFloat> || std::is_same_v<W, Int8>);
template <class W>
constexpr bool kIsPaired = kIsTiled<W> || std::is_same_v<W, Int8>;

// Calls function with a null pointer of a storage type of the cache.
template <class Function>
auto with_kv_type(Type type, Function function) {
    if (type == Type::int8) return function(static_cast<Int8*>(nullptr));
    if (type == Type::int4) return function(static_cast<Int4Pair*>(nullptr));
    return with_type(type, function);
}

template <class W>
using ScaleOf = std::conditional_t<kIsPacked<W>, Half, float>;

// Elements of one kv head in a block, keys or values.
template <class W>
size_t stored_elements(const Shape& shape) {
    return kIsPacked<W> ? shape.head_elements() / 2 : shape.head_elements();
}

// What one kv head has in a block, keys or values.
template <class W>
struct HeadInBlock {
    W* elements;
    ScaleOf<W>* scales;  // of the 16 tokens, where the type has them; of 4 bits, of each group

    // `start` is that of the block's keys, or values, of one layer.
    HeadInBlock(char* start, const Shape& shape, int kv_head) {
        elements = reinterpret_cast<W*>(start) + kv_head * stored_elements<W>(shape);
        W* end = reinterpret_cast<W*>(start) + shape.num_kv_heads * stored_elements<W>(shape);
        const int groups = kIsPacked<W> ? shape.head_dim / shape.group_of_scales() : 1;
        scales = reinterpret_cast<ScaleOf<W>*>(end) + kv_head * groups * kBlockTokens;
    }
};

// The place of element i of the token at an offset in a block, which has head_dim of a head, or half as many pairs.
template <class W>
PENSTOCK_INLINE int key_place(int i, int offset) {
    return kIsPaired<W> ? i / 2 * 2 * kBlockTokens + 2 * offset + i % 2 : i * kBlockTokens + offset;
}

template <class W>
PENSTOCK_INLINE int value_place(int i, int offset, int head_dim) {
    if (kIsPacked<W>) return offset * head_dim / 2 + i;
    return kIsPaired<W> ? offset / 2 * 2 * head_dim + 2 * i + offset % 2 : offset * head_dim + i;
}

template <class V>
PENSTOCK_INLINE void store_operands(float* out, V x) {
    store(out, x);
}

// Eight numbers as the cache holds them.
template <class W>
PENSTOCK_INLINE void store_in_cache(const float* x, W* out) {
    if constexpr (kIsTiled<W>)
        store_operands(out, load(x));
    else
        for (int i = 0; i < kLanes; i++) out[i] = from_float<W>(x[i]);
}

// What attention needs to know of a step and a layer.
struct AttentionStep {
    const Shape* shape;
    const int32_t* positions;         // of tokens among those of their sequence that were not dropped
    const int32_t* rotary_positions;  // in the text
    const int32_t* block_tables;
    size_t max_blocks;
    int window;  // 0 is none; -c: a token sees its own chunk of c
    int first;  // no token sees those before it but itself
    char* keys;  // of this layer
    char* values;
    size_t stride;  // bytes from block to block
    float* qkv;  // [T][ld]: queries, keys, values; the queries ready and scaled; of latents, queries after K
    size_t ld;
    float* out;  // [T][ldo], as far apart for each head as queries are
    size_t ldo;
    float* queries;  // of latents, before K: [T][ld_queries]
    size_t ld_queries;
    float* latents;  // [T][ld_latents]
    size_t ld_latents;
};

// The first token that the one at a position sees.
inline int first_seen(const AttentionStep& step, int position) {
    const int first = std::min(step.first, position);
    if (step.window < 0) return std::max(first, position - position % -step.window);
    return step.window > 0 ? std::max(first, position + 1 - step.window) : first;
}

// The sum of squares, in 32 lanes; what is left at the end of a row goes to the first eight.
inline float sum_of_squares(const float* x, int n) {
    constexpr int kSums = 4 * kLanes;
    wide parts[kSums / kWide] = {};
    int i = 0;
    for (; i + kSums <= n; i += kSums)
        unrolled<kSums / kWide>(PENSTOCK_EACH(j) {
            const wide part = load_as<wide>(x + i + j * kWide);
            parts[j] = fma(part, part, parts[j]);
        });
    v8 sums[4];
    std::memcpy(sums, parts, sizeof sums);
    for (; i < n; i += kLanes) {
        const v8 part = load_first<v8>(x + i, n - i);
        sums[0] = fma(part, part, sums[0]);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// x / rms(x) * weight; `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
        using V = decltype(v);
        store_first(out + i, load_first<V>(x + i, count) * all<V>(scale) * load_first<V>(weight + i, count), count);
    });
}

// x less its mean, the same way; `out` may be `x`.
inline void layer_norm(const float* x, const float* weight, int n, float eps, float* out) {
    v8 sums{};
    for (int i = 0; i < n; i += kLanes) sums += load_first<v8>(x + i, n - i);
    const float mean = sum(sums) / static_cast<float>(n);
    for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
        store_first(out + i, load_first<decltype(v)>(x + i, count) - all<decltype(v)>(mean), count);
    });
    rms_norm(out, weight, n, eps, out);
}

inline void multiply(float* x, int n, float factor) {
    for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
        store_first(x + i, load_first<decltype(v)>(x + i, count) * all<decltype(v)>(factor), count);
    });
}

// Rotates pairs of numbers that are `half` apart, and scales them.
inline void rotate(float* head, const float* cos, const float* sin, int half, float scale) {
    for_vectors(half, PENSTOCK_VECTORS(v, i, count) {
        using V = decltype(v);
        const V a = load_first<V>(head + i, count), b = load_first<V>(head + half + i, count);
        const V c = load_first<V>(cos + i, count), s = load_first<V>(sin + i, count);
        store_first(head + half + i, (b * c + a * s) * all<V>(scale), count);
        store_first(head + i, (a * c - b * s) * all<V>(scale), count);
    });
}

// Some heads of one token, queries or keys: normalised, rotated, and multiplied by a factor.
inline void prepare_heads(float* heads, int count, const float* norm, const Shape& shape, int position, float factor) {
    const int d = shape.head_dim, half = d / 2;
    const size_t angle = static_cast<size_t>(position) * half;
    if (norm && shape.norms_rows && !shape.norms_last) rms_norm(heads, norm, count * d, shape.eps, heads);
    const bool each = norm && !shape.norms_rows;
    for (int h = 0; h < count; h++) {
        float* head = heads + h * d;
        if (each && !shape.norms_last) rms_norm(head, norm, d, shape.eps, head);
        rotate(head, shape.cos + angle, shape.sin + angle, half, shape.norms_last ? 1.0f : factor);
        if (each && shape.norms_last) rms_norm(head, norm, d, shape.eps, head);
        if (shape.norms_last && factor != 1.0f) multiply(head, d, factor);
    }
}

// Writes the keys or values of one head of a token; place(i) is where element i goes.
template <class W, class Place>
void write_head(const float* x, int head_dim, const HeadInBlock<W>& head, int offset, Place place) {
    if constexpr (kIsScaled<W>) {
        const float scale = largest(x, head_dim) / 127.0f;
        for (int i = 0; i < head_dim; i++) {
            const float integer = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
            head.elements[place(i)].value = static_cast<int8_t>(std::min(std::max(-127.0f, integer), 127.0f));
        }
        head.scales[offset] = scale;
    } else {
        for (int i = 0; i < head_dim; i += kLanes) {
            W part[kLanes];
            store_in_cache(x + i, part);
            for (int j = 0; j < kLanes; j++) head.elements[place(i + j)] = part[j];
        }
    }
}

// A group becomes integers of 4 bits: as `quantize_groups` in kernels/reference.py does. Returns their scale.
inline Half round_group(const float* x, int n, Int4Pair* out) {
    float low = 0.0f, high = 0.0f;
    bool is_number = true;
    for (int i = 0; i < n; i++) low = std::min(low, x[i]), high = std::max(high, x[i]), is_number &= x[i] == x[i];
    const Half scale = from_float<Half>(is_number ? (high >= -low ? high : low) / -8.0f : std::nanf(""));
    const float divisor = to_float(scale);
    const auto number = [&](float y) __attribute__((always_inline)) {
        const float integer = is_number && divisor != 0.0f ? std::nearbyint(y / divisor) : 0.0f;
        return static_cast<int>(std::min(std::max(-8.0f, integer), 7.0f)) + 8;
    };
    for (int i = 0; i < n; i += 16)
        for (int j = i; j < i + 8; j++) *out++ = {static_cast<uint8_t>(number(x[j]) | number(x[j + 8]) << 4)};
    return scale;
}

// Writes a head as above, in groups of so many numbers; place(i) is where pair i goes.
template <class Place>
void write_groups(const float* x, int head_dim, int group, const HeadInBlock<Int4Pair>& head, int offset, Place place) {
    Int4Pair pairs[kMostGroup / 2];
    for (int start = 0; start < head_dim; start += group) {
        head.scales[start / group * kBlockTokens + offset] = round_group(x + start, group, pairs);
        for (int i = 0; i < group / 2; i++) head.elements[place(start / 2 + i)] = pairs[i];
    }
}

// What scores are multiplied by: softmax is in powers of 2; scores that are capped come to that later.
inline float score_scale(const Shape& shape, int position) {
    const float scale = (shape.softcap > 0.0f ? 1.0f / shape.softcap : 1.44269504088896341f) / shape.divisor;
    return scale * (shape.q_scales ? shape.q_scales[position] : 1.0f);
}

// One token's queries in place (ready to be multiplied with keys), its keys and values into the cache. Keys of 8 and 4 bits
// are spread before they are rounded, and so are queries, and values of 4 bits: see rotate_and_write in kernels/reference.py.
template <class W>
void place_token(const AttentionStep& step, int token, size_t block) {
    const Shape& shape = *step.shape;
    const int d = shape.head_dim, position = step.rotary_positions[token], offset = step.positions[token] % kBlockTokens;
    float* row = step.qkv + token * step.ld;
    float* keys = row + shape.q_size();
    float* values = keys + shape.kv_size();
    const int spread = kIsScaled<W> ? shape.spread() : 1;
    prepare_heads(row, shape.num_heads, shape.q_norm, shape, position, score_scale(shape, position) / static_cast<float>(spread));
    if (spread > 1) rotate(row, shape.q_size(), spread, row);
    if (shape.shares) return;
    prepare_heads(keys, shape.num_kv_heads, shape.k_norm, shape, position, 1.0f);
    if (spread > 1) rotate(keys, shape.kv_size(), spread, keys);
    for (int h = 0; h < shape.num_kv_heads; h++) {
        if (shape.v_norm) rms_norm(values + h * d, shape.v_norm, d, shape.eps, values + h * d);
        const HeadInBlock<W> k(step.keys + block * step.stride, shape, h);
        const HeadInBlock<W> v(step.values + block * step.stride, shape, h);
        const auto of_keys = [&](int i) __attribute__((always_inline)) { return key_place<W>(i, offset); };
        const auto of_values = [&](int i) __attribute__((always_inline)) { return value_place<W>(i, offset, d); };
        if constexpr (kIsPacked<W>) {
            rotate(values + h * d, d, spread, values + h * d);
            write_groups(keys + h * d, d, shape.group_of_scales(), k, offset, of_keys);
            write_groups(values + h * d, d, shape.group_of_scales(), v, offset, of_values);
        } else {
            write_head(keys + h * d, d, k, offset, of_keys);
            write_head(values + h * d, d, v, offset, of_values);
        }
    }
}

// Writes a token's latent and rotated key.
template <class W>
void write_latent(const float* x, const Shape& shape, char* start, int offset) {
    const auto place = [&](int i) __attribute__((always_inline)) { return key_place<W>(i, offset); };
    if constexpr (std::is_same_v<W, GroupedInt8>) {
        const int size = shape.rotated();
        HeadInBlock<Int8> group(start, shape, 0);
        for (int i = 0; i < shape.head_dim; i += size, group.elements += size * kBlockTokens, group.scales += kBlockTokens)
            write_head(x + i, size, group, offset, place);
    } else {
        write_head(x, shape.head_dim, HeadInBlock<W>(start, shape, 0), offset, place);
    }
}

// One token's queries, of which the rotated numbers go where those after K are, and its latent into the cache.
template <class W>
void place_latent(const AttentionStep& step, int token, size_t block) {
    const Shape& shape = *step.shape;
    const int position = step.rotary_positions[token], rotated = shape.rotated(), half = rotated / 2, query_size = shape.plain + rotated;
    const float *cos = shape.cos + static_cast<size_t>(position) * half, *sin = shape.sin + static_cast<size_t>(position) * half;
    float* latent = step.latents + token * step.ld_latents;
    rms_norm(latent, shape.k_norm, shape.latent, shape.eps, latent);
    rotate(latent + shape.latent, cos, sin, half, 1.0f);
    write_latent<W>(latent, shape, step.keys + block * step.stride, step.positions[token] % kBlockTokens);
    const float factor = score_scale(shape, position);
    for (int h = 0; h < shape.num_heads; h++) {
        float* query = step.queries + token * step.ld_queries + h * query_size;
        float* turned = step.qkv + token * step.ld + h * shape.head_dim + shape.latent;
        multiply(query, shape.plain, factor);
        std::memcpy(turned, query + shape.plain, rotated * sizeof(float));
        rotate(turned, cos, sin, half, factor);
    }
}

}  // namespace penstock
