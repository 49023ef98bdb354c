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

// u = (bits + 1/2) / 2^32, or 1 - u where u is above 1/2: exact in the bits, and never above 1/2.
PENSTOCK_INLINE v8 gumbel(v8u bits) {
    const v8i low = (v8i)bits >= splat_int(0), magnitude = low ? (v8i)bits : (v8i)~bits;
    const v8 one = splat(1.0f), u = (__builtin_convertvector(magnitude, v8) + splat(0.5f)) * splat(0x1p-32f);
    const v8 y = low ? one - u : u;
    const v8 log_y = log(y);
    // Where y is 1 the quotient is not a number, and not used.
    const v8 corrected = y == one ? u : log_y * (u / (y - one));
    return -log(low ? corrected : -log_y);
}

// The random bits above which no noise is larger than `needed`: the noise is -log(u) at most. The slack is for rounding.
inline uint32_t bits_for(float needed) {
    const float slacked = needed - 2e-3f;
    return slacked > 0.0f ? static_cast<uint32_t>(exp1(-slacked) * 4294967040.0f) : 0xffffffffu;
}

}  // namespace penstock
