// Products of pairs of bfloat16 by vectors of AVX-512: sum += odd * odd + even * even in every lane.
//
// The instruction has an order of its own: a fused multiply-add of the odd numbers of a pair, the ones that stand higher,
// and then one of the even numbers. Denormal numbers count as zeros, and become zeros, whatever the thread's control
// register says. (Intel's manual, VDPBF16PS.)
//
// Where there are tiles, these multiply bfloat16, in another order.
#pragma once

#include "tiles.h"

namespace penstock {

// Neighbours in k.
struct BFloatPair {
    BFloat even, odd;
};

#if PENSTOCK_AVX512 && defined(__AVX512BF16__) && !PENSTOCK_TILES
#define PENSTOCK_PAIRS 1

// The same pair in every lane.
template <class V>
PENSTOCK_INLINE V all(BFloatPair x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (V)_mm512_set1_epi32(bits);
}

template <class V>
PENSTOCK_INLINE V dot(V a, V b, V sum) {
    return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

#endif

}  // namespace penstock
