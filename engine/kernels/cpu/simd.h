// Eight floats at a time, through the vector extensions of GCC and Clang; intrinsics only where those cannot say it.
// `wide` is what one register holds: 16 floats with AVX-512, four with NEON, else eight. It is for what is done element by
// element, so that the width changes no bit; sums over a vector always have eight lanes. (GCC keeps a vector that is wider
// than a register in memory.)
//
// Everything here is exact about order: no reassociation, and a fused multiply-add only where `fma` is written
// (-ffp-contract=off). The promise that a row's result does not depend on its batch rests on that.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PENSTOCK_AVX2 1
#include <immintrin.h>
#endif
#if PENSTOCK_AVX2 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PENSTOCK_AVX512 1
#endif
#if PENSTOCK_AVX512 ? defined(__AVX512VNNI__) : defined(__AVXVNNI__)
#define PENSTOCK_VNNI 1
#endif
#if defined(__ARM_NEON) && defined(__aarch64__) && !defined(PENSTOCK_NO_NEON)
#define PENSTOCK_NEON 1
#include <arm_neon.h>
#endif
#if PENSTOCK_NEON && defined(__ARM_FEATURE_DOTPROD)
#define PENSTOCK_DOTPROD 1
#else
#define PENSTOCK_DOTPROD 0
#endif

#define PENSTOCK_INLINE inline __attribute__((always_inline))

namespace penstock {

constexpr int kLanes = 8;

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t v8h __attribute__((vector_size(16)));

#if PENSTOCK_AVX512
constexpr int kWide = 16;
typedef float wide __attribute__((vector_size(64)));
typedef int32_t wide_int __attribute__((vector_size(64)));
#elif PENSTOCK_NEON
constexpr int kWide = 4;
typedef float wide __attribute__((vector_size(16)));
typedef int32_t wide_int __attribute__((vector_size(16)));
#else
constexpr int kWide = 8;
typedef v8 wide;
typedef v8i wide_int;
#endif

// A vector of as many integers as V has floats.
template <class V>
using IntsOf = std::conditional_t<sizeof(V) == sizeof(v8), v8i, wide_int>;

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};
struct Int8 {
    int8_t value;
};

PENSTOCK_INLINE v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }
PENSTOCK_INLINE v8i splat_int(int32_t x) { return v8i{x, x, x, x, x, x, x, x}; }
PENSTOCK_INLINE v8u splat_bits(uint32_t x) { return v8u{x, x, x, x, x, x, x, x}; }

// A vector of type V with the same number everywhere.
template <class V>
PENSTOCK_INLINE V all(float x) {
    return x - V{};
}

PENSTOCK_INLINE v8 fma(v8 a, v8 b, v8 c) {
#if PENSTOCK_AVX2
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif PENSTOCK_NEON
    union Pair {
        v8 whole;
        float32x4_t half[2];
    } x{a}, y{b}, z{c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.whole;
#else
    return a * b + c;
#endif
}

#if PENSTOCK_AVX512
PENSTOCK_INLINE wide fma(wide a, wide b, wide c) { return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif PENSTOCK_NEON
PENSTOCK_INLINE wide fma(wide a, wide b, wide c) { return (wide)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#endif

// Calls function with the constants 0 to Count - 1. A loop would do if every compiler unrolled it early enough to
// keep the sums in registers; GCC does not.
template <int Count, int At = 0, class Function>
PENSTOCK_INLINE void unrolled(const Function& function) {
    if constexpr (At < Count) {
        function(std::integral_constant<int, At>());
        unrolled<Count, At + 1>(function);
    }
}

#define PENSTOCK_EACH(name) [&](auto name) __attribute__((always_inline))

// ---- numbers of other types ------------------------------------------------------------------------------------

// Round to nearest even; a NaN stays one.
PENSTOCK_INLINE uint16_t to_bfloat_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if !PENSTOCK_AVX2 && !PENSTOCK_NEON
PENSTOCK_INLINE uint16_t float_to_half_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    const uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal: let the addition round
        float y;
        std::memcpy(&y, &magnitude, sizeof y);
        y += 0.5f;
        std::memcpy(&u, &y, sizeof u);
        return static_cast<uint16_t>(sign | (u - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
#endif

// The numbers of halves, given as their bits.
PENSTOCK_INLINE v8 halves_to_floats(v8h bits) {
#if PENSTOCK_AVX2
    return (v8)_mm256_cvtph_ps((__m128i)bits);
#elif PENSTOCK_NEON
    const float16x8_t h = vreinterpretq_f16_u16((uint16x8_t)bits);
    union {
        float32x4_t half[2];
        v8 whole;
    } x;
    x.half[0] = vcvt_f32_f16(vget_low_f16(h));
    x.half[1] = vcvt_f32_f16(vget_high_f16(h));
    return x.whole;
#else
    // The exponent and the mantissa move to their places in a float, where the exponent counts from 127 and not from 15.
    // The largest one means infinity or NaN in both, and the smallest a number without the leading 1 that is taken off
    // here. The masks are signs: GCC compares vectors that are wider than a register number by number.
    const v8i h = (v8i)__builtin_convertvector(bits, v8u);
    const v8i number = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
    const v8i is_subnormal = (number - (1 << 23)) >> 31, is_special = ((31 << 23) - 1 - number) >> 31;
    const v8i rebias = splat_int(112 << 23);
    const v8 magnitude = (v8)(number + rebias + (is_special & rebias) + (is_subnormal & (1 << 23)));
    return (v8)((v8i)(magnitude - (v8)(is_subnormal & (113 << 23))) | sign);
#endif
}

PENSTOCK_INLINE float to_float(float x) { return x; }

PENSTOCK_INLINE float to_float(BFloat x) {
    const uint32_t u = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &u, sizeof y);
    return y;
}

PENSTOCK_INLINE float to_float(Half x) { return halves_to_floats(v8h{x.bits})[0]; }

template <class T>
PENSTOCK_INLINE T from_float(float x);

template <>
PENSTOCK_INLINE float from_float<float>(float x) {
    return x;
}

template <>
PENSTOCK_INLINE BFloat from_float<BFloat>(float x) {
    return BFloat{to_bfloat_bits(x)};
}

template <>
PENSTOCK_INLINE Half from_float<Half>(float x) {
#if PENSTOCK_AVX2
    return Half{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#elif PENSTOCK_NEON
    const __fp16 h = static_cast<__fp16>(x);
    Half y;
    std::memcpy(&y.bits, &h, sizeof h);
    return y;
#else
    return Half{float_to_half_bits(x)};
#endif
}

// ---- loads and stores ------------------------------------------------------------------------------------------

PENSTOCK_INLINE v8 load(const float* p) {
    v8 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

PENSTOCK_INLINE v8 load(const Half* p) {
    v8h bits;
    std::memcpy(&bits, p, sizeof bits);
    return halves_to_floats(bits);
}

PENSTOCK_INLINE v8 load(const BFloat* p) {
#if PENSTOCK_AVX2
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    v8h bits;
    std::memcpy(&bits, p, sizeof bits);
    return (v8)(__builtin_convertvector(bits, v8u) << 16);
#endif
}

PENSTOCK_INLINE v8 load(const Int8* p) {
#if PENSTOCK_AVX2
    const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values));
#else
    v8 x;
    for (int i = 0; i < kLanes; i++) x[i] = p[i].value;
    return x;
#endif
}

// A vector of type V from as many stored numbers.
template <class V, class W>
PENSTOCK_INLINE V load_as(const W* p) {
    if constexpr (sizeof(V) == sizeof(v8)) {
        return load(p);
#if PENSTOCK_AVX512
    } else if constexpr (std::is_same_v<W, Half>) {
        return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (std::is_same_v<W, BFloat>) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    } else if constexpr (std::is_same_v<W, Int8>) {
        return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif PENSTOCK_NEON
    } else if constexpr (std::is_same_v<W, Half>) {
        return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
    } else if constexpr (std::is_same_v<W, BFloat>) {
        return (V)vshll_n_u16(vld1_u16(&p->bits), 16);
    } else if constexpr (std::is_same_v<W, Int8>) {
        int32_t bytes;
        std::memcpy(&bytes, p, sizeof bytes);
        const int16x8_t values = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
        return (V)vcvtq_f32_s32(vmovl_s16(vget_low_s16(values)));
#endif
    } else {
        V x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
}

template <class V>
PENSTOCK_INLINE void store(float* p, V x) {
    std::memcpy(p, &x, sizeof x);
}

// ---- the ends of rows ------------------------------------------------------------------------------------------

template <class V>
PENSTOCK_INLINE void store_first(float* out, V x, int count) {
    if (count >= static_cast<int>(sizeof(V) / sizeof(float))) return store(out, x);
    for (int i = 0; i < count; i++) out[i] = x[i];
}

template <class V>
PENSTOCK_INLINE V load_first(const float* in, int count) {
    if (count >= static_cast<int>(sizeof(V) / sizeof(float))) return load_as<V>(in);
    V x{};
    for (int i = 0; i < count; i++) x[i] = in[i];
    return x;
}

// Calls function(vector, i, count) for the vectors of n floats, from float i on, of which there are `count` more: wide ones,
// then eight floats at a time, of which the last may not be there. The vector tells the type; what it holds does not count.
template <class Function>
PENSTOCK_INLINE void for_vectors(int n, const Function& function) {
    int i = 0;
    for (; i + kWide <= n; i += kWide) function(wide{}, i, kWide);
    for (; i < n; i += kLanes) function(v8{}, i, n - i);
}

#define PENSTOCK_VECTORS(vector, i, count) [&](auto vector, int i, int count) __attribute__((always_inline))

// ---- reductions, always the same tree --------------------------------------------------------------------------

PENSTOCK_INLINE float sum(v8 x) {
#if PENSTOCK_AVX2
    const __m128 fours = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
    return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
#else
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}

// a > b ? a : b, and a < b ? a : b: both are b where either is no number.
#if PENSTOCK_AVX2
PENSTOCK_INLINE v8 max(v8 a, v8 b) { return (v8)_mm256_max_ps((__m256)a, (__m256)b); }
PENSTOCK_INLINE v8 min(v8 a, v8 b) { return (v8)_mm256_min_ps((__m256)a, (__m256)b); }
#else
PENSTOCK_INLINE v8 max(v8 a, v8 b) { return a > b ? a : b; }
PENSTOCK_INLINE v8 min(v8 a, v8 b) { return a < b ? a : b; }
#endif
#if PENSTOCK_AVX512
PENSTOCK_INLINE wide max(wide a, wide b) { return (wide)_mm512_max_ps((__m512)a, (__m512)b); }
PENSTOCK_INLINE wide min(wide a, wide b) { return (wide)_mm512_min_ps((__m512)a, (__m512)b); }
#elif PENSTOCK_NEON
PENSTOCK_INLINE wide max(wide a, wide b) { return a > b ? a : b; }
PENSTOCK_INLINE wide min(wide a, wide b) { return a < b ? a : b; }
#endif

// Stores integers in the fewer bits of Integer, which hold them.
template <class Integer>
PENSTOCK_INLINE void store_narrow(Integer* out, wide_int x) {
#if PENSTOCK_AVX2 && !PENSTOCK_AVX512  // GCC takes a vector of bytes together one by one
    if constexpr (sizeof(Integer) == 1) {
        const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(shorts, shorts));
        return;
    }
#endif
    typedef Integer Integers __attribute__((vector_size(kWide * sizeof(Integer))));
    const Integers narrow = __builtin_convertvector(x, Integers);
    std::memcpy(out, &narrow, sizeof narrow);
}

// The largest lane.
PENSTOCK_INLINE float max(v8 x) {
#if PENSTOCK_AVX2
    const __m128 fours = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
    return _mm_cvtss_f32(_mm_max_ss(twos, _mm_movehdup_ps(twos)));
#else
    float m = x[0];
    for (int i = 1; i < kLanes; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

// ---- masks: lanes are all ones or zero --------------------------------------------------------------------------

PENSTOCK_INLINE bool any(v8i mask) {
#if PENSTOCK_AVX2
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int32_t found = 0;
    for (int i = 0; i < kLanes; i++) found |= mask[i];
    return found != 0;
#endif
}

// Bit i is lane i.
PENSTOCK_INLINE unsigned bits_of(v8i mask) {
#if PENSTOCK_AVX2
    return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#else
    unsigned bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= (mask[i] & 1u) << i;
    return bits;
#endif
}

// ---- exp, about 1e-7 relative; exp(0) is exactly 1 -------------------------------------------------------------

// e^x = 2^n e^r with r in [-ln2/2, ln2/2], ln 2 in two parts (Cody and Waite), e^r by its Taylor polynomial.
// Below -87.3, where 2^n leaves the normal numbers, the result is 0; above 88.3 it stays at e^88.3.
// kBelow: x is not above 0, and what 2^n is where it leaves the normal numbers does not matter.
template <class V, bool kBelow = false>
PENSTOCK_INLINE V exp(V x) {
    const V lowest = all<V>(-87.3f), highest = all<V>(88.3f);
    const V clamped = kBelow ? x : x < lowest ? lowest : (x > highest ? highest : x);
    const V magic = all<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const V shifted = fma(clamped, all<V>(1.44269504088896341f), magic);
    const V n = shifted - magic;
    V r = fma(n, all<V>(-0.693359375f), clamped);
    r = fma(n, all<V>(2.12194440054690583e-4f), r);
    V p = all<V>(1.0f / 5040);
    p = fma(p, r, all<V>(1.0f / 720));
    p = fma(p, r, all<V>(1.0f / 120));
    p = fma(p, r, all<V>(1.0f / 24));
    p = fma(p, r, all<V>(1.0f / 6));
    p = fma(p, r, all<V>(0.5f));
    p = fma(p, r, all<V>(1.0f));
    p = fma(p, r, all<V>(1.0f));
    const IntsOf<V> power = ((IntsOf<V>)shifted - 0x4b400000 + 127) << 23;
    const V result = p * (V)power;
    return x < lowest ? V{} : result;
}

template <class V>
PENSTOCK_INLINE V exp_below(V x) {
    return exp<V, true>(x);
}

// The hyperbolic tangent, about 1e-7 absolute.
template <class V>
PENSTOCK_INLINE V tanh(V x) {
    const V one = all<V>(1.0f), e = exp(x < V{} ? x + x : -(x + x)), y = (one - e) / (one + e);
    return x < V{} ? -y : y;
}

PENSTOCK_INLINE float exp1(float x) { return exp(splat(x))[0]; }

// ---- 2^x up to x = 127, about 2e-7 relative; exp2(0) is exactly 1 ----------------------------------------------

// 2^x = 2^n 2^r with r in [-1/2, 1/2], which is exact, and 2^r by a polynomial of the least relative error (9e-8) among
// those that are 1 at 0. Below -126, where 2^n leaves the normal numbers, the result is 0.
template <class V>
PENSTOCK_INLINE V exp2(V x) {
    const V magic = all<V>(12582912.0f + 127);  // 1.5 * 2^23 plus the bias: the sum's low bits are 2^n's exponent
    const V shifted = x + magic;
    const V r = x - (shifted - magic);
    V p = all<V>(1.326472062e-03f);
    p = fma(p, r, all<V>(9.671513598e-03f));
    p = fma(p, r, all<V>(5.550733770e-02f));
    p = fma(p, r, all<V>(2.402224207e-01f));
    p = fma(p, r, all<V>(6.931469776e-01f));
    p = fma(p, r, all<V>(1.0f));
    const V result = p * (V)((IntsOf<V>)shifted << 23);
    return x < all<V>(-126.0f) ? V{} : result;
}

// ---- log of positive normal numbers, below 1 ulp ---------------------------------------------------------------

// x = 2^e m with m in [sqrt(1/2), sqrt(2)); with f = m - 1 and s = f / (2 + f), log(m) = 2 artanh(s) = f - s (f - r),
// where r = 2/3 s^2 + 2/5 s^4 + ... is small beside f. ln 2 is in two parts.
PENSTOCK_INLINE v8 log(v8 x) {
    const v8i root = splat_int(0x3f3504f3);  // sqrt(1/2)
    const v8i above = (v8i)x - root;
    const v8 e = __builtin_convertvector(above >> 23, v8);
    const v8 f = (v8)((above & splat_int(0x007fffff)) + root) - splat(1.0f);
    const v8 s = f / (splat(2.0f) + f), square = s * s;
    v8 r = splat(2.0f / 9);
    r = fma(r, square, splat(2.0f / 7));
    r = fma(r, square, splat(2.0f / 5));
    r = fma(r, square, splat(2.0f / 3));
    r = r * square;
    const v8 tail = fma(e, splat(-2.12194440054690583e-4f), -(s * (f - r)));
    return fma(e, splat(0.693359375f), f + tail);
}

}  // namespace penstock
