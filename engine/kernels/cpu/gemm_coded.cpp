// Products of weights that are decoded: numbers in e4m3, and places of 4 bits in a table of 16 numbers.
//
// A part of a few panels is decoded into the cache, to what the product of floats reads there (float32, or bfloat16 for
// tiles and for pairs), and multiplied as any other weight. So an output has the bits of the product with the weight
// that the code stands for, rounded to that type. Only where all of a row in e4m3 has one scale, the numbers are
// multiplied, which bfloat16 holds exactly, and the sums are scaled.
#include "gemms.h"

namespace penstock {

constexpr int kDecodedPanels = 4;         // at a time

// What weights are decoded to for a product that reads W, and how many neighbours in k lie side by side.
template <class W>
using Decoded = std::conditional_t<std::is_same_v<W, float>, float, BFloat>;

template <class D>
constexpr int kTogether = std::is_same_v<D, BFloat> ? 2 : 1;

// Writes 32 numbers, given as the vectors that hold them.
PENSTOCK_INLINE void store_decoded(float* out, const wide (&x)[2 * kParts]) {
    for (int i = 0; i < 2 * kParts; i++) store(out + i * kWide, x[i]);
}

PENSTOCK_INLINE void store_decoded(BFloat* out, const wide (&x)[2 * kParts]) {
#if PENSTOCK_AVX512 && defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    std::memcpy(out, &both, sizeof both);
#else
    for (int i = 0; i < 2 * kParts; i++) store_operands(out + i * kWide, x[i]);
#endif
}

// ---- e4m3 ------------------------------------------------------------------------------------------------------------

// 2^-8 of some numbers: see half_of.
PENSTOCK_INLINE wide load_numbers(const uint8_t* p) {
#if PENSTOCK_AVX512
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80));
    return (wide)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), mask));
#elif PENSTOCK_AVX2
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i mask = _mm_set1_epi16(static_cast<short>(0xbf80));
    return (wide)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), mask));
#else
    Half halves[kWide];
    for (int i = 0; i < kWide; i++) halves[i] = half_of(p[i]);
    return load_as<wide>(halves);
#endif
}

// 2^-8 of `vectors` times 16 numbers.
PENSTOCK_INLINE void decode_numbers(const uint8_t* in, int vectors, float* out) {
    for (int i = 0; i < vectors * kPanel; i += kWide) store(out + i, load_numbers(in + i));
}

PENSTOCK_INLINE void decode_numbers(const uint8_t* in, int vectors, BFloat* out) {
#if PENSTOCK_AVX512
    // The exponent and the mantissa move to their places, and the exponent is made to count from 127: 2^-8 less than
    // from 7 is 112 more. Of the numbers below 2^-6, what is added depends on the mantissa.
    alignas(64) int16_t added[32] = {};
    for (int mantissa = 1; mantissa < 8; mantissa++)
        added[mantissa] = static_cast<int16_t>(to_bfloat_bits(static_cast<float>(mantissa) / (1 << 17)) - (mantissa << 4));
    const __m512i small = _mm512_load_si512(added), normal = _mm512_set1_epi16(112 << 7);
    const __m512i kept = _mm512_set1_epi16(static_cast<short>(0x87f0)), exponent = _mm512_set1_epi16(0x78);
    for (int i = 0; i < vectors * kPanel; i += 32) {
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
        const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(words, 4), kept);
        const __mmask32 is_small = _mm512_testn_epi16_mask(words, exponent);
        const __m512i bits = _mm512_add_epi16(moved, _mm512_mask_permutexvar_epi16(normal, is_small, words, small));
        _mm512_storeu_si512(out + i, bits);
    }
#else
    for (int i = 0; i < vectors * kPanel; i += kWide) store_operands(out + i, load_numbers(in + i));
#endif
}

// ---- places in a table -----------------------------------------------------------------------------------------------

// 16 numbers, looked up by the lowest four bits of each lane.
#if PENSTOCK_AVX512

struct Table {
    explicit Table(const float* numbers) : all(_mm512_loadu_ps(numbers)) {}
    PENSTOCK_INLINE wide at(wide_int places) const { return (wide)_mm512_permutexvar_ps((__m512i)places, all); }
    __m512 all;
};

#elif PENSTOCK_AVX2

struct Table {
    explicit Table(const float* numbers) : low(_mm256_loadu_ps(numbers)), high(_mm256_loadu_ps(numbers + 8)) {}
    PENSTOCK_INLINE wide at(wide_int places) const {
        const __m256i lanes = (__m256i)places;
        const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28));  // its sign says so
        return (wide)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, lanes), _mm256_permutevar8x32_ps(high, lanes), is_high);
    }
    __m256 low, high;
};

#else

struct Table {
    explicit Table(const float* numbers) : all(numbers) {}
    PENSTOCK_INLINE wide at(wide_int places) const {
        wide y;
        for (int i = 0; i < kWide; i++) y[i] = all[places[i] & 15];
        return y;
    }
    const float* all;
};

#endif

// The scales of 16 outputs for two vectors of 16 weights. Of pairs, each vector holds eight outputs.
template <class D>
struct LaneScales {
    explicit LaneScales(const float* scales) {
#if PENSTOCK_AVX512
        const __m512 all = _mm512_loadu_ps(scales);
        const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const bool pairs = kTogether<D> == 2;
        part[0] = pairs ? (wide)_mm512_permutexvar_ps(first, all) : (wide)all;
        part[1] = pairs ? (wide)_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), all) : (wide)all;
#else
        float lanes[2 * kPanel];
        for (int i = 0; i < 2 * kPanel; i++) lanes[i] = scales[i / kTogether<D> % kPanel];
        for (int i = 0; i < 2 * kParts; i++) part[i] = load_as<wide>(lanes + i * kWide);
#endif
    }

    wide part[2 * kParts];
};

template <class D>
PENSTOCK_INLINE void decode_scaled_numbers(const uint8_t* in, int vectors, const LaneScales<D>& scales, D* out) {
    for (int v = 0; v < vectors; v += 2, in += 2 * kPanel, out += 2 * kPanel) {
        wide x[2 * kParts];
        unrolled<2 * kParts>(PENSTOCK_EACH(i) { x[i] = load_numbers(in + i * kWide) * scales.part[i]; });
        store_decoded(out, x);
    }
}

template <class D>
PENSTOCK_INLINE void decode_places(const uint8_t* in, int units, const Table& table, const LaneScales<D>& scales,
                                   D* out) {
    for (int unit = 0; unit < units; unit++, in += 64, out += kUnit * kPanel) {
        wide_int lanes[kParts];
        std::memcpy(lanes, in, sizeof lanes);
        unrolled<kUnit / 2>(PENSTOCK_EACH(pair) {
            wide x[2 * kParts];
            unrolled<2 * kParts>(PENSTOCK_EACH(i) {
                constexpr int kShift = 4 * (2 * pair + i / kParts);
                x[i] = table.at(lanes[i % kParts] >> kShift) * scales.part[i];
            });
            store_decoded(out + pair * 2 * kPanel, x);
        });
    }
}

// ---- a part of a panel -----------------------------------------------------------------------------------------------

// Writes the weights of `count` k from a multiple of kUnit on, [count / kTogether][16][kTogether], and maybe some that
// fill the last unit.
template <class D>
void decode(const Linear& linear, int panel, int k, int count, D* out) {
    const uint8_t* data = linear.panel<uint8_t>(panel);
    if (linear.scales_sums()) return decode_numbers(data + static_cast<size_t>(k) * kPanel, count, out);
    const float* scales = linear.panel_scales(panel);
    const int last = linear.groups() - 1;
    for (const int end = k + count; k < end;) {
        const int group = std::min(k / linear.group, last), to = group == last ? end : std::min(end, (group + 1) * linear.group);
        const LaneScales<D> lanes(scales + static_cast<size_t>(group) * kPanel);
        const size_t at = static_cast<size_t>(k) * kPanel;
        if (linear.type == Type::places)
            decode_places(data + at / 2, divide_up(to - k, kUnit), Table(linear.table.get()), lanes, out);
        else
            decode_scaled_numbers(data + at, to - k, lanes, out);
        out += static_cast<size_t>(to - k) * kPanel;
        k = to;
    }
}

// ---- products --------------------------------------------------------------------------------------------------------

// sums [panels][by_panel / 16][16] = rows times the panels, by vectors; W is float or BFloatPair.
template <class W>
void coded_by_vectors(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                      size_t by_panel) {
    typedef Decoded<W> D;
    constexpr int kDepthAtOnce = 128;
    alignas(64) D decoded[kDecodedPanels * kDepthAtOnce * kPanel];
    const Activation<W>* a = x.row<Activation<W>>(0);
    const Strides by{x.stride / sizeof(*a), kPanel, kDepthAtOnce / kTogether<D> * kPanel, kPanel, by_panel};
    const W* w = reinterpret_cast<const W*>(decoded);
    for (int k = 0; k < linear.depth; k += kDepthAtOnce) {
        const int count = std::min(kDepthAtOnce, linear.depth - k);
        for (int p = 0; p < panels; p += kDecodedPanels) {
            const int some = std::min(kDecodedPanels, panels - p);
            for (int q = 0; q < some; q++)
                decode(linear, panel + p + q, k, count, decoded + q * kDepthAtOnce * kPanel);
            for_tiles(rows, [&](int start, int height) {
                for (int q = 0; q < some;) {
                    const W* from = w + q * by.w_panel;
                    const char* nothing = reinterpret_cast<const char*>(w);  // comes next: all of it is in the cache
                    const Pieces<W> pieces{&from, 0, count, &nothing, 0, 0};
                    q += tile_rows<W, kPanel>(height, some - q, a + start * by.a + k / kTogether<D>, pieces,
                                              count / kTogether<D>, sums + (p + q) * by_panel + start * kPanel, by, k == 0);
                }
            });
        }
    }
}

#if PENSTOCK_TILES

// A part of some panels: what is decoded and multiplied at once.
struct CodedPart {
    int panel, panels, k, depth;

    int steps() const { return depth * static_cast<int>(sizeof(BFloat)) / kTileBytes; }
};

// Decodes a piece tile by tile, for all panels the tiles of a step and then the next, or for a panel all steps and then
// the next. Either way, where it writes beside a step of tiles lies 1 KiB below what the next step reads, but for
// multiples of 4 KiB: reads that seem to overlap with writes that are not done yet would wait for them.
class Decoding {
   public:
    static constexpr int kTile = kTileBytes * kTileHeight / sizeof(BFloat);

    // Panels are `by_panel` apart.
    Decoding(const Linear& linear, const CodedPart& piece, size_t by_panel, BFloat* out, bool step_by_step)
        : linear_(linear), piece_(piece), by_panel_(by_panel), out_(out), step_by_step_(step_by_step) {}

    int tiles() const { return piece_.panels * piece_.steps(); }

    void finish() { advance(tiles()); }

    void advance(int count) {
        for (; count > 0 && panel_ < piece_.panels && step_ < piece_.steps(); count--) {
            decode(linear_, piece_.panel + panel_, piece_.k + step_ * (kTile / kPanel), kTile / kPanel,
                   out_ + panel_ * by_panel_ + step_ * kTile);
            if (step_by_step_)
                next(panel_, piece_.panels, step_);
            else
                next(step_, piece_.steps(), panel_);
        }
    }

   private:
    static void next(int& inner, int end, int& outer) {
        if (++inner < end) return;
        inner = 0;
        outer++;
    }

    const Linear& linear_;
    const CodedPart piece_;
    const size_t by_panel_;
    BFloat* const out_;
    const bool step_by_step_;
    int panel_ = 0, step_ = 0;
};

// sums [panels][by_panel / 16][16] = rows times the panels: the vectors decode a piece while the tiles multiply the one
// before.
inline void coded_by_tiles(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                           size_t by_panel) {
    constexpr int kGridRows = 2 * kTileHeight, kMostDepth = 1024;
    const int passes = divide_up(rows, kGridRows);
    const int at_once = rows <= kTileHeight ? kDecodedPanels : 2, depth_at_once = passes == 1 ? 128 : kMostDepth;
    const size_t decoded_panel = static_cast<size_t>(depth_at_once) * kPanel;
    const TileStrides by{x.stride, decoded_panel * sizeof(BFloat), by_panel, kTileBytes};
    alignas(64) BFloat decoded[2][2 * kMostDepth * kPanel];
    const auto piece_at = [&](int p, int k) {
        return CodedPart{p, std::min(at_once, panel + panels - p), k, std::min(depth_at_once, linear.depth - k)};
    };
    TileShapes shapes = kWholeTiles;  // of A and C no more rows than there are
    for (int tile = 0; tile < 6; tile++) shapes.rows[tile] = static_cast<uint8_t>(std::min(rows, kTileHeight));
    use_tiles(shapes);
    CodedPart piece = piece_at(panel, 0);
    int turn = 0;
    Decoding(linear, piece, decoded_panel, decoded[turn], passes == 1).finish();
    for (;;) {
        const int next_k = piece.k + piece.depth;
        const bool same = next_k < linear.depth;
        const int next_panel = same ? piece.panel : piece.panel + piece.panels;
        const bool last = next_panel == panel + panels;
        const CodedPart next = last ? CodedPart{} : piece_at(next_panel, same ? next_k : 0);
        Decoding ahead(linear, next, decoded_panel, decoded[turn ^ 1], passes == 1);
        const int share = divide_up(ahead.tiles(), passes * piece.steps());
        for (int t = 0; t < rows; t += kGridRows) {
            const int tiles = rows - t > kTileHeight ? 2 : 1;
            for (int q = 0; q < piece.panels;)
                q += with_grid<false>(tiles, piece.panels - q, [&](auto grid) {
                    const auto out = reinterpret_cast<char*>(sums + (piece.panel - panel + q) * by_panel + t * kPanel);
                    if (piece.k == 0)
                        grid.clear();
                    else
                        grid.load(out, by);
                    grid.add(x.row<char>(t) + piece.k * sizeof(BFloat),
                             reinterpret_cast<const char*>(decoded[turn] + q * decoded_panel), piece.steps(), by,
                             [&](int) { ahead.advance(share); });
                    grid.store(out, by);
                });
        }
        ahead.finish();
        if (last) return;
        piece = next;
        turn ^= 1;
    }
}

#endif

void multiply_coded(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                           size_t by_panel) {
#if PENSTOCK_TILES
    if (linear.form == Form::bf16) return coded_by_tiles(linear, panel, panels, x, rows, sums, by_panel);
#elif PENSTOCK_PAIRS
    if (linear.form == Form::bf16) return coded_by_vectors<BFloatPair>(linear, panel, panels, x, rows, sums, by_panel);
#endif
    coded_by_vectors<float>(linear, panel, panels, x, rows, sums, by_panel);
}

}  // namespace penstock
