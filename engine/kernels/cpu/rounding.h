// Rounds weights to integers, as engine/quant/rounding.py specifies it: the same operations in the same order.
#pragma once

#include <algorithm>

#include "simd.h"

namespace penstock {

constexpr float kShares[] = {1.0f, 0.93f, 0.86f, 0.79f, 0.72f, 0.65f};  // SHARES
constexpr int kFits = 3;                                                // FITS
constexpr float kSmallestScale = 1e-30f;                                // SMALLEST
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// What an integer stands for: integer * scale + offset.
struct Steps {
    float scale, offset;

    PENSTOCK_INLINE v8 nearest(v8 x, float top) const {
        const v8 inverse = splat(1.0f / (scale > kSmallestScale ? scale : kSmallestScale));
        const v8 y = (x - splat(offset)) * inverse, highest = splat(top);
        const v8 clipped = y < v8{} ? v8{} : (y > highest ? highest : y);
        return (clipped + splat(kToInteger)) - splat(kToInteger);
    }
};

// The steps that fit one group of weights best, each of which counts as much as `importance` says.
class GroupFit {
public:
    GroupFit(const float* x, const float* importance, int n, float top) : x_(x), importance_(importance), n_(n), top_(top) {
        v8 low = load(x), high = low, weight{}, total{};
        for (int i = kLanes; i < n; i += kLanes) {
            const v8 some = load(x + i);
            low = some < low ? some : low;
            high = some > high ? some : high;
        }
        float least = low[0], most = high[0];
        for (int i = 1; i < kLanes; i++) least = std::min(least, low[i]), most = std::max(most, high[i]);
        middle_ = (least + most) * 0.5f;
        half_ = (most - least) * 0.5f;
        for (int i = 0; i < n; i += kLanes) {
            weight += load(importance + i);
            total += (load(x + i) - splat(middle_)) * load(importance + i);
        }
        weight_ = sum(weight);
        total_ = sum(total);
    }

    Steps best() const {
        Steps best{};
        float most = -1.0f;
        for (const float share : kShares) {
            Steps steps{half_ * (2 * share / top_), half_ * -share};
            float explained = 0.0f;
            for (int fit = 0; fit < kFits; fit++) explained = refit(steps);
            if (!(explained > most)) continue;
            most = explained;
            best = steps;
        }
        return {best.scale + 0.0f, best.offset + middle_ + 0.0f};  // not -0
    }

private:
    // The least squares for the integers that steps give; returns what of the sum of squares they explain.
    PENSTOCK_INLINE float refit(Steps& steps) const {
        v8 sums{}, squares{}, products{};
        for (int i = 0; i < n_; i += kLanes) {
            const v8 y = load(x_ + i) - splat(middle_), d = steps.nearest(y, top_), counted = d * load(importance_ + i);
            sums += counted;
            squares += counted * d;
            products += counted * y;
        }
        const float d = sum(sums), dd = sum(squares), yd = sum(products), determinant = weight_ * dd - d * d;
        steps.scale = determinant > 0.0f ? (weight_ * yd - d * total_) / determinant : 0.0f;
        steps.offset = (total_ - steps.scale * d) / weight_;
        return steps.offset * total_ + steps.scale * yd;
    }

    const float *x_, *importance_;
    int n_;
    float top_, middle_, half_, weight_, total_;
};

PENSTOCK_INLINE float from_bfloat_bits(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// Rows of groups of n weights, a multiple of 8, to integers of `bits` bits from 0 on; scales and offsets are bfloat16.
inline void round_with_offsets(const float* x, const float* importance, int64_t rows, int64_t groups, int n, int bits,
                               int8_t* out, uint16_t* scales, uint16_t* offsets) {
    const float top = static_cast<float>((1 << bits) - 1);
    for (int64_t g = 0; g < rows * groups; g++, x += n, out += n) {
        const Steps best = GroupFit(x, importance + g % groups * n, n, top).best();
        scales[g] = to_bfloat_bits(best.scale);
        offsets[g] = to_bfloat_bits(best.offset);
        const Steps kept{from_bfloat_bits(scales[g]), from_bfloat_bits(offsets[g])};
        for (int i = 0; i < n; i += kLanes) {
            const v8 integers = kept.nearest(load(x + i), top);
            for (int lane = 0; lane < kLanes; lane++) out[i + lane] = static_cast<int8_t>(integers[lane]);
        }
    }
}

// Groups of n weights to multiples of a 127th of each group's largest magnitude.
inline void round_to_largest(const float* x, int64_t groups, int64_t n, int8_t* out, float* scales) {
    for (int64_t g = 0; g < groups; g++, x += n, out += n) {
        uint32_t largest = 0;  // the bits of magnitudes are in the order of the magnitudes
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits;
            std::memcpy(&bits, x + i, sizeof bits);
            largest = std::max(largest, bits & 0x7fffffffu);
        }
        float magnitude;
        std::memcpy(&magnitude, &largest, sizeof magnitude);
        const float scale = std::max(magnitude / 127.0f, kSmallestScale);
        scales[g] = scale;
        for (int64_t i = 0; i < n; i++) {
            const float y = x[i] / scale, clipped = y < -127.0f ? -127.0f : (y > 127.0f ? 127.0f : y);
            out[i] = static_cast<int8_t>((clipped + kToInteger) - kToInteger);
        }
    }
}

}  // namespace penstock
