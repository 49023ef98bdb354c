// One token from a row of logits; the rules are those of engine/sampling/batch.py.
//
// Ties: what is as likely as a token that top-k or top-p keeps is kept as well; of equal largest logits the argmax is
// the first.
#pragma once

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

struct Candidate {
    float weight;
    int32_t id;
};

struct SampleScratch {
    std::vector<float> logits, weights;
    std::vector<Candidate> candidates;
    std::vector<double> bin_mass;
    std::vector<int32_t> bin_count;
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

// ---- selection: the most likely tokens, without sorting them all -----------------------------------------------

// Weights lie in [0, 1]; their bits, as integers, order them. The upper ones make bins.
constexpr int kBinShift = 18;
constexpr int kBins = (0x3f800000 >> kBinShift) + 1;

inline int bin_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return static_cast<int>(bits >> kBinShift);
}

inline bool likelier(const Candidate& a, const Candidate& b) { return a.weight > b.weight; }

// Keeps the likeliest candidates, in order of likelihood, until `enough(number, mass)` of those before holds. Only
// the bin in which that happens is sorted; the result is in no particular order.
template <class Enough>
void keep_until(std::vector<Candidate>& candidates, SampleScratch& s, Enough enough) {
    s.bin_mass.assign(kBins, 0.0);
    s.bin_count.assign(kBins, 0);
    for (const Candidate& c : candidates) {
        s.bin_mass[bin_of(c.weight)] += c.weight;
        s.bin_count[bin_of(c.weight)]++;
    }
    int bin = kBins - 1, number = 0;
    double mass = 0.0;
    while (bin >= 0 && !enough(number + s.bin_count[bin], mass + s.bin_mass[bin])) {
        number += s.bin_count[bin];
        mass += s.bin_mass[bin];
        bin--;
    }
    if (bin < 0) return;
    const auto above = std::partition(candidates.begin(), candidates.end(),
                                      [&](const Candidate& c) { return bin_of(c.weight) > bin; });
    const auto inside =
        std::partition(above, candidates.end(), [&](const Candidate& c) { return bin_of(c.weight) == bin; });
    std::sort(above, inside, likelier);
    auto end = above;
    while (end != inside && !enough(number, mass)) {
        number++;
        mass += end->weight;
        ++end;
    }
    while (end != inside && end != above && end->weight == (end - 1)->weight) ++end;
    candidates.erase(end, candidates.end());
}

inline double mass_of(const std::vector<Candidate>& candidates) {
    double mass = 0.0;
    for (const Candidate& c : candidates) mass += c.weight;
    return mass;
}

// The first token, in order of id, at which the running sum passes uniform times the total.
inline int invert(std::vector<Candidate>& candidates, double uniform) {
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    const double target = uniform * mass_of(candidates);
    double running = 0.0;
    int last = -1;
    for (const Candidate& c : candidates) {
        if (c.weight <= 0.0f) continue;
        running += c.weight;
        last = c.id;
        if (running > target) return c.id;
    }
    return last;
}

// The same for all tokens.
inline int invert_all(const float* weights, int n, double uniform) {
    double total = 0.0;
    for (int i = 0; i < n; i++) total += weights[i];
    const double target = uniform * total;
    double running = 0.0;
    int last = -1;
    for (int i = 0; i < n; i++) {
        if (weights[i] <= 0.0f) continue;
        running += weights[i];
        last = i;
        if (running > target) return i;
    }
    return last;
}

// Of the tokens that can be in the result at all. Those below a share of (1 - top_p) / n of the mass are not: all of
// them together have less than 1 - top_p.
inline void collect(const float* weights, int n, float least, std::vector<Candidate>& candidates) {
    candidates.clear();
    for (int i = 0; i < n; i += kLanes) {
        const v8 x = load_first(weights + i, n - i);
        if (max(x) < least) continue;
        for (int j = 0; j < std::min(kLanes, n - i); j++)
            if (x[j] >= least && x[j] > 0.0f) candidates.push_back({x[j], i + j});
    }
}

inline int draw(const SampleArgs& args, int row, const float* x, float peak, SampleScratch& s) {
    const int n = static_cast<int>(args.vocab), top_k = args.top_k[row];
    const float temperature = args.temperature[row], top_p = args.top_p[row], min_p = args.min_p[row];
    const bool some = top_k > 0 && top_k < n, nucleus = top_p < 1.0f;
    float* weights = s.weights.data();
    double total = 0.0;
    for (int i = 0; i < n; i += kLanes) {
        const v8 w = exp((load_or_lowest(x + i, n - i) - splat(peak)) / splat(temperature));
        store(weights + i, w);
        total += sum(w);
    }
    if (!some && !nucleus && min_p <= 0.0f) return invert_all(weights, n, args.uniform[row]);
    // After top-k, top-p is a share of what top-k left; min-p may not have taken its part before that is known.
    const bool both = some && nucleus;
    float least = both ? 0.0f : min_p;
    if (nucleus && !some) least = std::max(least, static_cast<float>((1.0 - top_p) / n * total * 0.999));
    collect(weights, n, least, s.candidates);
    if (some) keep_until(s.candidates, s, [&](int number, double) { return number >= top_k; });
    if (nucleus) {
        const double enough = (some ? mass_of(s.candidates) : total) * top_p;
        keep_until(s.candidates, s, [&](int number, double mass) { return number > 0 && mass >= enough; });
    }
    if (both)
        s.candidates.erase(std::remove_if(s.candidates.begin(), s.candidates.end(),
                                          [&](const Candidate& c) { return c.weight < min_p; }),
                           s.candidates.end());
    return invert(s.candidates, args.uniform[row]);
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
    s.logits.resize(n);
    s.weights.resize(n + kLanes);
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
