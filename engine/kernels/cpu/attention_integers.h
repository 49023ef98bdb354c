// Both products of attention in integers, for a cache in int8 where no tiles multiply it.
//
// Queries become integers of 16 bits, and so do the weights that a row has in a span, times the scales of their values:
// the largest is 32,767, so that the others lose a 256th of what keys and values have lost already. Products are summed in
// 32 bits, exactly. So the sums have no order to keep, and are the same on every level.
#pragma once

#include "attention_rows.h"
#include "attention_span.h"

namespace penstock {

// As many numbers of 16 bits as go into V.
template <class V>
struct Shorts {
    typedef int16_t Vector __attribute__((vector_size(sizeof(V))));
};
template <class V>
using ShortsOf = typename Shorts<V>::Vector;

// Pairs as the cache has them. On NEON their even halves come first, then the odd ones, so that products need no sums
// across lanes.
template <class V>
PENSTOCK_INLINE ShortsOf<V> load_pairs_of(const Int8* p) {
#if PENSTOCK_AVX512
    if constexpr (sizeof(V) == 64)
        return (ShortsOf<V>)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    else
#endif
#if PENSTOCK_AVX2
        return (ShortsOf<V>)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif PENSTOCK_NEON
    const int8x8_t bytes = vtbl1_s8(vld1_s8(&p->value), vcreate_s8(0x0705030106040200));
    return (ShortsOf<V>)vmovl_s8(bytes);
#else
    typedef int8_t Bytes __attribute__((vector_size(sizeof(V) / 2)));
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ShortsOf<V>);
#endif
}

// The same pair everywhere.
template <class V>
PENSTOCK_INLINE ShortsOf<V> all_pairs(const int16_t* p) {
#if PENSTOCK_NEON
    return (ShortsOf<V>)vcombine_s16(vdup_n_s16(p[0]), vdup_n_s16(p[1]));
#else
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return (ShortsOf<V>)(both - IntsOf<V>{});
#endif
}

// sum + even * even + odd * odd, in every lane
template <class V>
PENSTOCK_INLINE IntsOf<V> add_pairs(ShortsOf<V> x, ShortsOf<V> y, IntsOf<V> sum) {
#if PENSTOCK_AVX512 && PENSTOCK_VNNI
    if constexpr (sizeof(V) == 64)
        return (IntsOf<V>)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
    else
#elif PENSTOCK_AVX512
    if constexpr (sizeof(V) == 64)
        return sum + (IntsOf<V>)_mm512_madd_epi16((__m512i)x, (__m512i)y);
    else
#endif
#if PENSTOCK_VNNI && !PENSTOCK_AVX512
    return (IntsOf<V>)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
#elif PENSTOCK_AVX2
        return sum + (IntsOf<V>)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif PENSTOCK_NEON
    const int32x4_t evens = vmlal_s16((int32x4_t)sum, vget_low_s16((int16x8_t)x), vget_low_s16((int16x8_t)y));
    return (IntsOf<V>)vmlal_high_s16(evens, (int16x8_t)x, (int16x8_t)y);
#else
    const auto even = [](ShortsOf<V> pairs) { return (IntsOf<V>)pairs << 16 >> 16; };
    const auto odd = [](ShortsOf<V> pairs) { return (IntsOf<V>)pairs >> 16; };
    return sum + even(x) * even(y) + odd(x) * odd(y);
#endif
}

// Or else compilers add several products to each other first, and have not registers enough to keep them all.
template <class Sum>
PENSTOCK_INLINE void keep_order(Sum& sum) {
#if PENSTOCK_AVX512
    asm volatile("" : "+v"(sum));
#elif PENSTOCK_AVX2
    asm volatile("" : "+x"(sum));
#elif PENSTOCK_NEON
    asm volatile("" : "+w"(sum));
#else
    (void)sum;
#endif
}

// Rows x Vectors sums of products.
template <class V, int kRows, int kVectors>
class PairProducts {
   public:
    static constexpr int kWidth = sizeof(V) / sizeof(float);

    PENSTOCK_INLINE PairProducts() {
        each([&](auto r, auto j) __attribute__((always_inline)) { sums_[r][j] = IntsOf<V>{}; });
    }

    // Two steps of k. A row has them side by side, and so have the vectors from y on, one after another.
    PENSTOCK_INLINE void add(const int16_t* x, size_t stride, const Int8* const* y) {
        if constexpr (kRows < kVectors) {  // the fewer operands stay in registers, the others pass through
            ShortsOf<V> pairs[kRows];
            unrolled<kRows>(PENSTOCK_EACH(r) { pairs[r] = all_pairs<V>(x + r * stride); });
            unrolled<kVectors>(PENSTOCK_EACH(j) {
                const ShortsOf<V> factor = load_pairs_of<V>(place(y, j));
                unrolled<kRows>(PENSTOCK_EACH(r) { add_product(sums_[r][j], pairs[r], factor); });
            });
        } else {
            ShortsOf<V> factors[kVectors];
            unrolled<kVectors>(PENSTOCK_EACH(j) { factors[j] = load_pairs_of<V>(place(y, j)); });
            unrolled<kRows>(PENSTOCK_EACH(r) {
                const ShortsOf<V> pair = all_pairs<V>(x + r * stride);
                unrolled<kVectors>(PENSTOCK_EACH(j) { add_product(sums_[r][j], pair, factors[j]); });
            });
        }
    }

    // Calls function(row, first column, sums as floats).
    template <class Function>
    PENSTOCK_INLINE void finish(const Function& function) const {
        each([&](auto r, auto j) __attribute__((always_inline)) {
            function(r(), j * kWidth, __builtin_convertvector(sums_[r][j], V));
        });
    }

   private:
    // A pointer for every 16 columns, or for the only eight.
    static constexpr int kTogether = std::min(kVectors, kPanel / kWidth);

    static PENSTOCK_INLINE const Int8* place(const Int8* const* y, int j) {
        return y[j / kTogether] + j % kTogether * 2 * kWidth;
    }

    static PENSTOCK_INLINE void add_product(IntsOf<V>& sum, ShortsOf<V> x, ShortsOf<V> y) {
        sum = add_pairs<V>(x, y, sum);
        keep_order(sum);
    }

    template <class Function>
    static PENSTOCK_INLINE void each(const Function& function) {
        unrolled<kRows>(PENSTOCK_EACH(r) { unrolled<kVectors>(PENSTOCK_EACH(j) { function(r, j); }); });
    }

    IntsOf<V> sums_[kRows][kVectors];
};

class IntegerProducts {
   public:
    using Operand = int16_t;

    static void begin(int) {}

    static void advance(const Rows<int16_t>& rows, const Span<Int8>& span, const SpanTokens& tokens,
                        AttentionScratch& scratch) {
        const SpanScales* scales = gather_scales(span, tokens, scratch);
        advance_in_passes(
            rows, tokens, scales,
            [&](const auto& pass, int block, const SpanTokens& seen, bool fetches) __attribute__((always_inline)) {
                score(pass, span, block, seen, fetches);
            },
            [&](const auto& pass, int block, const SpanTokens& seen, bool fetches) __attribute__((always_inline)) {
                add_values(pass, span, block, seen, fetches);
            });
    }

   private:
    // Of eight lanes: 6 x 2 sums, 2 vectors, a pair and a product are 16 registers.
    static constexpr int most_panels(int rows) { return kWide == 16 || rows == 1 ? 4 : rows == 2 ? 2 : 1; }

    // Calls function(start, constant rows, constant panels, fetches) for tiles of rows, as long as there are panels.
    template <class Function>
    static PENSTOCK_INLINE void for_row_tiles(int rows, int panels, bool fetches, const Function& function) {
        for_tiles(rows, [&](int start, int height) {
            with_count<kTileRows>(height, PENSTOCK_EACH(count) {
                constexpr int kMost = most_panels(count());
                if (panels == kMost)
                    function(start, count, std::integral_constant<int, kMost>(), fetches && start == 0);
                else
                    function(start, count, std::integral_constant<int, 1>(), fetches && start == 0);
            });
        });
    }

    static int panels_of(int rows, int left) {
        const int most = most_panels(std::min(rows, kTileRows));
        return left >= most ? most : 1;
    }

    // scores [rows][tokens of the span] = queries times keys, without the scales of these
    static void score(const Rows<int16_t>& rows, const Span<Int8>& span, int block, const SpanTokens& seen, bool fetches) {
        for (int b = 0, panels; b < seen.blocks(); b += panels) {
            panels = panels_of(rows.count, seen.blocks() - b);
            for_row_tiles(rows.count, panels, fetches, [&](int start, auto count, auto blocks, bool fetches) {
                score_blocks<count(), blocks()>(rows, start, span, block + b, seen.column() + b * kBlockTokens, fetches);
            });
        }
    }

    template <int kRows, int kBlocks>
    static void score_blocks(const Rows<int16_t>& rows, int start, const Span<Int8>& span, int block, int column,
                             bool fetches) {
        PairProducts<wide, kRows, kBlocks * kBlockParts> products;
        const int16_t* q = rows.q + start * rows.q_stride;
        const Int8* keys[kBlocks];
        const char* ahead[kBlocks];
        unrolled<kBlocks>(PENSTOCK_EACH(b) {
            keys[b] = span.keys[block + b];
            ahead[b] = fetches ? span.fetched_values[block + b] : reinterpret_cast<const char*>(q);
        });
        const size_t speed = fetches ? kCacheLine : 0;
        for (int i = 0; i < rows.head_dim; i += 4) {
            unrolled<2>(PENSTOCK_EACH(j) {
                products.add(q + i + 2 * j, rows.q_stride, keys);
                unrolled<kBlocks>(PENSTOCK_EACH(b) { keys[b] += 2 * kBlockTokens; });
            });
            unrolled<kBlocks>(PENSTOCK_EACH(b) {
                __builtin_prefetch(ahead[b]);
                ahead[b] += speed;
            });
        }
        products.finish([&](int r, int j, wide sums) __attribute__((always_inline)) {
            store(rows.scores + (start + r) * kScoresStride + column + j, sums * all<wide>(rows.query_scale(start + r)));
        });
    }

    // out += weights of the span times its values; the last columns of a head_dim of 8 modulo 16 go alone.
    static void add_values(const Rows<int16_t>& rows, const Span<Int8>& span, int block, const SpanTokens& seen,
                           bool fetches) {
        const int d = rows.head_dim;
        for (int column = 0, panels; column < d; column += panels * kPanel) {
            panels = panels_of(rows.count, (d - column) / kPanel);
            for_row_tiles(rows.count, panels, fetches, [&](int start, auto count, auto panels, bool fetches) {
                if (d - column < kPanel)
                    add_columns<count(), 8, 1>(rows, start, span, block, seen, column, fetches);
                else
                    add_columns<count(), kPanel, panels()>(rows, start, span, block, seen, column, fetches);
            });
        }
    }

    template <int kRows, int kColumns, int kPanels>
    static void add_columns(const Rows<int16_t>& rows, int start, const Span<Int8>& span, int block, const SpanTokens& seen,
                            int column, bool fetches) {
        typedef std::conditional_t<kColumns % kWide == 0, wide, v8> V;
        PairProducts<V, kRows, kPanels * kColumns / PairProducts<V, 1, 1>::kWidth> products;
        constexpr size_t kBytes = 2 * kPanels * kColumns;  // of a pair of tokens
        const size_t row = 2 * rows.head_dim, speed = fetches ? kBytes : 0;
        const int16_t* weights = rows.weights(start) + seen.column();
        for (int b = 0; b < seen.blocks(); b++) {
            const Int8* values[kPanels];
            unrolled<kPanels>(PENSTOCK_EACH(j) { values[j] = span.values[block + b] + 2 * (column + j * kPanel); });
            const char* ahead = fetches ? span.fetched_keys[block + b] + kBlockTokens * column
                                        : reinterpret_cast<const char*>(weights);
            for (int pair = 0; pair < kBlockTokens / 2; pair += 2) {
                unrolled<2>(PENSTOCK_EACH(j) {
                    products.add(weights + 2 * j, 2 * kScoresStride, values);
                    unrolled<kPanels>(PENSTOCK_EACH(i) { values[i] += row; });
                });
                weights += 4;
                for (size_t at = 0; at < 2 * kBytes; at += kCacheLine) __builtin_prefetch(ahead + (fetches ? at : 0));
                ahead += 2 * speed;
            }
        }
        products.finish([&](int r, int j, V sums) __attribute__((always_inline)) {
            float* out = rows.out + (start + r) * rows.out_stride + column + j;
            store(out, fma(sums, all<V>(rows.weight_scale(start + r)), load_as<V>(out)));
        });
    }
};

}  // namespace penstock
