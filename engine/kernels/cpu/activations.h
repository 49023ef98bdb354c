// Rows of activations in the form that a product reads: as they are, as bfloat16, or as int8 with scales.
#pragma once

#include <limits>
#include <vector>

#include "panels.h"

namespace penstock {

struct Activations {
    Form form;
    const void* data;
    size_t stride;          // bytes between rows
    const float* scales;    // of the rows, for int8; 1 where groups have scales
    // For int8, of each group of the linear, [groups][rows]: its exact sum, and its scale, 1 where rows have scales.
    const float* sums = nullptr;
    const float* group_scales = nullptr;
    size_t by_group = 0;    // between the groups
    int parts = 1;          // rows that each row became, side by side: see Rounding::fine

    template <class T>
    const T* row(int r) const {
        return reinterpret_cast<const T*>(static_cast<const char*>(data) + r * stride);
    }

    Activations from(int r) const {
        Activations x = *this;
        r *= parts;
        x.data = row<char>(r);
        for (const float** numbers : {&x.scales, &x.sums, &x.group_scales})
            if (*numbers) *numbers += r;
        return x;
    }

    // The rows of int8, each by itself.
    Activations apart() const {
        Activations x = *this;
        x.parts = 1;
        return x;
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
    unrolled<kLaneBits>(PENSTOCK_EACH(i) {
        const wide_int other = exchanged<(kWide >> (i + 1))>(most);
        most = other > most ? other : most;
    });
    rest = std::max(rest, most[0]);
    float found;
    std::memcpy(&found, &rest, sizeof found);
    return found;
}

constexpr float kRestSteps = 254.0f;  // in the scale of a group whose rest is rounded, too

// Rounds x * limit / max|x| to the nearest integers, halves to even, and returns max|x| / limit. Numbers without a finite
// limit / max|x| become zeros; their scale still tells a NaN from a zero. `out` may be where x is. With `rest`, what the
// integers lack is rounded to 1 / 254 of the scale.
template <class Integer, bool kRest = false>
float to_integers(const float* x, int n, int limit, Integer* out, [[maybe_unused]] Integer* rest = nullptr) {
    const float most = largest(x, n), factor = static_cast<float>(limit) / most, scale = most / static_cast<float>(limit);
    if (!(factor < std::numeric_limits<float>::infinity())) {
        std::memset(out, 0, n * sizeof(Integer));
        if constexpr (kRest) std::memset(rest, 0, n * sizeof(Integer));
        return scale;
    }
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const auto store_rounded = [&](wide shifted, Integer* to) { store_narrow(to, (wide_int)shifted - 0x4b400000); };
    int i = 0;
    for (; i + kWide <= n; i += kWide) {
        const wide y = load_as<wide>(x + i) * all<wide>(factor), shifted = y + all<wide>(magic);
        store_rounded(shifted, out + i);
        if constexpr (kRest) store_rounded((y - (shifted - all<wide>(magic))) * all<wide>(kRestSteps) + all<wide>(magic), rest + i);
    }
    for (; i < n; i++) {
        const float y = x[i] * factor, whole = std::nearbyint(y);
        out[i] = static_cast<Integer>(whole);
        if constexpr (kRest) rest[i] = static_cast<Integer>(std::nearbyint((y - whole) * kRestSteps));
    }
    return scale;
}

// A row as the weights of a linear lie: in their order, and rotated like them. It is in `room` if that takes a change.
inline const float* as_weights_lie(const Linear& linear, const float* x, std::vector<float>& room) {
    if (!linear.permutation && linear.rotation == 0) return x;
    room.resize(linear.k);
    if (linear.rotation > 0)
        rotate(x, linear.k, linear.rotation, room.data());
    else
        for (int i = 0; i < linear.k; i++) room[i] = x[linear.permutation[i]];
    return room.data();
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
        rows_ = round_up(kMostParts * rows, 32);
        data_ = allocate_hot<char>(std::max(round_up(rows, 32) * stride(widest), rows_ * stride(Form::int8)));
        scales_ = allocate<float>(rows_);
        sums_ = allocate<float>(rows_ * divide_up(depth, kLeastGroup));
        group_scales_ = allocate<float>(rows_ * divide_up(depth, kLeastGroup));
    }

    Activations activations(const Linear& linear) const {
        const Form form = linear.form;
        return {form, data_.get(), stride(form), scales_.get(), sums_.get(), group_scales_.get(), rows_, linear.row_parts()};
    }

    // Converts row r of a product's activations, k floats.
    void convert(const Linear& linear, int r, const float* x) const {
        char* out = data_.get() + r * stride(linear.form);
        switch (linear.form) {
            case Form::f32: std::memcpy(out, x, linear.k * sizeof(float)); break;
            case Form::bf16: to_operands(x, linear.k, linear.depth, reinterpret_cast<BFloat*>(out)); break;
            case Form::int8: round(linear, r, x);
        }
    }

    // Copies row `from` of rows that were converted for the same linear, or one of its kind.
    void copy(const Linear& linear, const Prepared& other, int from, int to) const {
        const size_t bytes = static_cast<size_t>(linear.depth) * size_of(linear.form);
        const int parts = linear.row_parts();
        from *= parts, to *= parts;
        for (int part = 0; part < parts; part++) {
            std::memcpy(row(linear, to + part), other.row(linear, from + part), bytes);
            if (linear.form != Form::int8) continue;
            scales_[to + part] = other.scales_[from + part];
            for (int g = 0; g < linear.groups(); g++) {
                sums_[g * rows_ + to + part] = other.sums_[g * other.rows_ + from + part];
                group_scales_[g * rows_ + to + part] = other.group_scales_[g * other.rows_ + from + part];
            }
        }
    }

   private:
    static constexpr int kMostParts = 2;

    size_t stride(Form form) const { return row_stride(depth_ * size_of(form)); }
    char* row(const Linear& linear, int r) const { return data_.get() + r * stride(linear.form); }

    // Rounds a row to int8.
    void round(const Linear& linear, int r, const float* x) const {
        thread_local std::vector<float> room;
        x = as_weights_lie(linear, x, room);
        const int k = linear.k, group = linear.group, parts = linear.row_parts();
        r *= parts;
        int8_t* out[] = {reinterpret_cast<int8_t*>(row(linear, r)), reinterpret_cast<int8_t*>(row(linear, r + parts - 1))};
        scales_[r] = linear.rounding == Rounding::row ? to_integers(x, k, 127, out[0]) : 1.0f;
        scales_[r + parts - 1] = scales_[r];
        for (int g = 0; g < linear.groups(); g++) {
            const int at = g * group;
            float* to = group_scales_.get() + g * rows_ + r;
            switch (linear.rounding) {
                case Rounding::row: *to = 1.0f; break;
                case Rounding::groups: *to = to_integers(x + at, group, 127, out[0] + at); break;
                case Rounding::fine:
                    to[0] = to_integers<int8_t, true>(x + at, group, 127, out[0] + at, out[1] + at);
                    to[1] = to[0] / kRestSteps;
            }
            for (int part = 0; part < parts; part++) sums_[g * rows_ + r + part] = sum_of(out[part] + at, group);
        }
        for (int part = 0; part < parts; part++) std::memset(out[part] + k, 0, linear.depth - k);
    }

    // The exact sum of a group.
    static float sum_of(const int8_t* x, int n) {
        int32_t sum = 0;
        for (int i = 0; i < n; i++) sum += x[i];
        return static_cast<float>(sum);
    }

    size_t depth_ = 0, rows_ = 0;
    Buffer<char> data_;
    Buffer<float> scales_, sums_, group_scales_;
};

}  // namespace penstock
