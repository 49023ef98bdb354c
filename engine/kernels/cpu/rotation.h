// Rows multiplied by Hadamard matrices, which spread what stands out in a few channels over all channels of a block.
#pragma once

#include <utility>

#include "simd.h"

namespace penstock {

constexpr int bits_of(int power) { return power > 1 ? 1 + bits_of(power / 2) : 0; }

constexpr int kLaneBits = bits_of(kWide);  // of the number of a lane

// Lanes in which a bit of their number is set change places with those in which it is not.
template <int kBit, class V, int... I>
PENSTOCK_INLINE V exchanged_lanes(V x, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, (I ^ kBit)...);
#else
    return __builtin_shuffle(x, wide_int{(I ^ kBit)...});
#endif
}

template <int kBit, class V>
PENSTOCK_INLINE V exchanged(V x) {
    return exchanged_lanes<kBit>(x, std::make_integer_sequence<int, kWide>());
}

// -1 in the lanes whose number has a bit, else 1.
template <int kBit, int... I>
PENSTOCK_INLINE wide signs_of_lanes(std::integer_sequence<int, I...>) {
    return wide{(I & kBit ? -1.0f : 1.0f)...};
}

template <int kBit>
PENSTOCK_INLINE wide signs() {
    return signs_of_lanes<kBit>(std::make_integer_sequence<int, kWide>());
}

constexpr int kMostRotated = 128;  // inputs of a block

// The signs of the inputs of a block, over and over: see quant/rotation.py.
struct RotationSigns {
    constexpr RotationSigns() {
        for (int i = 0; i < kMostRotated; i++) {
            const int both = i & i >> 1;
            of[i] = (both ^ both >> 2 ^ both >> 4) & 1 ? -1.0f : 1.0f;
        }
    }
    float of[kMostRotated] = {};
};
constexpr RotationSigns kRotationSigns;

inline void change_signs(const float* x, int n, int block, float* out) {
    for (int i = 0; i < n; i++) out[i] = x[i] * kRotationSigns.of[i & (block - 1)];
}

// The steps of a transform between lanes, of blocks of which a vector has one or more.
template <int Block>
PENSTOCK_INLINE wide transformed_lanes(wide y) {
    unrolled<kLaneBits>(PENSTOCK_EACH(step) {
        constexpr int kHalf = kWide >> (step + 1);
        if constexpr (2 * kHalf <= Block) y = fma(y, signs<kHalf>(), exchanged<kHalf>(y));  // exact products
    });
    return y;
}

constexpr int kHeldVectors = 8;  // at most: with what a step takes, they fit the registers

// Multiplies one block by its Hadamard matrix, after its signs if they are wanted; `out` may be x.
template <int Block, bool kSigned>
PENSTOCK_INLINE void transform_block(const float* x, float* out) {
    constexpr int kCount = Block / kWide, kLower = kCount / 2;
    const auto input = [&](int i) __attribute__((always_inline)) {
        const wide y = load_as<wide>(x + i * kWide);
        return kSigned ? y * load_as<wide>(kRotationSigns.of + i * kWide) : y;
    };
    if constexpr (kCount > kHeldVectors) {
        for (int i = 0; i < kLower; i++) {
            const wide a = input(i), b = input(i + kLower);
            store(out + i * kWide, a + b);
            store(out + (i + kLower) * kWide, a - b);
        }
        for (int half = 0; half < 2; half++, out += Block / 2) transform_block<Block / 2, false>(out, out);
    } else {
        wide y[kCount];
        unrolled<kCount>(PENSTOCK_EACH(i) { y[i] = input(i); });
        unrolled<bits_of(kCount)>(PENSTOCK_EACH(step) {
            constexpr int kHalf = kCount >> (step + 1);
            unrolled<kLower>(PENSTOCK_EACH(i) {
                constexpr int kFirst = i / kHalf * 2 * kHalf + i % kHalf;
                const wide a = y[kFirst], b = y[kFirst + kHalf];
                y[kFirst] = a + b;
                y[kFirst + kHalf] = a - b;
            });
        });
        unrolled<kCount>(PENSTOCK_EACH(i) { store(out + i * kWide, transformed_lanes<Block>(y[i])); });
    }
}

// Multiplies each block of a row by the Hadamard matrix of its size, a power of 2 up to Block that divides n.
template <bool kSigned, int Block = kMostRotated>
inline void transform(const float* x, int n, int block, float* out) {
    if (block < Block) {
        if constexpr (Block > 1) transform<kSigned, Block / 2>(x, n, block, out);
    } else if constexpr (Block >= kWide) {
        for (int i = 0; i < n; i += Block) transform_block<Block, kSigned>(x + i, out + i);
    } else {
        if (kSigned) change_signs(x, n, Block, out);
        const float* from = kSigned ? out : x;
        for (int i = 0; i < n; i += kWide)
            store_first(out + i, transformed_lanes<Block>(load_first<wide>(from + i, n - i)), n - i);
    }
}

// As `rotated` and `rotated_back` of quant/rotation.py, bit for bit; `out` may be x.
inline void rotate(const float* x, int n, int block, float* out) { transform<true>(x, n, block, out); }

inline void rotate_back(float* x, int n, int block) {
    transform<false>(x, n, block, x);
    change_signs(x, n, block, x);
}

}  // namespace penstock
