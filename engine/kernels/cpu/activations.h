// Rows of activations in the form that a product reads: as they are, as bfloat16, or as int8 with a scale per row.
#pragma once

#include <limits>

#include "panels.h"

namespace penstock {

struct Activations {
    Form form;
    const void* data;
    size_t stride;                // bytes between rows
    const float* scales;          // of the rows, for int8
    const float* sums = nullptr;  // exact, of each group of the linear, [groups][rows], for int8
    size_t sums_stride = 0;       // between the groups

    template <class T>
    const T* row(int r) const {
        return reinterpret_cast<const T*>(static_cast<const char*>(data) + r * stride);
    }

    Activations from(int r) const {
        return {form, row<char>(r), stride, scales ? scales + r : nullptr, sums ? sums + r : nullptr, sums_stride};
    }
};

inline Activations floats(const float* x, size_t ld) { return {Form::f32, x, ld * sizeof(float), nullptr}; }

// A number as tiles multiply it: rounded to nearest even, and 0 where it is denormal, which is what tiles would make of
// it. A NaN stays one.
PENSTOCK_INLINE BFloat tile_operand(float x) {
    const uint16_t bits = to_bfloat_bits(x);
    return BFloat{std::fabs(x) < std::numeric_limits<float>::min() ? uint16_t(bits & 0x8000u) : bits};
}

// As tile_operand, element by element.
template <class V>
PENSTOCK_INLINE void store_operands(BFloat* out, V x) {
#if PENSTOCK_AVX512 && defined(__AVX512BF16__)
    if constexpr (sizeof(V) == 64) {
        const __m256bh bits = _mm512_cvtneps_pbh((__m512)x);
        std::memcpy(out, &bits, sizeof bits);
    } else {
        const __m128bh bits = _mm256_cvtneps_pbh((__m256)x);
        std::memcpy(out, &bits, sizeof bits);
    }
#else
    typedef IntsOf<V> Int;
    typedef uint16_t Narrow __attribute__((vector_size(sizeof(V) / 2)));
    const Int u = (Int)x, magnitude = u & 0x7fffffff;
    const Int rounded = u + ((u >> 16 & 1) + 0x7fff);
    const Int number = magnitude > 0x7f800000 ? u | 0x400000 : rounded;
    const Int kept = magnitude < 0x800000 ? u - magnitude : number;
    const Narrow bits = __builtin_convertvector(kept >> 16, Narrow);
    std::memcpy(out, &bits, sizeof bits);
#endif
}

// A row of n floats as the operands of tiles, padded with zeros.
inline void to_operands(const float* x, int n, int depth, BFloat* out) {
    int i = 0;
    for (; i + kWide <= n; i += kWide) store_operands(out + i, load_as<wide>(x + i));
    for (; i < depth; i++) out[i] = tile_operand(i < n ? x[i] : 0.0f);
}

// The largest |x|, or a NaN if there is one: as integers, the bits of both are in order.
inline float largest(const float* x, int n) {
    wide_int most{};
    int32_t rest = 0;
    int i = 0;
    for (; i + kWide <= n; i += kWide) {
        const wide_int bits = (wide_int)load_as<wide>(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    for (; i < n; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        rest = std::max(rest, bits & 0x7fffffff);
    }
    for (int j = 0; j < kWide; j++) rest = std::max(rest, most[j]);
    float found;
    std::memcpy(&found, &rest, sizeof found);
    return found;
}

PENSTOCK_INLINE wide gathered(const float* x, const int32_t* indices) {
    wide y;
    for (int j = 0; j < kWide; j++) y[j] = x[indices[j]];
    return y;
}

// Rounds x * limit / max|x| to the nearest integers, halves to even, and returns max|x| / limit. A row without a finite
// limit / max|x| becomes zeros; its scale still tells a NaN from a zero. Integer i is that of x[order[i]], if there is
// an order. `out` may be where x is.
template <class Integer>
float to_integers(const float* x, const int32_t* order, int n, int depth, int limit, Integer* out) {
    typedef Integer Integers __attribute__((vector_size(kWide * sizeof(Integer))));
    const float most = largest(x, n), factor = static_cast<float>(limit) / most, scale = most / static_cast<float>(limit);
    if (!(factor < std::numeric_limits<float>::infinity())) {
        std::memset(out, 0, depth * sizeof(Integer));
        return scale;
    }
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    int i = 0;
    for (; i + kWide <= n; i += kWide) {
        const wide y = order ? gathered(x, order + i) : load_as<wide>(x + i);
        const wide_int rounded = (wide_int)(y * all<wide>(factor) + all<wide>(magic)) - 0x4b400000;
        const Integers integers = __builtin_convertvector(rounded, Integers);
        std::memcpy(out + i, &integers, sizeof integers);
    }
    for (; i < n; i++) out[i] = static_cast<Integer>(std::nearbyint(x[order ? order[i] : i] * factor));
    std::memset(out + n, 0, (depth - n) * sizeof(Integer));
    return scale;
}

// The exact sum of each group of a linear, `stride` apart.
inline void sum_groups(const Linear& linear, const int8_t* x, float* out, size_t stride) {
    for (int g = 0; g < linear.groups(); g++, x += linear.group) {
        int32_t sum = 0;
        for (int i = 0; i < linear.group; i++) sum += x[i];
        out[g * stride] = static_cast<float>(sum);
    }
}

// Bytes from one row of activations to the next, of so many: an odd number of lines, so that the rows of a tile do not fall into
// the same cache sets.
constexpr size_t row_stride(size_t bytes) {
#if PENSTOCK_TILES
    return (((bytes + kTileBytes - 1) / kTileBytes + 1) | 1) * kTileBytes;
#else
    return bytes + 64;
#endif
}

// Room for rows of activations in the form of any product.
class Prepared {
   public:
    // Rows are padded to whole tiles. No form may be wider than `widest`.
    void reserve(int rows, int depth, Form widest = Form::f32) {
        depth_ = round_up(depth, 64);
        data_ = allocate_hot<char>(static_cast<size_t>(round_up(rows, 32)) * stride(widest));
        scales_ = allocate<float>(round_up(rows, 32));
        rows_ = round_up(rows, 32);
        sums_ = allocate<float>(rows_ * divide_up(depth, kLeastGroup));
    }

    Activations activations(Form form) const {
        return {form, data_.get(), stride(form), scales_.get(), sums_.get(), rows_};
    }

    // Converts row r of a product's activations, k floats.
    void convert(const Linear& linear, int r, const float* x) const {
        char* out = data_.get() + r * stride(linear.form);
        switch (linear.form) {
            case Form::f32: std::memcpy(out, x, linear.k * sizeof(float)); break;
            case Form::bf16: to_operands(x, linear.k, linear.depth, reinterpret_cast<BFloat*>(out)); break;
            case Form::int8:
                const auto integers = reinterpret_cast<int8_t*>(out);
                scales_[r] = to_integers(x, linear.permutation.get(), linear.k, linear.depth, 127, integers);
                sum_groups(linear, integers, sums_.get() + r, rows_);
        }
    }

    // Copies row `from` of rows that were converted for the same linear, or one of its kind.
    void copy(const Linear& linear, const Prepared& other, int from, int to) const {
        const size_t bytes = static_cast<size_t>(linear.depth) * size_of(linear.form);
        std::memcpy(data_.get() + to * stride(linear.form), other.data_.get() + from * other.stride(linear.form), bytes);
        if (linear.form != Form::int8) return;
        scales_[to] = other.scales_[from];
        for (int g = 0; g < linear.groups(); g++) sums_[g * rows_ + to] = other.sums_[g * other.rows_ + from];
    }

   private:
    size_t stride(Form form) const { return row_stride(depth_ * size_of(form)); }

    size_t depth_ = 0, rows_ = 0;
    Buffer<char> data_;
    Buffer<float> scales_, sums_;
};

}  // namespace penstock
