// One token from a row of logits; the rules are those of engine/sampling/batch.py.
//
// Ties: what is as likely as a token that top-k or top-p keeps is kept as well; of equal largest logits the argmax is
// the first.
#pragma once

#include <functional>
#include <limits>

#include "pack.h"

namespace penstock {

struct SampleArgs {
    const float* logits;  // [rows][vocab]
    int64_t vocab, rows;
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const double* uniform;
    const float *repetition, *presence, *frequency;
    const int32_t *bias_starts, *bias_ids;
    const float* bias_values;
    const int32_t *seen_starts, *seen_ids, *seen_counts;
    int32_t want_logprobs;
    int32_t* token_ids;
    float* logprobs;
};

struct Bin {
    double mass;
    int count;
};

constexpr int kRun = 64;  // weights summed up together

struct SampleScratch {
    std::vector<float> logits, weights, candidates, inside;
    std::vector<Bin> bins;
    int padded;  // length of the weights: whole runs, zeros at the end

    void resize(int n) {
        padded = (n + kRun - 1) / kRun * kRun;
        logits.resize(n);
        weights.assign(padded, 0.0f);
        candidates.resize(padded);
        inside.resize(padded);
    }
};

// x * 0 is 0 for a finite x and NaN for any other.
inline bool all_finite(const float* x, int n) {
    v8 zeros = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) zeros += load_first(x + i, n - i) * splat(0.0f);
    return sum(zeros) == 0.0f;
}

inline v8 load_or_lowest(const float* x, int count) {
    if (count >= kLanes) return load(x);
    v8 y = splat(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < count; i++) y[i] = x[i];
    return y;
}

inline float highest(const float* x, int n) {
    v8 a = load_or_lowest(x, n), b = a;
    int i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        a = max(a, load(x + i));
        b = max(b, load(x + i + kLanes));
    }
    for (; i < n; i += kLanes) a = max(a, load_or_lowest(x + i, n - i));
    return max(max(a, b));
}

inline int first_equal(const float* x, int n, float value) {
    for (int i = 0; i < n; i++)
        if (x[i] == value) return i;
    return -1;
}

inline double sum_exp(const float* x, int n, float shift) {
    double total = 0.0;
    for (int i = 0; i < n; i += kLanes) total += sum(exp(load_or_lowest(x + i, n - i) - splat(shift)));
    return total;
}

// Bias, then penalties, into `x`, which holds a copy of the row; false where that left no usable number.
inline bool adjust(const SampleArgs& args, int row, float* x) {
    for (int i = args.bias_starts[row]; i < args.bias_starts[row + 1]; i++) {
        const float value = args.bias_values[i];
        if (!(value < std::numeric_limits<float>::infinity())) return false;
        x[args.bias_ids[i]] += value;
    }
    const float repetition = args.repetition[row], presence = args.presence[row], frequency = args.frequency[row];
    for (int i = args.seen_starts[row]; i < args.seen_starts[row + 1]; i++) {
        float& y = x[args.seen_ids[i]];
        const int count = args.seen_counts[i];
        y = y > 0.0f ? y / repetition : y * repetition;
        if (count > 0) y = y - static_cast<float>(count) * frequency - presence;
    }
    return true;
}

// ---- selection: what top-k, top-p and min-p keep is what weighs at least a cut ---------------------------------

// Weights lie in [0, 1]. Their bits, read as integers, order them; the upper ones make bins: 32 to a power of two,
// what is below 2^-40 in the first.
constexpr int kBinShift = 18;
constexpr int kFirstBin = (127 - 40) << 5;
constexpr int kBins = (127 << 5) - kFirstBin + 1;

inline int bin_of(float weight) {
    int32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::max(0, (bits >> kBinShift) - kFirstBin);
}

// Copies what `wanted`, without a branch for each; returns how many.
template <class Wanted>
int filter(const float* from, int n, float* to, Wanted wanted) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        to[count] = from[i];
        count += wanted(from[i]);
    }
    return count;
}

// The smallest weight that is kept when the largest are taken one after another, the first always, until
// `enough(number, mass)` of those taken holds. Weights below `least` are not looked at. Only one bin is sorted.
template <class Enough>
float cut_where(float least, SampleScratch& s, Enough enough) {
    float* candidates = s.candidates.data();
    const int count = filter(s.weights.data(), s.padded, candidates, [&](float w) { return w >= least; });
    s.bins.assign(kBins, Bin{0.0, 0});
    for (int i = 0; i < count; i++) {
        Bin& bin = s.bins[bin_of(candidates[i])];
        bin.mass += candidates[i];
        bin.count++;
    }
    int at = kBins - 1, number = 0;
    double mass = 0.0;
    for (; at > 0 && !enough(number + s.bins[at].count, mass + s.bins[at].mass); at--) {
        number += s.bins[at].count;
        mass += s.bins[at].mass;
    }
    float* inside = s.inside.data();
    const int some = filter(candidates, count, inside, [&](float w) { return bin_of(w) == at; });
    std::sort(inside, inside + some, std::greater<float>());
    float cut = least;
    for (int i = 0; i < some && (number == 0 || !enough(number, mass)); i++) {
        cut = inside[i];
        number++;
        mass += inside[i];
    }
    return cut;
}

typedef double v8d __attribute__((vector_size(64)));

// What is kept of a run of weights.
inline double mass_of_run(const float* weights, float cut) {
    v8d masses = {};
    for (int i = 0; i < kRun; i += kLanes) {
        const v8 w = load(weights + i);
        masses += __builtin_convertvector(w < splat(cut) ? splat(0.0f) : w, v8d);
    }
    double mass = 0.0;
    for (int i = 0; i < kLanes; i++) mass += masses[i];
    return mass;
}

inline double mass_from(const SampleScratch& s, float cut) {
    double mass = 0.0;
    for (int i = 0; i < s.padded; i += kRun) mass += mass_of_run(s.weights.data() + i, cut);
    return mass;
}

// The first kept token, in order of id, at which the running sum passes uniform times the total.
inline int invert(const SampleScratch& s, float cut, double uniform) {
    const double target = uniform * mass_from(s, cut);
    double before = 0.0;
    int last = -1;
    for (int i = 0; i < s.padded; i += kRun) {
        const double after = before + mass_of_run(s.weights.data() + i, cut);
        if (after < target * (1 - 1e-9)) {  // surely not here, however it was rounded
            before = after;
            continue;
        }
        double running = before;
        for (int j = i; j < i + kRun; j++) {
            const float w = s.weights[j];
            if (w < cut || w <= 0.0f) continue;
            last = j;
            running += w;
            if (running > target) return last;
        }
        before = after;
    }
    return last;
}

// At least k weights are as large as this: the largest of k runs are.
inline float floor_of_largest(SampleScratch& s, int k) {
    const int runs = s.padded / kRun;
    if (k > runs) return 0.0f;
    for (int i = 0; i < runs; i++) s.inside[i] = highest(&s.weights[i * kRun], kRun);
    const auto kth = s.inside.begin() + (k - 1);
    std::nth_element(s.inside.begin(), kth, s.inside.begin() + runs, std::greater<float>());
    return *kth;
}

inline int draw(const SampleArgs& args, int row, const float* x, float peak, SampleScratch& s) {
    const int n = static_cast<int>(args.vocab), top_k = args.top_k[row];
    const float temperature = args.temperature[row], top_p = args.top_p[row];
    for (int i = 0; i < n; i += kLanes)
        store(&s.weights[i], exp((load_or_lowest(x + i, n - i) - splat(peak)) / splat(temperature)));
    float cut = 0.0f;
    if (top_k > 0 && top_k < n) {
        const float least = floor_of_largest(s, top_k);
        cut = cut_where(least, s, [&](int number, double) { return number >= top_k; });
    }
    if (top_p < 1.0f) {
        const double total = mass_from(s, cut);
        // All that weigh less than this have, together, less than the share that top-p leaves out.
        const float least = std::max(cut, static_cast<float>((1.0 - top_p) / n * total * 0.999));
        cut = cut_where(least, s, [&](int, double mass) { return mass >= total * top_p; });
    }
    return invert(s, std::max(cut, args.min_p[row]), args.uniform[row]);
}

inline int choose(const SampleArgs& args, int row, const float* raw, SampleScratch& s) {
    const int n = static_cast<int>(args.vocab);
    const float* x = raw;
    const bool adjusted = args.bias_starts[row] != args.bias_starts[row + 1] ||
                          args.seen_starts[row] != args.seen_starts[row + 1];
    if (adjusted) {
        std::memcpy(s.logits.data(), raw, n * sizeof(float));
        if (!adjust(args, row, s.logits.data())) return -1;
        x = s.logits.data();
    }
    const float peak = highest(x, n);
    if (!(std::abs(peak) < std::numeric_limits<float>::infinity())) return -1;
    if (args.temperature[row] <= 0.0f) return first_equal(x, n, peak);
    return draw(args, row, x, peak, s);
}

inline void sample_row(const SampleArgs& args, int row, SampleScratch& s) {
    const int n = static_cast<int>(args.vocab);
    const float* raw = args.logits + static_cast<size_t>(row) * n;
    s.resize(n);
    const int id = all_finite(raw, n) ? choose(args, row, raw, s) : -1;
    args.token_ids[row] = id;
    float logprob = std::numeric_limits<float>::quiet_NaN();
    if (id >= 0 && args.want_logprobs) {
        const float peak = highest(raw, n);
        logprob = static_cast<float>(double(raw[id]) - peak - std::log(sum_exp(raw, n, peak)));
    }
    args.logprobs[row] = logprob;
}

// False where an id is not a token.
inline bool sample(Team& team, const SampleArgs& args) {
    for (int i = args.bias_starts[0]; i < args.bias_starts[args.rows]; i++)
        if (args.bias_ids[i] < 0 || args.bias_ids[i] >= args.vocab) return false;
    for (int i = args.seen_starts[0]; i < args.seen_starts[args.rows]; i++)
        if (args.seen_ids[i] < 0 || args.seen_ids[i] >= args.vocab) return false;
    std::vector<SampleScratch> scratch(team.size());
    run_chunks(team, static_cast<uint32_t>(args.rows),
               [&](uint32_t row, int worker) { sample_row(args, static_cast<int>(row), scratch[worker]); });
    return true;
}

}  // namespace penstock
