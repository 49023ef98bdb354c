// Rounds weights to integers, as engine/quant/rounding.py specifies it: the same operations in the same order.
#pragma once

#include <algorithm>
#include <vector>

#include "rotation.h"

namespace penstock {

constexpr float kShares[] = {1.0f, 0.93f, 0.86f, 0.79f, 0.72f, 0.65f};  // SHARES
constexpr int kFits = 3;                                                // FITS
constexpr float kSmallestScale = 1e-30f;                                // SMALLEST
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// What an integer stands for: integer * scale + offset. A lane is a group.
struct Steps {
    wide scale, offset;

    PENSTOCK_INLINE wide nearest(wide x, float top) const {
        const wide inverse = all<wide>(1.0f) / max(scale, all<wide>(kSmallestScale));
        const wide clipped = min(max((x - offset) * inverse, wide{}), all<wide>(top));
        return (clipped + all<wide>(kToInteger)) - all<wide>(kToInteger);
    }
};

// The steps that fit a group of n weights in each lane best, each of which counts as much as `importance` says.
class GroupFit {
public:
    GroupFit(const wide* x, const float* importance, int n, float top, wide* centered)
        : centered_(centered), importance_(importance), n_(n), top_(top) {
        wide low = x[0], high = x[0];
        for (int i = 1; i < n; i++) low = min(low, x[i]), high = max(high, x[i]);
        middle_ = (low + high) * 0.5f;
        half_ = (high - low) * 0.5f;
        for (int i = 0; i < n; i++) {
            centered[i] = x[i] - middle_;
            weight_ += importance[i];
            total_ += centered[i] * importance[i];
        }
    }

    Steps best() const {
        Steps best{};
        wide most = all<wide>(-1.0f);
        for (const float share : kShares) {
            Steps steps{half_ * (2 * share / top_), half_ * -share};
            wide explained{};
            for (int fit = 0; fit < kFits; fit++) explained = refit(steps);
            const auto is_better = explained > most;
            most = is_better ? explained : most;
            best.scale = is_better ? steps.scale : best.scale;
            best.offset = is_better ? steps.offset : best.offset;
        }
        return {best.scale + 0.0f, best.offset + middle_ + 0.0f};  // not -0
    }

private:
    // The least squares for the integers that steps give; returns what of the sum of squares they explain.
    PENSTOCK_INLINE wide refit(Steps& steps) const {
        wide d{}, dd{}, yd{};
        for (int i = 0; i < n_; i++) {
            const wide y = centered_[i], integers = steps.nearest(y, top_), counted = integers * importance_[i];
            d += counted;
            dd += counted * integers;
            yd += counted * y;
        }
        const wide determinant = weight_ * dd - d * d;
        steps.scale = determinant > 0.0f ? (weight_ * yd - d * total_) / determinant : wide{};
        steps.offset = (total_ - steps.scale * d) / weight_;
        return steps.offset * total_ + steps.scale * yd;
    }

    const wide* centered_;
    const float* importance_;
    int n_;
    float top_, weight_ = 0.0f;
    wide middle_, half_, total_{};
};

PENSTOCK_INLINE float from_bfloat_bits(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// Rows of groups of n weights to integers of `bits` bits from 0 on; scales and offsets are bfloat16.
inline void round_with_offsets(const float* x, const float* importance, int64_t rows, int64_t groups, int n, int bits,
                               int8_t* out, uint16_t* scales, uint16_t* offsets) {
    const float top = static_cast<float>((1 << bits) - 1);
    std::vector<wide> weights(n), centered(n);
    for (int64_t row = 0; row < rows; row += kWide) {
        const int lanes = static_cast<int>(std::min<int64_t>(kWide, rows - row));
        for (int64_t g = 0; g < groups; g++) {
            for (int i = 0; i < n; i++)
                for (int lane = 0; lane < kWide; lane++)
                    weights[i][lane] = x[((row + std::min(lane, lanes - 1)) * groups + g) * n + i];
            const Steps best = GroupFit(weights.data(), importance + g * n, n, top, centered.data()).best();
            Steps kept;
            for (int lane = 0; lane < kWide; lane++) {
                const uint16_t scale = to_bfloat_bits(best.scale[lane]), offset = to_bfloat_bits(best.offset[lane]);
                kept.scale[lane] = from_bfloat_bits(scale);
                kept.offset[lane] = from_bfloat_bits(offset);
                if (lane < lanes) scales[(row + lane) * groups + g] = scale, offsets[(row + lane) * groups + g] = offset;
            }
            for (int i = 0; i < n; i++) {
                int8_t integers[kWide];
                store_narrow(integers, __builtin_convertvector(kept.nearest(weights[i], top), wide_int));
                for (int lane = 0; lane < lanes; lane++) out[((row + lane) * groups + g) * n + i] = integers[lane];
            }
        }
    }
}

// Groups of n weights, rotated in blocks if `rotation` is not 0, to multiples of a 127th of each group's largest magnitude.
inline void round_to_largest(const float* weights, int64_t groups, int64_t n, int rotation, int8_t* out, float* scales) {
    std::vector<float> rotated(rotation ? n : 0);
    for (int64_t g = 0; g < groups; g++, weights += n, out += n) {
        const float* x = weights;
        if (rotation) {
            rotate(weights, static_cast<int>(n), rotation, rotated.data());
            for (float& y : rotated) y *= 1.0f / static_cast<float>(rotation);  // a power of 2
            x = rotated.data();
        }
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
