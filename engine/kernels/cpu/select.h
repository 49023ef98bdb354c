// Which tokens top-k, top-p and min-p keep: step 4 of the rule in engine/sampling/reference.py.
//
// A pass over the row has left the largest logit of every run of kRunLength. Most tokens are then ruled out by whole
// runs; what is left are candidates, in order of id, and everything exact is computed of these alone.
#pragma once

#include <algorithm>
#include <cfloat>
#include <limits>

#include "memory.h"
#include "simd.h"

namespace penstock {

constexpr int kRunLength = 32;              // each lane of a block is a run
constexpr int kBlock = kRunLength * kLanes;
constexpr int kLevels = 1 << 22;
constexpr float kLevelsPerNat = 1 << 17;
constexpr float kMassUnit = 17179869184.0f;  // 2^34
constexpr float kMassless = 24.0f;           // nats; from 23.6 on a mass is cut to 0
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }

struct Settings {
    float temperature;
    int top_k;          // 0 is off
    float top_p;        // 1 is off
    float min_p_depth;  // nats; infinite is off
};

struct Candidates {
    int count = 0;
    Buffer<int32_t> ids, levels, scratch;
    Buffer<float> values, masses;

    void reserve(int n) {
        const size_t size = static_cast<size_t>(n) + kLanes;
        ids = allocate<int32_t>(size);
        levels = allocate<int32_t>(size);
        scratch = allocate<int32_t>(size);
        values = allocate<float>(size);
        masses = allocate<float>(size);
    }

    void add(int id, float value) {
        ids[count] = id;
        values[count++] = value;
    }

    // Fills the last vector with tokens that nothing chooses.
    void pad() {
        for (int i = count; i < count + kLanes; i++) {
            ids[i] = 0;
            values[i] = -kInfinity;
        }
    }
};

// A row's logits and what is known of them.
struct Scanned {
    const float* x;
    int n;
    const float* maxima;  // [blocks][kLanes]
    float peak;
};

struct Scale {
    float temperature, levels;  // levels per unit of logit

    explicit Scale(float t) : temperature(t > 0.0f ? t : 1.0f), levels(std::min(kLevelsPerNat / temperature, FLT_MAX)) {}

    PENSTOCK_INLINE v8i level(v8 depth) const {
        const v8 most = splat(kLevels - 1.0f), scaled = depth * splat(levels);
        return __builtin_convertvector(scaled < most ? scaled : most, v8i);
    }

    int level1(float depth) const { return static_cast<int>(std::min(depth * levels, kLevels - 1.0f)); }

    // No token of this level or a smaller one is deeper.
    float deepest(int level) const {
        return level >= kLevels - 1 ? kInfinity : (level + 1.0f) / levels * 1.000001f + FLT_MIN;
    }

    PENSTOCK_INLINE v8 mass(v8 depth) const {
        const v8 scaled = exp(-(depth / splat(temperature))) * splat(kMassUnit);
        const v8 cut = __builtin_convertvector(__builtin_convertvector(scaled, v8i), v8);
        return scaled < splat(1 << 24) ? cut : scaled;  // above, a float is an integer
    }
};

// A sum of masses: integers up to 2^34, whose sum is exact in a double for up to 2^19 tokens.
struct MassSum {
    typedef double v8d __attribute__((vector_size(64)));
    v8d lanes = {};

    PENSTOCK_INLINE void add(v8 masses) { lanes += __builtin_convertvector(masses, v8d); }

    double total() const {
        double all = 0.0;
        for (int i = 0; i < kLanes; i++) all += lanes[i];
        return all;
    }
};

// At least k logits are as large as this; fewer runs than k say nothing.
inline float floor_of_largest(const Scanned& row, int k, float* scratch) {
    const int blocks = blocks_of(row.n), wanted = std::max(8, k);  // blocks of runs: eight runs for each of the k
    const int rest = std::min(blocks, wanted);
    if (k > rest * kLanes) return -kInfinity;
    for (int b = 0; b < rest; b++) {
        v8 largest = load(row.maxima + b * kLanes);
        for (int other = b + rest; other < blocks; other += rest)
            largest = max(largest, load(row.maxima + other * kLanes));
        store(scratch + b * kLanes, largest);
    }
    std::nth_element(scratch, scratch + (k - 1), scratch + rest * kLanes, std::greater<float>());
    return scratch[k - 1];
}

// Calls function(first id, logits, lanes within the limit) for every vector with such a lane.
template <class Function>
PENSTOCK_INLINE void for_depths(const Scanned& row, float limit, Function function) {
    const v8 peak = splat(row.peak), most = splat(limit);
    for (int block = 0, i = 0; i < row.n; block++, i += kBlock) {
        if (!any(peak - load(row.maxima + block * kLanes) <= most)) continue;
        for (int at = i; at < std::min(i + kBlock, row.n); at += kLanes) {
            const v8 x = load_or_lowest(row.x + at, row.n - at);
            const v8i within = peak - x <= most;
            if (any(within)) function(at, x, within);
        }
    }
}

inline void collect(const Scanned& row, float limit, Candidates& found) {
    found.count = 0;
    for_depths(row, limit, [&](int at, v8 x, v8i within) {
        unsigned bits = bits_of(within);
        if (row.n - at < kLanes) bits &= (1u << (row.n - at)) - 1;
        for (; bits != 0; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            found.add(at + lane, x[lane]);
        }
    });
}

inline double mass_of_all(const Scanned& row, const Scale& scale) {
    MassSum sum;
    const float limit = scale.temperature * kMassless;
    for_depths(row, limit, [&](int, v8 x, v8i) { sum.add(scale.mass(splat(row.peak) - x)); });
    return sum.total();
}

// Tokens deeper than this have less mass together than top-p leaves out, so that none of them is kept for it.
inline float deepest_of_nucleus(const Scanned& row, const Scale& scale, double total, float top_p) {
    const double mass = 0.99 * (1.0 - top_p) * total / row.n;  // a token with less is not needed
    const double nats = mass > 1.0 ? std::log(kMassUnit / mass) : kMassless;
    const float depth = static_cast<float>(std::min<double>(nats, kMassless)) * scale.temperature;
    return scale.deepest(scale.level1(depth));
}

inline int kth_level(Candidates& some, int k) {
    if (k > some.count) return kLevels - 1;
    int32_t* levels = some.scratch.get();
    std::copy_n(some.levels.get(), some.count, levels);
    std::nth_element(levels, levels + (k - 1), levels + some.count);
    return levels[k - 1];
}

// ---- top-p -----------------------------------------------------------------------------------------------------

constexpr int kBinShift = 10;
constexpr int kBins = kLevels >> kBinShift;
constexpr int kFewCandidates = 256;

struct Bins {
    double mass[kBins];
};

// The last level that less than `target` of mass lies above, among the candidates `wanted`, which have `above` over
// them; sorts these few.
template <class Wanted>
int crossing_level(Candidates& some, double above, double target, Wanted wanted) {
    int32_t* order = some.scratch.get();
    int count = 0;
    for (int i = 0; i < some.count; i++)
        if (wanted(some.levels[i])) order[count++] = i;
    const int32_t* levels = some.levels.get();
    std::sort(order, order + count, [levels](int a, int b) { return levels[a] < levels[b]; });
    int cut = 0;
    for (int i = 0; i < count && above < target;) {
        cut = levels[order[i]];
        for (; i < count && levels[order[i]] == cut; i++) above += some.masses[order[i]];
    }
    return cut;
}

// Many candidates are summed up in bins of levels first, and only the bin of the crossing is sorted.
inline int nucleus_level(Candidates& some, int cut, double target, Bins& bins) {
    if (some.count <= kFewCandidates)
        return crossing_level(some, 0.0, target, [cut](int level) { return level <= cut; });
    std::fill_n(bins.mass, kBins, 0.0);
    for (int i = 0; i < some.count; i++)
        if (some.levels[i] <= cut) bins.mass[some.levels[i] >> kBinShift] += some.masses[i];
    int bin = 0;
    double above = 0.0;
    while (bin < kBins - 1 && above + bins.mass[bin] < target) above += bins.mass[bin++];
    return crossing_level(some, above, target, [=](int level) { return level <= cut && level >> kBinShift == bin; });
}

inline double mass_up_to(const Candidates& some, int cut) {
    double total = 0.0;
    for (int i = 0; i < some.count; i++)
        if (some.levels[i] <= cut) total += some.masses[i];
    return total;
}

// ---- all filters -----------------------------------------------------------------------------------------------

inline void weigh(Candidates& some, const Scanned& row, const Scale& scale, bool with_masses) {
    some.pad();
    for (int i = 0; i < some.count; i += kLanes) {
        const v8 depth = splat(row.peak) - load(&some.values[i]);
        const v8i levels = scale.level(depth);
        std::memcpy(&some.levels[i], &levels, sizeof levels);
        if (with_masses) store(&some.masses[i], scale.mass(depth));
    }
}

// Leaves the tokens that are kept, in order of id.
inline void select(const Scanned& row, const Settings& by, Candidates& some, Bins& bins) {
    const Scale scale(by.temperature);
    const bool has_top_p = by.top_p < 1.0f;
    const float least_likely = by.min_p_depth * scale.temperature;
    float limit = has_top_p ? kInfinity : least_likely;
    double total = 0.0;
    if (by.top_k > 0) {
        const float floor = floor_of_largest(row, by.top_k, some.masses.get());
        limit = scale.deepest(scale.level1(row.peak - floor));
    } else if (has_top_p) {
        total = mass_of_all(row, scale);
        limit = deepest_of_nucleus(row, scale, total, by.top_p);
    }
    collect(row, limit, some);
    weigh(some, row, scale, has_top_p);
    int cut = by.top_k > 0 ? kth_level(some, by.top_k) : kLevels - 1;
    if (has_top_p) {
        if (by.top_k > 0) total = mass_up_to(some, cut);
        cut = std::min(cut, nucleus_level(some, cut, static_cast<double>(by.top_p) * total, bins));
    }
    const int all = some.count;
    some.count = 0;
    for (int i = 0; i < all; i++)
        if (some.levels[i] <= cut && row.peak - some.values[i] <= least_likely) some.add(some.ids[i], some.values[i]);
    some.pad();
}

}  // namespace penstock
