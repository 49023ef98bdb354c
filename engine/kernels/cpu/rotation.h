// Rows multiplied by Hadamard matrices, which spread what stands out in a few channels over all channels of a block.
#pragma once

#include <utility>

#include "simd.h"

namespace penstock {

constexpr int kLaneBits = kWide == 16 ? 4 : kWide == 8 ? 3 : 2;  // of the number of a lane

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

// Multiplies each block of a row, in place, by the Hadamard matrix of its size, a power of 2 that divides n.
inline void transform(float* x, int n, int block) {
    for (int half = block / 2; half >= kWide; half /= 2)
        for (int from = 0; from < n; from += 2 * half)
            for (int i = from; i < from + half; i += kWide) {
                const wide a = load_as<wide>(x + i), b = load_as<wide>(x + i + half);
                store(x + i, a + b);
                store(x + i + half, a - b);
            }
    for (int i = 0; i < n; i += kWide) {
        wide y = load_first<wide>(x + i, n - i);
        unrolled<kLaneBits>(PENSTOCK_EACH(step) {
            constexpr int kHalf = kWide >> (step + 1);
            if (2 * kHalf <= block) y = exchanged<kHalf>(y) + y * signs<kHalf>();
        });
        store_first(x + i, y, n - i);
    }
}

// As `rotated` and `rotated_back` of quant/rotation.py, bit for bit; `out` may be x.
inline void rotate(const float* x, int n, int block, float* out) {
    change_signs(x, n, block, out);
    transform(out, n, block);
}

inline void rotate_back(float* x, int n, int block) {
    transform(x, n, block);
    change_signs(x, n, block, x);
}

}  // namespace penstock
