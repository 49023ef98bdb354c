// Which tokens top-k, top-p and min-p keep: step 4 of the rule in engine/sampling/reference.py.
//
// A token's level never falls as its logit does, so that what a row keeps is told by one number: the smallest logit
// that is kept. Bounds rule out most tokens by whole blocks; what is left are candidates, and everything exact is
// computed of these alone.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstddef>
#include <limits>

#include "memory.h"
#include "simd.h"

namespace penstock {

constexpr int kRunLength = 32;
constexpr int kBlock = kRunLength * kLanes;
constexpr int kLevels = 1 << 22;
constexpr float kLevelsPerNat = 1 << 17;
constexpr float kMassUnit = 17179869184.0f;  // 2^34
constexpr float kMassless = 24.0f;           // nats; from 23.6 on a mass is cut to 0
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row of SamplingTables.rows.
struct SamplingRow {
    uint64_t state;
    float temperature, top_p, min_p_depth, repetition, presence, frequency;
    int32_t top_k, min_tokens, num_biases, counts_row;

    bool is_greedy() const { return !(temperature > 0.0f); }
    bool has_filters() const { return top_k > 0 || top_p < 1.0f || min_p_depth < kInfinity; }
};

static_assert(sizeof(SamplingRow) == 48, "ROW of tables.py");
static_assert(offsetof(SamplingRow, temperature) == 8 && offsetof(SamplingRow, frequency) == 28, "ROW of tables.py");
static_assert(offsetof(SamplingRow, top_k) == 32 && offsetof(SamplingRow, counts_row) == 44, "ROW of tables.py");

inline int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }

// A row of logits in blocks, the last of which is a copy that minus infinity fills up.
struct Row {
    const float* x;
    const float* last;
    int num_blocks;
    float* maxima;  // [num_blocks][kLanes]: the largest logit of each lane of a block

    const float* block(int b) const { return b + 1 < num_blocks ? x + b * kBlock : last; }
    v8 largest(int b) const { return load(maxima + b * kLanes); }
};

// Tokens that may be kept, in order of id; minus infinity fills up the last vector.
struct Candidates {
    int count = 0;
    Buffer<int32_t> ids;
    Buffer<float> logits, masses;

    void reserve(size_t n) {
        ids = allocate<int32_t>(n + kLanes);
        logits = allocate<float>(n + kLanes);
        masses = allocate<float>(n + kLanes);
    }
};

// Depths below a row's largest logit, as the reference has them.
struct Scale {
    float peak, temperature, levels;  // levels per unit of logit

    Scale(float row_peak, float t)
        : peak(row_peak), temperature(t > 0.0f ? t : 1.0f), levels(std::min(kLevelsPerNat / temperature, FLT_MAX)) {}

    PENSTOCK_INLINE v8i level(v8 x) const {
        const v8 scaled = (splat(peak) - x) * splat(levels), most = splat(kLevels - 1.0f);
        return __builtin_convertvector(scaled < most ? scaled : most, v8i);
    }

    int level_at(float depth) const { return static_cast<int>(std::min(depth * levels, kLevels - 1.0f)); }

    PENSTOCK_INLINE v8 mass(v8 x) const {
        const v8 scaled = exp(-((splat(peak) - x) / splat(temperature))) * splat(kMassUnit);
        const v8 cut = __builtin_convertvector(__builtin_convertvector(scaled, v8i), v8);
        return scaled < splat(1 << 24) ? cut : scaled;  // above, a float is an integer
    }

    // No logit that lies no deeper is smaller, however both are rounded.
    float at_depth(float depth) const { return peak - (depth * 1.000001f + FLT_MIN); }

    // No logit that shares a level with one of this depth is smaller.
    float level_end(float depth) const {
        const int level = level_at(depth);
        return level < kLevels - 1 ? at_depth((level + 1.0f) / levels) : -kInfinity;
    }
};

// Calls function(first id, logits) for every vector that has a logit of at least `least`.
template <class Function>
PENSTOCK_INLINE void for_largest(const Row& row, float least, Function function) {
    for (int b = 0; b < row.num_blocks; b++) {
        if (!any(row.largest(b) >= splat(least))) continue;
        const float* x = row.block(b);
        for (int i = 0; i < kBlock; i += kLanes)
            if (any(load(x + i) >= splat(least))) function(b * kBlock + i, load(x + i));
    }
}

// At least k logits are as large as this; fewer runs than k say nothing. The runs' maxima are taken together until there
// are eight for each of the k.
inline float floor_of_largest(const Row& row, int k, float* scratch) {
    const int rest = std::min(row.num_blocks, std::max(8, k));
    if (k > rest * kLanes) return -kInfinity;
    for (int b = 0; b < rest; b++) {
        v8 largest = row.largest(b);
        for (int other = b + rest; other < row.num_blocks; other += rest) largest = max(largest, row.largest(other));
        store(scratch + b * kLanes, largest);
    }
    std::nth_element(scratch, scratch + (k - 1), scratch + rest * kLanes, std::greater<float>());
    return scratch[k - 1];
}

// A sum that is exact for up to 2^19 integers up to 2^34. Vectors of eight doubles would wake the wide units of some CPUs
// for microseconds.
struct DoubleSum {
    typedef float v4 __attribute__((vector_size(16)));
    typedef double v4d __attribute__((vector_size(32)));
    v4d low = {}, high = {};

    PENSTOCK_INLINE void add(v8 x) {
        v4 halves[2];
        std::memcpy(halves, &x, sizeof x);
        low += __builtin_convertvector(halves[0], v4d);
        high += __builtin_convertvector(halves[1], v4d);
    }

    double total() const {
        const v4d sums = low + high;
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

// Finds every token with a logit of at least `least`. Returns the mass of all that are `massive` at least.
inline double collect(const Row& row, const Scale& scale, float least, float massive, Candidates& some) {
    DoubleSum sum;
    some.count = 0;
    for_largest(row, std::min(least, massive), [&](int first, v8 x) {
        if (massive < kInfinity) sum.add(scale.mass(x));
        for (unsigned bits = bits_of(x >= splat(least)); bits != 0; bits &= bits - 1) {
            some.ids[some.count] = first + __builtin_ctz(bits);
            some.logits[some.count++] = x[__builtin_ctz(bits)];
        }
    });
    store(&some.logits[some.count], splat(-kInfinity));
    return sum.total();
}

inline float kth_largest(const Candidates& some, int k) {
    float* scratch = some.masses.get();
    std::copy_n(some.logits.get(), some.count, scratch);
    std::nth_element(scratch, scratch + (k - 1), scratch + some.count, std::greater<float>());
    return scratch[k - 1];
}

inline double mass_up_to(const Candidates& some, const Scale& scale, int level) {
    DoubleSum sum;
    for (int i = 0; i < some.count; i += kLanes) {
        const v8i counted = scale.level(load(&some.logits[i])) <= splat_int(level);
        sum.add(counted ? load(&some.masses[i]) : splat(0.0f));
    }
    return sum.total();
}

// The last level that less than `target` of the mass lies above; it is `last` at most.
inline int nucleus_level(const Candidates& some, const Scale& scale, double target, int last) {
    int first = 0;
    while (first < last) {
        const int middle = (first + last) / 2;
        if (mass_up_to(some, scale, middle) >= target)
            last = middle;
        else
            first = middle + 1;
    }
    return first;
}

inline float smallest_of(const Candidates& some, const Scale& scale, int level, float depth) {
    v8 smallest = splat(scale.peak);
    for (int i = 0; i < some.count; i += kLanes) {
        const v8 x = load(&some.logits[i]);
        const v8i kept = (scale.level(x) <= splat_int(level)) & (splat(scale.peak) - x <= splat(depth));
        smallest = kept & (x < smallest) ? x : smallest;
    }
    return -max(-smallest);
}

// Finds the candidates, and returns the smallest logit that is kept.
inline float select(const Row& row, float peak, const SamplingRow& by, Candidates& some) {
    const Scale scale(peak, by.temperature);
    const float deepest = by.is_greedy() ? 0.0f : by.min_p_depth * scale.temperature;
    const bool has_top_k = by.top_k > 0 && !by.is_greedy(), has_top_p = by.top_p < 1.0f && !by.is_greedy();
    float least = scale.at_depth(deepest), massive = kInfinity;
    if (has_top_k) {
        least = scale.level_end(peak - floor_of_largest(row, by.top_k, some.masses.get()));
    } else if (has_top_p) {  // n tokens at this depth or below have together less than 1 - top_p of the peak's mass
        const float nats = std::log(static_cast<float>(row.num_blocks * kBlock) / (1.0f - by.top_p)) + 0.05f;
        least = scale.level_end(std::min(nats, kMassless) * scale.temperature);
        massive = scale.at_depth(kMassless * scale.temperature);
    }
    double total = collect(row, scale, least, massive, some);
    int last = has_top_k ? scale.level_at(peak - kth_largest(some, by.top_k)) : kLevels - 1;
    if (has_top_p) {
        for (int i = 0; i < some.count; i += kLanes) store(&some.masses[i], scale.mass(load(&some.logits[i])));
        if (has_top_k) total = mass_up_to(some, scale, last);
        last = nucleus_level(some, scale, static_cast<double>(by.top_p) * total, last);
    }
    return smallest_of(some, scale, last, deepest);
}

}  // namespace penstock
