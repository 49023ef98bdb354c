// Products of integers: rows of int8 activations times panels of int8 or int4 weights.
//
// For each group of k, ascending: the exact sum of a * w in int32, as a float32 times the scale of the activations, times
// the weights' scale, then the exact sum of a, times the scale of the activations, times the offset, are added to the
// output's sum by fused multiply-adds. Nothing else is rounded, so that every instruction set gives the same bits.
//
// Instructions that multiply bytes want one side unsigned. VNNI adds 128 to int8 weights, plain AVX2 moves the sign of a
// weight to the activation, for many rows by an instruction that more ports have; the parts of the bytes of fewer bits are
// unsigned as they are. What they are above the weights is taken off with the sum of the group's activations.
#pragma once

#include "gemm_tiles.h"
#include "narrow.h"

namespace penstock {

// The sums of 16 outputs.
struct IntegerSums {
    wide_int part[kParts];
};

// ---- four products for each of 16 outputs --------------------------------------------------------------------------

#if PENSTOCK_VNNI
constexpr int kSignedOffset = 128;
constexpr int kIntegerRows = 6, kIntegerPanels = kWide == 16 ? 4 : 1;
#else
constexpr int kSignedOffset = 0;
constexpr int kIntegerRows = PENSTOCK_DOTPROD ? 6 : 4, kIntegerPanels = 1;
#endif
#if PENSTOCK_AVX2 && !PENSTOCK_VNNI
#define PENSTOCK_BYTE_PAIRS 1  // products of bytes are added in 16 bits
#endif

// The bytes of four neighbours in k of 16 outputs.
struct Quads {
    wide_bytes w[kParts];
};

// kPart: of the parts of the bytes, the lowest first; `planes` has the bits above all parts, or is a table.
template <Type kType, int kPart>
PENSTOCK_INLINE Quads quads_at(const uint8_t* p, const uint8_t* planes) {
    constexpr int kLow = low_bits_of(kType), kPlanes = planes_of(kType);
    Quads quads;
    unrolled<kParts>(PENSTOCK_EACH(i) {
        wide_bytes bytes = load_bytes(p + 4 * kWide * i);
        if (kType == Type::int8) bytes ^= kSignedOffset;
        if constexpr (kLow < 8) bytes = bytes >> kLow * kPart & static_cast<uint8_t>((1 << kLow) - 1);
        if constexpr (kType == Type::int_places)
            bytes = looked_up(planes, bytes);
        else
            bytes = with_high_bits<kLow, kPlanes>(bytes, planes + 8 * kPlanes * kPart + kWide / 2 * i);
        quads.w[i] = bytes;
    });
    return quads;
}

template <Type kType>
PENSTOCK_INLINE void add_products(IntegerSums& sums, const Quads& quads, int32_t a) {
#if PENSTOCK_AVX512 && PENSTOCK_VNNI
    sums.part[0] = (wide_int)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)quads.w[0], _mm512_set1_epi32(a));
#elif PENSTOCK_VNNI
    for (int i = 0; i < kParts; i++)
        sums.part[i] = (v8i)_mm256_dpbusd_avx_epi32((__m256i)sums.part[i], (__m256i)quads.w[i], _mm256_set1_epi32(a));
#elif PENSTOCK_AVX2  // the sums of two in 16 bits do not saturate: 2 * 128 * 127 is below 2^15
    static_assert(kType == Type::int8);
    const __m256i four = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < kParts; i++) {
        const __m256i w = (__m256i)quads.w[i];
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
        sums.part[i] += (v8i)_mm256_madd_epi16(pairs, ones);
    }
#elif PENSTOCK_DOTPROD
    for (int i = 0; i < kParts; i++)
        sums.part[i] = (wide_int)vdotq_s32((int32x4_t)sums.part[i], (int8x16_t)quads.w[i], vreinterpretq_s8_s32(vdupq_n_s32(a)));
#elif PENSTOCK_NEON  // nor do they here
    static_assert(kType == Type::int8 || kType == Type::int4 || kType == Type::nibbles);
    const int8x8_t four = vreinterpret_s8_s32(vdup_n_s32(a));
    for (int i = 0; i < kParts; i++) {
        const int8x16_t w = (int8x16_t)quads.w[i];
        const int16x8_t low = vmull_s8(vget_low_s8(w), four), high = vmull_s8(vget_high_s8(w), four);
        sums.part[i] = (wide_int)vpadalq_s16((int32x4_t)sums.part[i], vpaddq_s16(low, high));
    }
#else
    int8_t four[4];
    std::memcpy(four, &a, sizeof four);
    for (int i = 0; i < kParts; i++)
        for (int j = 0; j < 4; j++) {
            const wide_int high = (wide_int)quads.w[i] << (24 - 8 * j);
            sums.part[i] += (kType == Type::int8 ? high >> 24 : high >> 24 & 255) * four[j];
        }
#endif
}

PENSTOCK_INLINE int32_t four_of(const int8_t* a) {
    int32_t x;
    std::memcpy(&x, a, sizeof x);
    return x;
}

// Some panels' weights from a group on.
struct Weights {
    const uint8_t* data;
    const uint8_t* planes;  // of bits above the low ones, where weights are read as they are stored; or a table
    size_t by_panel;  // bytes
    bool streamed;    // from memory: fetched ahead
    const int32_t* missing = nullptr;  // of magnitudes: see split_signs, [groups][16]
};

template <Type kType>
constexpr size_t bytes_of(int k) {
    return static_cast<size_t>(k) * kPanel * low_bits_of(kType) / (kType == Type::magnitudes ? 4 : 8);
}

template <Type kType>
constexpr size_t plane_bytes_of(int k) {
    return static_cast<size_t>(k) * kPanel / 8 * planes_of(kType);
}

#if PENSTOCK_BYTE_PAIRS

// Eight sums of two products of int4 fit 16 bits: 16 * 15 * 127 is below 2^15.
template <Type kType, int Rows>
PENSTOCK_INLINE void add_nibbles(IntegerSums (&sums)[Rows][1], const Weights& weights, const Activations& x, int k,
                                 int count) {
    const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const uint8_t* w = weights.data;
    for (const int end = k + count; k < end;) {
        asm volatile("" : "+m"(sums));  // they wait in memory, the registers are full of pairs
        __m256i pairs[Rows][2] = {};
        for (const int some = std::min(k + 32, end); k < some; k += 8, w += bytes_of<kType>(8)) {
            if (weights.streamed) __builtin_prefetch(w + kStreamAhead);
            const auto add = [&](__m256i first, __m256i second, int at) __attribute__((always_inline)) {
                unrolled<Rows>(PENSTOCK_EACH(r) {
                    const __m256i four = _mm256_set1_epi32(four_of(x.row<int8_t>(r) + at));
                    pairs[r][0] = _mm256_add_epi16(pairs[r][0], _mm256_maddubs_epi16(first, four));
                    pairs[r][1] = _mm256_add_epi16(pairs[r][1], _mm256_maddubs_epi16(second, four));
                    asm("" : "+x"(pairs[r][0]), "+x"(pairs[r][1]));  // or GCC adds in an order that spills
                });
            };
            const auto half = [&](int i) { return (__m256i)load_bytes(w + 32 * i); };
            if constexpr (kType == Type::nibbles) {
                add(half(0), half(1), k);
                add(half(2), half(3), k + 4);
            } else {
                const auto high = [&](__m256i bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_bits); };
                const __m256i first = half(0), second = half(1);
                add(_mm256_and_si256(first, low_bits), _mm256_and_si256(second, low_bits), k);
                add(high(first), high(second), k + 4);
            }
        }
        unrolled<Rows>(PENSTOCK_EACH(r) {
            for (int i = 0; i < 2; i++) sums[r][0].part[i] += (v8i)_mm256_madd_epi16(pairs[r][i], ones);
        });
    }
}

// Writes `count` k of int8 as magnitudes and as masks of those below zero, [count / 4][2][16][4]. With a mask's bits turned, an
// activation a is -a - 1: the product with the magnitude lacks the magnitude. `missing` [16] has the sums of what lacks.
inline void split_signs(const uint8_t* in, int count, uint8_t* out, int32_t* missing) {
    const __m256i one = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
    v8i lacking[kParts] = {};
    for (int k = 0; k < count; k += 4, in += kQuad, out += 2 * kQuad)
        for (int i = 0; i < kParts; i++) {
            const __m256i w = (__m256i)load_bytes(in + 4 * kWide * i), magnitude = _mm256_abs_epi8(w);
            const __m256i mask = _mm256_cmpgt_epi8(_mm256_setzero_si256(), w);
            std::memcpy(out + 4 * kWide * i, &magnitude, sizeof magnitude);
            std::memcpy(out + kQuad + 4 * kWide * i, &mask, sizeof mask);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(magnitude, mask), one);
            lacking[i] += (v8i)_mm256_madd_epi16(pairs, ones);
        }
    std::memcpy(missing, lacking, sizeof lacking);
}

// Two of these instructions are the multipliers', where int8 as it is takes three.
template <int Rows>
PENSTOCK_INLINE void add_magnitudes(IntegerSums (&sums)[Rows][1], const uint8_t* w, const Activations& x, int k, int count) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (const int end = k + count; k < end; k += 4, w += 2 * kQuad) {
        __m256i magnitudes[kParts], masks[kParts];
        unrolled<kParts>(PENSTOCK_EACH(i) {
            magnitudes[i] = (__m256i)load_bytes(w + 4 * kWide * i);
            masks[i] = (__m256i)load_bytes(w + kQuad + 4 * kWide * i);
        });
        unrolled<Rows>(PENSTOCK_EACH(r) {
            const __m256i four = _mm256_set1_epi32(four_of(x.row<int8_t>(r) + k));
            unrolled<kParts>(PENSTOCK_EACH(i) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes[i], _mm256_xor_si256(four, masks[i]));
                sums[r][0].part[i] += (v8i)_mm256_madd_epi16(pairs, ones);
                asm("" : "+x"(sums[r][0].part[i]));  // or GCC adds in an order that spills
            });
        });
    }
}

#endif

// Adds `count` products to each of Rows x Panels sums of 16 outputs.
template <Type kType, int Rows, int Panels>
PENSTOCK_INLINE void add_products_of_group(IntegerSums (&sums)[Rows][Panels], const Weights& weights,
                                           const Activations& x, int k, int count) {
    constexpr int kQuads = 8 / low_bits_of(kType), kStep = 4 * kQuads;
    const uint8_t *w = weights.data, *planes = weights.planes;
#if PENSTOCK_BYTE_PAIRS
    if constexpr (kType == Type::magnitudes)
        add_magnitudes(sums, w, x, k, count);
    else if constexpr (kType != Type::int8)
        add_nibbles<kType>(sums, weights, x, k, count);
    else
#endif
    for (const int end = k + count; k < end; k += kStep, w += kQuad, planes += plane_bytes_of<kType>(kStep))
        unrolled<Panels>(PENSTOCK_EACH(p) {
            const uint8_t *at = w + p * weights.by_panel;
            const uint8_t *above = kType == Type::int_places ? planes : planes + p * weights.by_panel;
            if (weights.streamed) {
                __builtin_prefetch(at + kStreamAhead);
                if constexpr (planes_of(kType) > 0) __builtin_prefetch(above + kHighAhead);
            }
            unrolled<kQuads>(PENSTOCK_EACH(part) {
                const Quads quads = quads_at<kType, part>(at, above);
                unrolled<Rows>(PENSTOCK_EACH(r) {
                    add_products<kType>(sums[r][p], quads, four_of(x.row<int8_t>(r) + k + 4 * part));
                });
            });
        });
}

// ---- groups ----------------------------------------------------------------------------------------------------------

PENSTOCK_INLINE wide_int load_ints(const void* p) {
    wide_int x;
    std::memcpy(&x, p, sizeof x);
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

// A sum of outputs, those of one register, with a group added: first the exact sum of its products, then that of its
// activations.
PENSTOCK_INLINE wide add_scaled(wide_int products, float scale, const Factors& by, int part, wide sum) {
    return fused(__builtin_convertvector(products, wide) * all<wide>(scale), load_as<wide>(by.scales + part * kWide), sum);
}

PENSTOCK_INLINE wide add_offset(float activations, const Factors& by, int part, wide sum) {
    return fused(all<wide>(activations), load_as<wide>(by.offsets + part * kWide), sum);
}

// The scale of a group of a row, and its sum times it.
struct GroupOfRow {
    GroupOfRow(const Activations& x, int group, int row)
        : scale(x.group_scales[group * x.by_group + row]), sum(x.sums[group * x.by_group + row] * scale) {}

    float scale, sum;
};

PENSTOCK_INLINE wide add_group(wide_int products, const GroupOfRow& of, const Factors& by, int part, wide sum) {
    sum = add_scaled(products, of.scale, by, part, sum);
    return by.offsets ? add_offset(of.sum, by, part, sum) : sum;
}

// Adds the groups [from, to) to Rows x Panels sums of 16 outputs, or sets them where `from` is the first. `factors` are ready,
// if there are no more groups than they hold at a time.
// Not inline: sums of fewer rows would take the registers of more.
template <Type kType, int Rows, int Panels>
__attribute__((noinline)) void integer_block(const Linear& linear, GroupFactors<Panels, kGroupsTogether>& factors,
                                             Weights weights, int from, int to, const Activations& x, float* sums,
                                             size_t by_panel) {
    const int length = linear.group_depth();
    const bool is_signed = kType == Type::int8 || kType == Type::int_places || kType == Type::magnitudes;
    const int shift = is_signed ? kSignedOffset : -linear.lowest();
    const bool by_parts = factors.narrow() && to - from > kGroupsTogether;
    for (int g = from; g < to; g++) {
        if (weights.streamed) unrolled<Panels>(PENSTOCK_EACH(p) { factors.fetch(Panels + p, g); });
        if (by_parts && (g - from) % kGroupsTogether == 0) factors.prepare(g, std::min(to, g + kGroupsTogether));
        IntegerSums products[Rows][Panels];
        unrolled<Rows>(PENSTOCK_EACH(r) {
            const int32_t taken_off = shift * static_cast<int32_t>(x.sums[g * x.by_group + r]);
            unrolled<Panels * kParts>(PENSTOCK_EACH(i) {
                wide_int& begun = products[r][i / kParts].part[i % kParts];
                if constexpr (kType == Type::magnitudes)
                    begun = load_ints(weights.missing + i % kParts * kWide);
                else
                    begun = wide_int{} - taken_off;
            });
        });
        add_products_of_group<kType>(products, weights, x, g * length, length);
        unrolled<Panels>(PENSTOCK_EACH(p) {
            const Factors by = factors.of(p, g);
            unrolled<Rows>(PENSTOCK_EACH(r) {
                const GroupOfRow of(x, g, r);
                unrolled<kParts>(PENSTOCK_EACH(i) {
                    float* out = sums + p * by_panel + r * kPanel + i * kWide;
                    store(out, add_group(products[r][p].part[i], of, by, i, g == 0 ? wide{} : load_as<wide>(out)));
                });
            });
        });
        weights.data += bytes_of<kType>(length);
        weights.planes += plane_bytes_of<kType>(length);
        if (kType == Type::magnitudes) weights.missing += kPanel;
    }
}

// The same for all rows, as many at a time as registers hold.
template <Type kType, int Panels>
void integer_panels(const Linear& linear, int panel, Weights weights, int from, int to, const Activations& x, int rows,
                    float* sums, size_t by_panel) {
    GroupFactors<Panels, kGroupsTogether> factors(linear, panel);
    if (to - from <= kGroupsTogether) factors.prepare(from, to);
    for (int r = 0; r < rows; r += kIntegerRows) {
        with_count<kIntegerRows>(std::min(rows - r, kIntegerRows), [&](auto count) {
            integer_block<kType, count(), Panels>(linear, factors, weights, from, to, x.from(r), sums + r * kPanel, by_panel);
        });
        weights.streamed = false;
    }
}

// Weights of less than 8 bits, unpacked once for all rows: int4 to what its bits are, others to int8.
template <Type kType, int Panels>
void unpacked_panels(const Linear& linear, int panel, const Activations& x, int rows, float* sums, size_t by_panel) {
    alignas(64) uint8_t unpacked[Panels * kMostUnpacked * kPanel];
    const int groups = linear.groups(), length = linear.group_depth();
    const int lowest = kType == Type::int8 ? linear.lowest() : 0;
    const int most = std::min((rows > kIntegerRows ? kMostUnpacked : kFewUnpacked) / length, kGroupsTogether);
    const int at_once = std::max(1, most);
    const Weights weights{unpacked, unpacked, static_cast<size_t>(at_once * length) * kPanel, false};
    for (int from = 0; from < groups; from += at_once) {
        const int to = std::min(groups, from + at_once);
        for (int p = 0; p < Panels; p++)
            unpack_weights(linear, panel + p, from * length, (to - from) * length, lowest, unpacked + p * weights.by_panel);
        integer_panels<kType, Panels>(linear, panel, weights, from, to, x, rows, sums, by_panel);
    }
}

// Where a row is one group, its parts are summed up in `sums` as integers, which become outputs here; `missing` [16] is what
// they lack, or null.
inline void fold_rows(const Linear& linear, int panel, const Activations& x, int rows, const int32_t* missing, float* sums) {
    const Factors by = GroupFactors<1, 1>(linear, panel).of(0, 0);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < kParts; i++, sums += kWide) {
            const wide_int lacking = missing ? load_ints(missing + i * kWide) : wide_int{};
            store(sums, add_group(load_ints(sums) + lacking, GroupOfRow(x, 0, r), by, i, wide{}));
        }
}

#if PENSTOCK_BYTE_PAIRS

constexpr int kSplitDepth = 512;  // k of a panel that stay in the first-level cache as magnitudes
constexpr int kSplitRows = 19;    // from so many on it is worth it

// The weights of `count` k as magnitudes, and what is missing of a group.
inline void split_weights(const Linear& linear, int panel, int k, int count, uint8_t* out, int32_t* missing) {
    if (linear.type == Type::int8) return split_signs(linear.panel<uint8_t>(panel) + k * kPanel, count, out, missing);
    alignas(64) uint8_t bytes[kSplitDepth * kPanel];
    unpack_weights(linear, panel, k, count, linear.lowest(), bytes);
    split_signs(bytes, count, out, missing);
}

// Adds the products of `count` k to those of rows of one group, or sets them where k is 0.
template <int Rows>
__attribute__((noinline)) void add_part(const uint8_t* w, const Activations& x, int k, int count, float* sums) {
    IntegerSums products[Rows][1];
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
        products[i / kParts][0].part[i % kParts] = k == 0 ? wide_int{} : load_ints(sums + i * kWide);
    });
    add_magnitudes(products, w, x, k, count);
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { store(sums + i * kWide, (wide)products[i / kParts][0].part[i % kParts]); });
}

// A panel of weights of any bits for many rows, split once for all of them.
inline void split_panel(const Linear& linear, int panel, const Activations& x, int rows, float* sums, size_t by_panel) {
    alignas(64) uint8_t split[2 * kSplitDepth * kPanel];
    alignas(64) int32_t missing[kSplitDepth / kLeastGroup * kPanel];
    const int groups = linear.groups(), length = linear.group_depth();
    if (groups == 1) {
        int32_t total[kPanel] = {};
        const int depth = round_up(even_part(length, kSplitDepth), 32);
        for (int k = 0; k < length; k += depth) {
            const int count = std::min(depth, length - k);
            split_weights(linear, panel, k, count, split, missing);
            for (int i = 0; i < kPanel; i++) total[i] += missing[i];
            for (int r = 0; r < rows; r += kIntegerRows)
                with_count<kIntegerRows>(std::min(rows - r, kIntegerRows), [&](auto some) {
                    add_part<some()>(split, x.from(r), k, count, sums + r * kPanel);
                });
        }
        return fold_rows(linear, panel, x, rows, total, sums);
    }
    const int at_once = std::min(kSplitDepth / length, kGroupsTogether);
    const Weights weights{split, nullptr, sizeof split, false, missing};
    for (int from = 0; from < groups; from += at_once) {
        const int to = std::min(groups, from + at_once);
        for (int g = from; g < to; g++)
            split_weights(linear, panel, g * length, length, split + bytes_of<Type::magnitudes>((g - from) * length),
                          missing + (g - from) * kPanel);
        integer_panels<Type::magnitudes, 1>(linear, panel, weights, from, to, x, rows, sums, by_panel);
    }
}

#endif

template <int Panels = kIntegerPanels>
void multiply_by_vectors(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                         size_t by_panel) {
    const ByteTable table(linear, kSignedOffset);
    for (; panels >= Panels; panel += Panels, panels -= Panels, sums += Panels * by_panel) {
        const uint8_t* data = linear.panel<uint8_t>(panel);
        const Weights weights{data, linear.table ? table.bytes : data + linear.high_bits(0), linear.panel_bytes(), true};
        const auto as_stored = [&](auto type) {
            integer_panels<type(), Panels>(linear, panel, weights, 0, linear.groups(), x, rows, sums, by_panel);
        };
        const bool often = rows > kIntegerRows && linear.group_depth() <= kMostUnpacked;
#if PENSTOCK_BYTE_PAIRS
        const bool splits = rows >= kSplitRows && linear.type != Type::int4;
        if (splits && (linear.groups() == 1 || linear.group <= kSplitDepth)) {
            split_panel(linear, panel, x, rows, sums, by_panel);
            continue;
        }
#endif
        if (linear.type == Type::int8)
            as_stored(TypeIs<Type::int8>());
        else if (linear.type == Type::int4 && often)
            unpacked_panels<Type::nibbles, Panels>(linear, panel, x, rows, sums, by_panel);
        else if (linear.type == Type::int4)
            as_stored(TypeIs<Type::int4>());
#if PENSTOCK_VNNI
        else if (!often)
            with_bits(linear.type, as_stored);
#endif
        else
            unpacked_panels<Type::int8, Panels>(linear, panel, x, rows, sums, by_panel);
    }
    if constexpr (Panels > 1)
        if (panels > 0) multiply_by_vectors<Panels / 2>(linear, panel, panels, x, rows, sums, by_panel);
}

// Each is compiled in a unit of its own, gemm_integers_*.cpp, where it is used.
extern template void multiply_by_vectors<1>(const Linear&, int, int, const Activations&, int, float*, size_t);
extern template void multiply_by_vectors<2>(const Linear&, int, int, const Activations&, int, float*, size_t);
extern template void multiply_by_vectors<4>(const Linear&, int, int, const Activations&, int, float*, size_t);

}  // namespace penstock
