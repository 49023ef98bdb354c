// The noise of every token of every position, as engine/sampling/noise.py specifies it.
#pragma once

#include "simd.h"

namespace penstock {

constexpr float kMostNoise = 22.89f;  // no noise is larger

// The noise key of output token `number`: that output of the SplitMix64 generator with this state.
inline uint64_t noise_key(uint64_t state, int32_t number) {
    uint64_t mixed = state + (static_cast<uint64_t>(static_cast<int64_t>(number)) + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return mixed ^ (mixed >> 31);
}

PENSTOCK_INLINE v8u finalized(v8u x) {
    x ^= x >> 16;
    x *= splat_bits(0x85EBCA6Bu);
    x ^= x >> 13;
    x *= splat_bits(0xC2B2AE35u);
    return x ^ (x >> 16);
}

PENSTOCK_INLINE v8u hashes(v8i ids, uint64_t key) {
    const v8u low = splat_bits(static_cast<uint32_t>(key)), high = splat_bits(static_cast<uint32_t>(key >> 32));
    return finalized(finalized((v8u)ids ^ low) ^ high);
}

// u, or 1 - u in the upper half of the bits, where `low` is not set: exact in the bits, and never above 1/2.
PENSTOCK_INLINE v8 folded(v8u bits, v8i low) {
    const v8i magnitude = low ? (v8i)bits : (v8i)~bits;
    return (__builtin_convertvector(magnitude, v8) + splat(0.5f)) * splat(2.3283064365386963e-10f);  // 2^-32
}

PENSTOCK_INLINE v8 gumbel(v8u bits) {
    const v8i low = (v8i)bits >= splat_int(0);
    const v8 u = folded(bits, low), one = splat(1.0f);
    const v8 y = low ? one - u : u;
    const v8 log_y = log(y);
    // Where y is 1 the quotient is not a number, and not used.
    const v8 corrected = y == one ? u : log_y * (u / (y - one));
    return -log(low ? corrected : -log_y);
}

// At least the noise, without a logarithm. E >= u, and log2 lies above the chord between two powers of two, which is
// the float's bits read as a number; in the upper half of the bits E >= ln 2. The slack is for all the rounding.
PENSTOCK_INLINE v8 gumbel_bound(v8u bits) {
    const v8i low = (v8i)bits >= splat_int(0);
    const v8 log2_u = __builtin_convertvector((v8i)folded(bits, low) - splat_int(127 << 23), v8);
    const v8 bound = log2_u * splat(-0.693148f / (1 << 23)) + splat(1e-3f);
    return low ? bound : splat(0.368f);
}

}  // namespace penstock
