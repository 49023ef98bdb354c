// Weights and factors that a checkpoint has narrower than products read them: widened in the cache, some groups at a time.
#pragma once

#include "gemm.h"

namespace penstock {

constexpr int kQuad = 4 * kPanel;  // bytes: four neighbours in k of 16 outputs
constexpr int kHighAhead = 1024;   // bytes: how far ahead the bits above the low ones are fetched
constexpr int kGroupsTogether = 16;  // whose factors are widened at a time, for vectors

// ---- weights of less than 8 bits ---------------------------------------------------------------------------------------

// A register of a quad's bytes, of which there are kPanel / kWide.
typedef uint8_t wide_bytes __attribute__((vector_size(4 * kWide)));

PENSTOCK_INLINE wide_bytes load_bytes(const uint8_t* p) {
    wide_bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

// Bytes with the bits of some planes, 8 bytes a plane, above the lowest Low.
template <int Low, int Planes>
PENSTOCK_INLINE wide_bytes with_high_bits(wide_bytes low, const uint8_t* planes) {
    for (int plane = 0; plane < Planes; plane++, planes += 8) {
        const char value = static_cast<char>(1 << (Low + plane));
#if PENSTOCK_AVX512
        uint64_t bits;
        std::memcpy(&bits, planes, sizeof bits);
        low = (wide_bytes)_mm512_mask_add_epi8((__m512i)low, bits, (__m512i)low, _mm512_set1_epi8(value));
#elif PENSTOCK_AVX2
        const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const __m256i which = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
        int32_t bits;
        std::memcpy(&bits, planes, sizeof bits);
        const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), which);
        const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        low |= (wide_bytes)_mm256_and_si256(is_set, _mm256_set1_epi8(value));
#elif PENSTOCK_NEON
        const uint8x8_t bit = vcreate_u8(0x8040201008040201);
        const uint8x16_t spread = vcombine_u8(vdup_n_u8(planes[0]), vdup_n_u8(planes[1]));
        const uint8x16_t is_set = vtstq_u8(spread, vcombine_u8(bit, bit));
        low |= (wide_bytes)vandq_u8(is_set, vdupq_n_u8(value));
#else
        for (int i = 0; i < 4 * kWide; i++) low[i] |= planes[i / 8] >> i % 8 & 1 ? value : 0;
#endif
    }
    return low;
}

// The table of a weight that has one, each integer as a byte, with some number added.
struct ByteTable {
    ByteTable(const Linear& linear, int added) {
        for (int i = 0; linear.table && i < 16; i++)
            bytes[i] = static_cast<uint8_t>(static_cast<int>(linear.table[i]) + added);
    }

    alignas(16) uint8_t bytes[16];
};

// The bytes of a table in the places, from 0 to 15, that bytes are.
PENSTOCK_INLINE wide_bytes looked_up(const uint8_t* table, wide_bytes places) {
#if PENSTOCK_AVX2
    const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
#if PENSTOCK_AVX512
    return (wide_bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)places);
#else
    return (wide_bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)places);
#endif
#elif PENSTOCK_NEON
    return (wide_bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#else
    for (int i = 0; i < 4 * kWide; i++) places[i] = table[places[i]];
    return places;
#endif
}

// Weights of a panel, `count` of them from k on, a byte each: what is in the bits plus `lowest`, or what the table has
// in that place.
template <Type kType>
void unpack_bits(const Linear& linear, int panel, int k, int count, int lowest, uint8_t* out) {
    constexpr int kLow = low_bits_of(kType), kPlanes = planes_of(kType);
    const ByteTable table(linear, 0);
    const uint8_t* data = linear.panel<uint8_t>(panel);
    const uint8_t *in = data + static_cast<size_t>(k) * kPanel * kLow / 8, *high = data + linear.high_bits(k);
    for (int i = 0; i < count; i += 32 / kLow, in += kQuad) {
        __builtin_prefetch(in + kStreamAhead);
        if (kPlanes > 0) __builtin_prefetch(high + kHighAhead);
        for (int part = 0; part < 8 / kLow; part++, high += 8 * kPlanes, out += kQuad)
            for (int at = 0; at < kQuad; at += 4 * kWide) {
                wide_bytes bytes = load_bytes(in + at) >> kLow * part & static_cast<uint8_t>((1 << kLow) - 1);
                bytes = with_high_bits<kLow, kPlanes>(bytes, high + at / 8);
                if constexpr (kType == Type::int_places)
                    bytes = looked_up(table.bytes, bytes);
                else
                    bytes += static_cast<uint8_t>(lowest);
                std::memcpy(out + at, &bytes, sizeof bytes);
            }
    }
}

inline void unpack_weights(const Linear& linear, int panel, int k, int count, int lowest, uint8_t* out) {
    with_bits(linear.type, [&](auto type) { unpack_bits<type()>(linear, panel, k, count, lowest, out); });
}

// ---- scales and offsets ------------------------------------------------------------------------------------------------

// Numbers that count units, of the groups [from, to) of a panel. Those of the panel at `ahead` are fetched.
template <class T>
void widen_counts(const GroupNumbers& factors, int panel, int from, int to, int ahead, float* out) {
    const Int8* counts = factors.values.at<Int8>(panel, from);
    const size_t next = static_cast<size_t>(ahead) * factors.values.runs * kPanel;
    for (int unit = from / factors.span, g = from; g < to; unit++) {
        const T* units = factors.units.at<T>(panel, unit);
        for (const int end = std::min(to, (unit + 1) * factors.span); g < end; g++, counts += kPanel, out += kPanel) {
            __builtin_prefetch(counts + next);
            for (int i = 0; i < kPanel; i += kWide) store(out + i, load_as<wide>(counts + i) * load_as<wide>(units + i));
        }
    }
}

template <class T>
void widen_numbers(const GroupNumbers& factors, int panel, int from, int to, int ahead, float* out) {
    const T* numbers = factors.values.at<T>(panel, from);
    const size_t next = static_cast<size_t>(ahead) * factors.values.runs * kPanel;
    for (int g = from; g < to; g++, numbers += kPanel, out += kPanel) {
        __builtin_prefetch(numbers + next);
        for (int i = 0; i < kPanel; i += kWide) store(out + i, load_as<wide>(numbers + i));
    }
}

// Scales or offsets of the groups [from, to) of a panel in float32; `scales` are its scales, for offsets that count them.
inline void widen(const GroupNumbers& factors, int panel, int from, int to, int ahead, const float* scales, float* out) {
    if (factors.units.data)
        return with_type(factors.units.type, [&](auto* t) {
            widen_counts<std::remove_pointer_t<decltype(t)>>(factors, panel, from, to, ahead, out);
        });
    if (factors.values.type != Type::int8)
        return with_type(factors.values.type, [&](auto* t) {
            widen_numbers<std::remove_pointer_t<decltype(t)>>(factors, panel, from, to, ahead, out);
        });
    widen_numbers<Int8>(factors, panel, from, to, ahead, out);
    for (int i = 0; i < (to - from) * kPanel; i += kWide)
        store(out + i, -load_as<wide>(out + i) * load_as<wide>(scales + i));
}

// What a group of a panel adds to its 16 outputs.
struct Factors {
    const float* scales;
    const float* offsets;  // or null
};

// The factors of some panels: where they lie, or up to Groups groups of them at a time, widened.
template <int Panels, int Groups>
class GroupFactors {
   public:
    static constexpr int kGroups = Groups;

    GroupFactors(const Linear& linear, int panel)
        : linear_(linear),
          panel_(panel),
          narrow_(linear.is_narrow()),
          scales_(narrow_ ? room_[0] : linear.panel_scales(panel)),
          offsets_(!linear.offsets ? nullptr : narrow_ ? room_[1] : linear.panel_offsets(panel)),
          by_panel_(static_cast<size_t>(narrow_ ? Groups : linear.groups()) * kPanel) {}

    bool narrow() const { return narrow_; }

    // Makes the groups [from, to) ready, of the panels that there are.
    void prepare(int from, int to) {
        if (narrow_) widen_groups(from, to);
    }

    Factors of(int panel, int group) const {
        const size_t at = panel * by_panel_ + static_cast<size_t>(group - from_) * kPanel;
        return {scales_ + at, offsets_ ? offsets_ + at : nullptr};
    }

    // Fetches those of panels that come soon: too little in one place for the processor to see it coming.
    void fetch(int panel, int group) const {
        if (narrow_) return;
        const Factors by = of(panel, group);
        __builtin_prefetch(by.scales);
        if (by.offsets) __builtin_prefetch(by.offsets);
    }

   private:
    __attribute__((noinline)) void widen_groups(int from, int to) {
        from_ = from;
        for (int p = 0; p < std::min(Panels, linear_.panels - panel_); p++) {
            float* scales = room_[0] + p * by_panel_;
            widen(linear_.scales, panel_ + p, from, to, Panels, nullptr, scales);
            if (offsets_) widen(linear_.offsets, panel_ + p, from, to, Panels, scales, room_[1] + p * by_panel_);
        }
    }

    const Linear& linear_;
    const int panel_;
    const bool narrow_;
    const float *const scales_, *const offsets_;
    const size_t by_panel_;
    int from_ = 0;
    alignas(64) float room_[2][Panels * Groups * kPanel];
};

}  // namespace penstock
