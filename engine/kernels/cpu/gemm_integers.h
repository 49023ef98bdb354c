// Products of integers: rows of int8 activations times panels of int8 or int4 weights.
//
// For each group of k, ascending: the exact sum of a * w in int32, as a float32 times the group's scale, then the exact
// sum of a times the group's offset, are added to the output's sum by fused multiply-adds. Nothing else is rounded, so
// that every instruction set gives the same bits.
//
// Instructions that multiply bytes want one side unsigned. AVX-512 adds 128 to int8 weights, AVX2 moves the sign of a
// weight to the activation; the halves of the bytes of int4 are unsigned as they are. What they are above the weights
// is taken off with the sum of the group's activations.
#pragma once

#include "gemm_tiles.h"

namespace penstock {

constexpr int kQuad = 4 * kPanel;  // bytes: four neighbours in k of 16 outputs

// The sums of 16 outputs.
constexpr int kParts = kPanel / kWide;
struct IntegerSums {
    wide_int part[kParts];
};

// ---- four products for each of 16 outputs --------------------------------------------------------------------------

#if PENSTOCK_AVX512 && defined(__AVX512VNNI__)

constexpr int kSignedOffset = 128;
constexpr int kIntegerRows = 6, kIntegerPanels = 4;

struct Quads {
    __m512i w;  // unsigned
};

PENSTOCK_INLINE Quads signed_quads(const uint8_t* p) {
    return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)))};
}

template <bool kHigh>
PENSTOCK_INLINE Quads unsigned_quads(const uint8_t* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    return {_mm512_and_si512(kHigh ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15))};
}

template <bool kSigned>
PENSTOCK_INLINE void add_products(IntegerSums& sums, const Quads& quads, int32_t a) {
    sums.part[0] = (wide_int)_mm512_dpbusd_epi32((__m512i)sums.part[0], quads.w, _mm512_set1_epi32(a));
}

#elif PENSTOCK_AVX2

constexpr int kSignedOffset = 0;
constexpr int kIntegerRows = 4, kIntegerPanels = 1;

struct Quads {
    __m256i w[2];
    __m256i magnitude[2];
};

PENSTOCK_INLINE Quads signed_quads(const uint8_t* p) {
    Quads quads;
    for (int i = 0; i < 2; i++) {
        quads.w[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        quads.magnitude[i] = _mm256_abs_epi8(quads.w[i]);
    }
    return quads;
}

template <bool kHigh>
PENSTOCK_INLINE Quads unsigned_quads(const uint8_t* p) {
    Quads quads;
    for (int i = 0; i < 2; i++) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        quads.magnitude[i] =
            _mm256_and_si256(kHigh ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
    }
    return quads;
}

// Neither int8 nor int4 saturates the sums of two in 16 bits: 2 * 127 * 127 is below 2^15.
template <bool kSigned>
PENSTOCK_INLINE void add_products(IntegerSums& sums, const Quads& quads, int32_t a) {
    const __m256i four = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) {
        const __m256i x = kSigned ? _mm256_sign_epi8(four, quads.w[i]) : four;
        const __m256i pairs = _mm256_maddubs_epi16(quads.magnitude[i], x);
        sums.part[i] += (v8i)_mm256_madd_epi16(pairs, ones);
    }
}

#else

constexpr int kSignedOffset = 0;
constexpr int kIntegerRows = 4, kIntegerPanels = 1;

struct Quads {
    int32_t w[4][kPanel];
};

PENSTOCK_INLINE Quads signed_quads(const uint8_t* p) {
    Quads quads;
    for (int i = 0; i < kQuad; i++) quads.w[i % 4][i / 4] = static_cast<int8_t>(p[i]);
    return quads;
}

template <bool kHigh>
PENSTOCK_INLINE Quads unsigned_quads(const uint8_t* p) {
    Quads quads;
    for (int i = 0; i < kQuad; i++) quads.w[i % 4][i / 4] = p[i] >> (kHigh ? 4 : 0) & 15;
    return quads;
}

template <bool kSigned>
PENSTOCK_INLINE void add_products(IntegerSums& sums, const Quads& quads, int32_t a) {
    int8_t four[4];
    std::memcpy(four, &a, sizeof four);
    for (int i = 0; i < 4; i++)
        for (int part = 0; part < kParts; part++) {
            wide_int w;
            std::memcpy(&w, quads.w[i] + part * kWide, sizeof w);
            sums.part[part] += w * four[i];
        }
}

#endif

// ---- groups ----------------------------------------------------------------------------------------------------------

PENSTOCK_INLINE int32_t four_of(const int8_t* a) {
    int32_t x;
    std::memcpy(&x, a, sizeof x);
    return x;
}

// a * b + c, rounded once: at this width by float64 where there is no such instruction. The sum is rounded to odd, as in
// fused_multiply_add of linear.py.
PENSTOCK_INLINE wide fused(wide a, wide b, wide c) {
#if PENSTOCK_AVX2 || PENSTOCK_NEON
    return fma(a, b, c);
#else
    wide y;
    for (int i = 0; i < kWide; i++) {
        const double product = double(a[i]) * b[i], total = product + c[i], added = total - product;
        const double error = (product - (total - added)) + (c[i] - added);
        int64_t bits;
        std::memcpy(&bits, &total, sizeof bits);
        const bool is_odd = bits & 1, outwards = (error > 0) == (total > 0);
        if (std::fabs(error) > 0 && !is_odd) bits += outwards ? 1 : -1;
        double odd;
        std::memcpy(&odd, &bits, sizeof odd);
        y[i] = static_cast<float>(odd);
    }
    return y;
#endif
}

// What a group of a panel adds to its 16 outputs.
struct Factors {
    const float* scales;
    const float* offsets;  // or null
};

PENSTOCK_INLINE Factors factors_of(const Linear& linear, int panel, int group) {
    const size_t at = static_cast<size_t>(group) * kPanel;
    return {linear.panel_scales(panel) + at, linear.offsets ? linear.panel_offsets(panel) + at : nullptr};
}

// Adds a group to out, the sums of 16 outputs, or sets them where it is the first: `sums` of products, less `taken_off`,
// and the sum of the activations.
PENSTOCK_INLINE void fold(const IntegerSums& sums, int32_t taken_off, float activations, const Factors& by, float* out,
                          bool first) {
    for (int i = 0; i < kParts; i++) {
        const wide exact = __builtin_convertvector(sums.part[i] - taken_off, wide);
        wide y = first ? wide{} : load_as<wide>(out + i * kWide);
        y = fused(exact, load_as<wide>(by.scales + i * kWide), y);
        if (by.offsets) y = fused(all<wide>(activations), load_as<wide>(by.offsets + i * kWide), y);
        store(out + i * kWide, y);
    }
}

// What folds a group of a panel that comes soon: too little in one place for the processor to see it coming.
PENSTOCK_INLINE void fetch_factors(const Linear& linear, int panel, int group) {
    const Factors by = factors_of(linear, panel, group);
    __builtin_prefetch(by.scales);
    if (by.offsets) __builtin_prefetch(by.offsets);
}

// Rows x Panels sums of 16 outputs, by vectors.
template <bool kInt4, int Rows, int Panels>
void integer_block(const Linear& linear, int panel, const Activations& x, float* sums, size_t by_panel) {
    const size_t panel_bytes = linear.panel_bytes();
    const int groups = linear.groups(), length = groups == 1 ? linear.depth : linear.group;
    constexpr int kStep = kInt4 ? 8 : 4;
    const uint8_t* w = linear.panel<uint8_t>(panel);
    for (int g = 0; g < groups; g++) {
        unrolled<Panels>(PENSTOCK_EACH(p) { fetch_factors(linear, panel + Panels + p, g); });
        IntegerSums parts[Rows][Panels] = {};
        for (int k = g * length; k < (g + 1) * length; k += kStep, w += kQuad)
            unrolled<Panels>(PENSTOCK_EACH(p) {
                const uint8_t* at = w + p * panel_bytes;
                __builtin_prefetch(at + kStreamAhead);
                const Quads quads = kInt4 ? unsigned_quads<false>(at) : signed_quads(at);
                unrolled<Rows>(PENSTOCK_EACH(r) {
                    add_products<!kInt4>(parts[r][p], quads, four_of(x.row<int8_t>(r) + k));
                });
                if constexpr (kInt4) {
                    const Quads high = unsigned_quads<true>(at);
                    unrolled<Rows>(PENSTOCK_EACH(r) {
                        add_products<false>(parts[r][p], high, four_of(x.row<int8_t>(r) + k + 4));
                    });
                }
            });
        const int shift = kInt4 ? -linear.int4_lowest() : kSignedOffset;
        for (int r = 0; r < Rows; r++) {
            const float activations = x.sums[r * x.groups + g];
            for (int p = 0; p < Panels; p++)
                fold(parts[r][p], shift * static_cast<int32_t>(activations), activations, factors_of(linear, panel + p, g),
                     sums + p * by_panel + r * kPanel, g == 0);
        }
    }
}

template <bool kInt4, int Rows, int Panels = kIntegerPanels>
int integer_panels(const Linear& linear, int panel, int panels, const Activations& x, float* sums, size_t by_panel) {
    if constexpr (Panels > 1)
        if (panels < Panels) return integer_panels<kInt4, Rows, Panels / 2>(linear, panel, panels, x, sums, by_panel);
    integer_block<kInt4, Rows, Panels>(linear, panel, x, sums, by_panel);
    return Panels;
}

template <bool kInt4, int Rows = kIntegerRows>
int integer_rows(int rows, const Linear& linear, int panel, int panels, const Activations& x, float* sums,
                 size_t by_panel) {
    if constexpr (Rows > 1)
        if (rows < Rows) return integer_rows<kInt4, Rows - 1>(rows, linear, panel, panels, x, sums, by_panel);
    return integer_panels<kInt4, Rows>(linear, panel, panels, x, sums, by_panel);
}

template <bool kInt4>
void multiply_by_vectors(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                         size_t by_panel) {
    for (int p = 0; p < panels;) {
        int done = 1;
        for (int r = 0; r < rows; r += kIntegerRows)
            done = integer_rows<kInt4>(rows - r, linear, panel + p, panels - p, x.from(r),
                                       sums + p * by_panel + r * kPanel, by_panel);
        p += done;
    }
}

// ---- by tiles ----------------------------------------------------------------------------------------------------------

#if PENSTOCK_TILES

// Steps of a half and a quarter of the depth, for groups that are no multiple of a whole one.
constexpr TileShapes kHalfTiles = {1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};
constexpr TileShapes kQuarterTiles = {1, 0, {}, {64, 64, 64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 16, 16, 4, 4}};
constexpr int kMostUnpacked = 128;  // k of int4 at a time

// int4 weights of one panel, k from `from`, as int8.
inline void unpack_int4(const Linear& linear, int panel, int from, int count, int8_t* out) {
    const uint8_t* in = linear.panel<uint8_t>(panel) + static_cast<size_t>(from) * kPanel / 2;
    const int lowest = linear.int4_lowest();
    for (int k = 0; k < count; k += 8, in += kQuad, out += 2 * kQuad)
        for (int i = 0; i < kQuad; i++) {
            out[i] = static_cast<int8_t>((in[i] & 15) + lowest);
            out[kQuad + i] = static_cast<int8_t>((in[i] >> 4) + lowest);
        }
}

// sums [panels][rows, padded to tiles][16] by tiles, two panels at a time.
template <bool kInt4>
void multiply_by_tiles(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                       size_t by_panel) {
    constexpr int kTileSums = kTileHeight * kPanel;
    const int groups = linear.groups(), length = groups == 1 ? linear.depth : linear.group;
    const int step = length % 64 == 0 ? 64 : length % 32 == 0 ? 32 : 16;
    const int at_once = kInt4 ? std::min(length, kMostUnpacked) : length;
    use_tiles(step == 64 ? kWholeTiles : step == 32 ? kHalfTiles : kQuarterTiles);
    alignas(64) int8_t unpacked[kInt4 ? 2 * kMostUnpacked * kPanel : 1];
    alignas(64) int32_t found[2 * 2 * kTileSums];
    const size_t b_panel = kInt4 ? static_cast<size_t>(at_once) * kPanel : linear.panel_bytes();
    const TileStrides by{x.stride, b_panel, 2 * kTileSums, step};
    for (int p = 0; p < panels; p += 2) {
        const int some = std::min(2, panels - p);
        for (int g = 0; g < groups; g++)
            for (int t = 0; t < rows; t += 2 * kTileHeight) {
                for (int k = g * length; k < (g + 1) * length; k += at_once) {
                    const int count = std::min(at_once, (g + 1) * length - k);
                    const char* b = linear.panel<char>(panel + p) + static_cast<size_t>(k) * kPanel;
                    if constexpr (kInt4) {
                        if (t == 0 || length > at_once)
                            for (int q = 0; q < some; q++)
                                unpack_int4(linear, panel + p + q, k, count, unpacked + q * b_panel);
                        b = reinterpret_cast<const char*>(unpacked);
                    }
                    tile_panels<true>(rows - t > kTileHeight ? 2 : 1, some, x.row<char>(t) + k, b, count / step,
                                      reinterpret_cast<char*>(found), by, k == g * length, !kInt4 && t == 0);
                }
                for (int q = 0; q < some; q++)
                    for (int r = 0; r < std::min(2 * kTileHeight, rows - t); r++) {
                        IntegerSums exact;
                        std::memcpy(&exact, found + q * 2 * kTileSums + r * kPanel, sizeof exact);
                        fold(exact, 0, x.sums[(t + r) * x.groups + g], factors_of(linear, panel + p + q, g),
                             sums + (p + q) * by_panel + (t + r) * kPanel, g == 0);
                    }
            }
    }
}

#endif

// sums [panels][rows, padded to tiles][16] = rows of int8 times the panels.
template <bool kInt4>
void multiply_integers(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums) {
    const size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
#if PENSTOCK_TILES
    if (rows > kIntegerRows) return multiply_by_tiles<kInt4>(linear, panel, panels, x, rows, sums, by_panel);
#endif
    multiply_by_vectors<kInt4>(linear, panel, panels, x, rows, sums, by_panel);
}

}  // namespace penstock
