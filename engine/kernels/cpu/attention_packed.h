// Both products of attention to numbers of 4 bits: a span of them becomes floats, which all rows of a task multiply.
//
// A number is exact in a float, and so is its scale; their product is rounded once.
#pragma once

#include "attention_floats.h"

namespace penstock {

template <class V>
struct Nibbles {
    V low, high;
};

// As many bytes as V has lanes.
template <class V>
PENSTOCK_INLINE IntsOf<V> load_bytes(const Int4Pair* from) {
#if PENSTOCK_AVX512
    if constexpr (sizeof(V) == 64)
        return (IntsOf<V>)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    else
#endif
#if PENSTOCK_AVX2
        return (IntsOf<V>)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(sizeof(V) / 4)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, IntsOf<V>);
#endif
}

// The numbers of as many pairs as V has lanes, without their scales.
template <class V>
PENSTOCK_INLINE Nibbles<V> load_nibbles(const Int4Pair* from) {
    const IntsOf<V> both = load_bytes<V>(from);
    return {__builtin_convertvector((both & 15) - 8, V), __builtin_convertvector((both >> 4) - 8, V)};
}

class PackedProducts {
   public:
    using Operand = float;

    static void begin(int) {}

    static void advance(const Rows<float>& rows, const Span<Int4Pair>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        const int d = rows.head_dim, group = std::min(kMostGroup, d / 2 & -(d / 2));
        const size_t elements = static_cast<size_t>(d) * kBlockTokens;
        float *keys = scratch.blocks.get(), *values = keys + kSpan * d;
        Span<float> floats;
        floats.blocks = span.blocks;
        for (int b = 0; b < span.blocks; b++, keys += elements, values += elements) {
            floats.keys[b] = keys;
            floats.values[b] = values;
            floats.fetched_values[b] = reinterpret_cast<const char*>(values);
            floats.fetched_keys[b] = reinterpret_cast<const char*>(keys);
            fetch(span.fetched_values[b], 0, elements / 2);
            unpack_keys(span.keys[b], span.key_scales[b], d, group, keys);
            fetch(span.fetched_keys[b], 0, elements / 2);
            unpack_values(span.values[b], span.value_scales[b], d, group, values);
        }
        floats.fetched_values[span.blocks] = floats.fetched_values[0];
        FloatProducts<float>::advance(rows, floats, tokens, scratch);
    }

   private:
    // out [head_dim][16 tokens]
    static void unpack_keys(const Int4Pair* pairs, const Half* scales, int head_dim, int group, float* out) {
        for (int start = 0; start < head_dim; start += group, scales += kBlockTokens) {
            wide by[kBlockParts];
            unrolled<kBlockParts>(PENSTOCK_EACH(p) { by[p] = load_as<wide>(scales + p * kWide); });
            for (int i = 0; i < group; i += 16, out += 8 * kBlockTokens)
                for (int j = 0; j < 8; j++, pairs += kBlockTokens, out += kBlockTokens)
                    unrolled<kBlockParts>(PENSTOCK_EACH(p) {
                        const Nibbles<wide> numbers = load_nibbles<wide>(pairs + p * kWide);
                        store(out + p * kWide, numbers.low * by[p]);
                        store(out + 8 * kBlockTokens + p * kWide, numbers.high * by[p]);
                    });
        }
    }

    // out [16 tokens][head_dim]
    static void unpack_values(const Int4Pair* pairs, const Half* scales, int head_dim, int group, float* out) {
        for (int token = 0; token < kBlockTokens; token++)
            for (int start = 0; start < head_dim; start += group) {
                const v8 by = splat(to_float(scales[start / group * kBlockTokens + token]));
                for (int i = 0; i < group; i += 16, pairs += 8, out += 16) {
                    const Nibbles<v8> numbers = load_nibbles<v8>(pairs);
                    store(out, numbers.low * by);
                    store(out + 8, numbers.high * by);
                }
            }
    }
};

}  // namespace penstock
