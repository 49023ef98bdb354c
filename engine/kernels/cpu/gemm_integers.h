// Products of integers: rows of int8 activations times panels of int8 or int4 weights.
//
// For each group of k, ascending: the exact sum of a * w in int32, as a float32 times the group's scale, then the exact
// sum of a times the group's offset, are added to the output's sum by fused multiply-adds. Nothing else is rounded, so
// that every instruction set gives the same bits.
//
// Instructions that multiply bytes want one side unsigned. VNNI adds 128 to int8 weights, plain AVX2 moves the sign of a
// weight to the activation; the parts of the bytes of fewer bits are unsigned as they are. What they are above the weights
// is taken off with the sum of the group's activations.
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
};

template <Type kType>
constexpr size_t bytes_of(int k) {
    return static_cast<size_t>(k) * kPanel * low_bits_of(kType) / 8;
}

template <Type kType>
constexpr size_t plane_bytes_of(int k) {
    return static_cast<size_t>(k) * kPanel / 8 * planes_of(kType);
}

#if PENSTOCK_AVX2 && !PENSTOCK_VNNI

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

#endif

// Adds `count` products to each of Rows x Panels sums of 16 outputs.
template <Type kType, int Rows, int Panels>
PENSTOCK_INLINE void add_products_of_group(IntegerSums (&sums)[Rows][Panels], const Weights& weights,
                                           const Activations& x, int k, int count) {
    constexpr int kQuads = 8 / low_bits_of(kType), kStep = 4 * kQuads;
    const uint8_t *w = weights.data, *planes = weights.planes;
#if PENSTOCK_AVX2 && !PENSTOCK_VNNI
    if constexpr (kType != Type::int8)
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
PENSTOCK_INLINE wide add_scaled(wide_int products, const Factors& by, int part, wide sum) {
    return fused(__builtin_convertvector(products, wide), load_as<wide>(by.scales + part * kWide), sum);
}

PENSTOCK_INLINE wide add_offset(float activations, const Factors& by, int part, wide sum) {
    return fused(all<wide>(activations), load_as<wide>(by.offsets + part * kWide), sum);
}

PENSTOCK_INLINE wide add_group(wide_int products, float activations, const Factors& by, int part, wide sum) {
    sum = add_scaled(products, by, part, sum);
    return by.offsets ? add_offset(activations, by, part, sum) : sum;
}

// Adds the groups [from, to) to Rows x Panels sums of 16 outputs, or sets them where `from` is the first.
// Not inline: sums of fewer rows would take the registers of more.
template <Type kType, int Rows, int Panels>
__attribute__((noinline)) void integer_block(const Linear& linear, int panel, Weights weights, int from, int to, const Activations& x,
                   float* sums, size_t by_panel) {
    const int length = linear.group_depth();
    const bool is_signed = kType == Type::int8 || kType == Type::int_places;
    const int shift = is_signed ? kSignedOffset : -linear.lowest();
    GroupFactors<Panels, kGroupsTogether> factors(linear, panel);
    for (int g = from; g < to; g++) {
        if (weights.streamed) unrolled<Panels>(PENSTOCK_EACH(p) { factors.fetch(Panels + p, g); });
        if (factors.narrow() && (g - from) % factors.kGroups == 0) factors.prepare(g, std::min(to, g + factors.kGroups));
        IntegerSums products[Rows][Panels];
        unrolled<Rows * Panels>(PENSTOCK_EACH(i) { products[i / Panels][i % Panels] = {}; });
        add_products_of_group<kType>(products, weights, x, g * length, length);
        unrolled<Panels>(PENSTOCK_EACH(p) {
            const Factors by = factors.of(p, g);
            unrolled<Rows>(PENSTOCK_EACH(r) {
                const float activations = x.sums[g * x.sums_stride + r];
                const int32_t taken_off = shift * static_cast<int32_t>(activations);
                unrolled<kParts>(PENSTOCK_EACH(i) {
                    float* out = sums + p * by_panel + r * kPanel + i * kWide;
                    store(out, add_group(products[r][p].part[i] - taken_off, activations, by, i,
                                         g == 0 ? wide{} : load_as<wide>(out)));
                });
            });
        });
        weights.data += bytes_of<kType>(length);
        weights.planes += plane_bytes_of<kType>(length);
    }
}

// The same for all rows, as many at a time as registers hold.
template <Type kType, int Panels>
void integer_panels(const Linear& linear, int panel, Weights weights, int from, int to, const Activations& x, int rows,
                    float* sums, size_t by_panel) {
    for (int r = 0; r < rows; r += kIntegerRows) {
        with_count<kIntegerRows>(std::min(rows - r, kIntegerRows), [&](auto count) {
            integer_block<kType, count(), Panels>(linear, panel, weights, from, to, x.from(r), sums + r * kPanel, by_panel);
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
    const int at_once = std::max(1, (rows > kIntegerRows ? kMostUnpacked : kFewUnpacked) / length);
    const Weights weights{unpacked, unpacked, static_cast<size_t>(at_once * length) * kPanel, false};
    for (int from = 0; from < groups; from += at_once) {
        const int to = std::min(groups, from + at_once);
        for (int p = 0; p < Panels; p++)
            unpack_weights(linear, panel + p, from * length, (to - from) * length, lowest, unpacked + p * weights.by_panel);
        integer_panels<kType, Panels>(linear, panel, weights, from, to, x, rows, sums, by_panel);
    }
}

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

// ---- by tiles ----------------------------------------------------------------------------------------------------------

#if PENSTOCK_TILES

// Steps of a half and a quarter of the depth, for groups that are no multiple of a whole one.
constexpr TileShapes kHalfTiles = {1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};
constexpr TileShapes kQuarterTiles = {1, 0, {}, {64, 64, 64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 16, 16, 4, 4}};

constexpr int kTileSums = kTileHeight * kPanel;
constexpr int kGroupsAtOnce = 4;   // each has a tile of sums
constexpr int kPanelsAtOnce = 2;   // weights of so many panels, and
constexpr int kDepthAtOnce = 256;  // of so many k, if they are in groups, stay in the first-level cache for all rows

typedef GroupFactors<kPanelsAtOnce, kDepthAtOnce / kLeastGroup> TileFactors;

// Adds the groups [from, to) to the first Rows rows of a tile of sums. What the tiles find passes through memory to the
// sums, which are in registers.
template <int Rows>
void add_tile_groups(const Linear& linear, const TileFactors& factors, int panel, int from, int to, const Activations& x,
                     const char* b, int step, bool streamed, float* sums) {
    alignas(64) int32_t found[kGroupsAtOnce * kTileSums];
    wide total[Rows * kParts];
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { total[i] = from == 0 ? wide{} : load_as<wide>(sums + i * kWide); });
    const size_t b_step = static_cast<size_t>(step) * kPanel;
    const char* a = x.row<char>(0) + from * linear.group;
    for (int g = from; g < to; g += kGroupsAtOnce) {
        const int some = std::min(kGroupsAtOnce, to - g);
        unrolled<kGroupsAtOnce>(PENSTOCK_EACH(j) {
            if (j >= some) return;
            constexpr int kA = 4 + j % 2, kB = 6 + j % 2;
            tile_zero<j>();
            for (int k = 0; k < linear.group; k += step, a += step, b += b_step) {
                if (streamed)
                    for (size_t i = 0; i < b_step; i += 64) __builtin_prefetch(b + kStreamAhead + i);
                tile_load<kA>(a, x.stride);
                tile_load<kB>(b, 64);
                tile_dot_int8<j, kA, kB>();
            }
            tile_store<j>(found + j * kTileSums, kPanel * sizeof(int32_t));
        });
        for (int j = 0; j < some; j++) {
            const Factors by = factors.of(panel, g + j);
            unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
                wide_int products;
                std::memcpy(&products, found + j * kTileSums + i * kWide, sizeof products);
                total[i] = add_scaled(products, by, i % kParts, total[i]);
            });
            if (!by.offsets) continue;
            const float* activations = x.sums + (g + j) * x.sums_stride;
            unrolled<Rows * kParts>(PENSTOCK_EACH(i) {
                total[i] = add_offset(activations[i / kParts], by, i % kParts, total[i]);
            });
        }
    }
    unrolled<Rows * kParts>(PENSTOCK_EACH(i) { store(sums + i * kWide, total[i]); });
}

// Where a row is one group, its tiles are summed up in `sums` as integers, which become outputs here.
inline void fold_rows(const Linear& linear, int panel, const Activations& x, int rows, float* sums) {
    const Factors by = GroupFactors<1, 1>(linear, panel).of(0, 0);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < kParts; i++, sums += kWide) {
            wide_int products;
            std::memcpy(&products, sums, sizeof products);
            store(sums, add_group(products, x.sums[r], by, i, wide{}));
        }
}

// sums [panels][rows, padded to tiles][16] by tiles. Of the weights, no more are taken at a time than the first-level
// cache has room for.
inline void integers_by_tiles(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                              size_t by_panel) {
    alignas(64) uint8_t unpacked[kPanelsAtOnce * kMostUnpacked * kPanel];
    const bool unpacks = linear.type != Type::int8;
    const int length = linear.group_depth(), step = length % 64 == 0 ? 64 : length % 32 == 0 ? 32 : 16;
    const bool is_whole = linear.groups() == 1;
    const int at_once = is_whole ? kMostUnpacked : std::max(1, kDepthAtOnce / length) * length;
    const size_t b_panel = unpacks ? static_cast<size_t>(at_once) * kPanel : linear.panel_bytes();
    const TileStrides by{x.stride, b_panel, by_panel, step};
    const auto add = rows > kTileHeight / 2 ? add_tile_groups<kTileHeight> : add_tile_groups<kTileHeight / 2>;
    use_tiles(step == 64 ? kWholeTiles : step == 32 ? kHalfTiles : kQuarterTiles);
    for (int p = 0; p < panels; p += kPanelsAtOnce) {
        const int some = std::min(kPanelsAtOnce, panels - p);
        TileFactors factors(linear, panel + p);
        for (int k = 0; k < linear.depth; k += at_once) {
            const int count = std::min(at_once, linear.depth - k);
            const char* b = linear.panel<char>(panel + p) + static_cast<size_t>(k) * kPanel;
            if (!is_whole) factors.prepare(k / length, (k + count) / length);
            if (unpacks) {
                for (int q = 0; q < some; q++)
                    unpack_weights(linear, panel + p + q, k, count, linear.lowest(), unpacked + q * b_panel);
                b = reinterpret_cast<const char*>(unpacked);
            }
            for (int t = 0; t < rows; t += is_whole ? 2 * kTileHeight : kTileHeight) {
                float* out = sums + p * by_panel + t * kPanel;
                const bool streamed = !unpacks && t == 0;
                if (is_whole)
                    tile_panels<true>(rows - t > kTileHeight ? 2 : 1, some, x.row<char>(t) + k, b, count / step,
                                      reinterpret_cast<char*>(out), by, k == 0, streamed);
                else
                    for (int q = 0; q < some; q++)
                        add(linear, factors, q, k / length, (k + count) / length, x.from(t), b + q * b_panel, step,
                            streamed, out + q * by_panel);
            }
        }
        if (is_whole)
            for (int q = p; q < p + some; q++) fold_rows(linear, panel + q, x, rows, sums + q * by_panel);
    }
}

#endif

// sums [panels][rows, padded to tiles][16] = rows of int8 times the panels.
inline void multiply_integers(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums) {
    const size_t by_panel = static_cast<size_t>(round_up(rows, 16)) * kPanel;
#if PENSTOCK_TILES
    if (rows > kIntegerRows) return integers_by_tiles(linear, panel, panels, x, rows, sums, by_panel);
#endif
    multiply_by_vectors(linear, panel, panels, x, rows, sums, by_panel);
}

}  // namespace penstock
