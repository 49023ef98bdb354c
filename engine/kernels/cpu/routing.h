// Which experts a row has, and what each of them counts: `route` of kernels/experts.py, in float32 throughout.
#pragma once

#include <functional>
#include <limits>

#include "linear.h"

namespace penstock {

enum class Scoring : int32_t { softmax, softmax_of_chosen, sigmoid };

struct Router {
    int32_t experts, top_k;
    Scoring scoring;
    int32_t groups, top_groups, group_best;  // of neighbours; the best can be chosen from
    int32_t renormalizes;
    float epsilon, scale;
    const float *choice_bias, *expert_scale;  // [experts], or null
};

// A number as an integer in the same order: NaN is the largest of all; among equals the lower place is.
inline uint64_t in_order(float x, size_t place) {
    const float number = x + 0.0f;  // -0 becomes 0
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (std::isnan(x)) bits = 0xffffffffu;
    return uint64_t{bits} << 32 | (0xffffffffu - static_cast<uint32_t>(place));
}

inline int place_of(uint64_t ordered) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(ordered)); }

// Routes one row after another; each worker has its own.
class Routing {
   public:
    // Writes the experts of a row, the best first, and their weights.
    void route(const Router& by, const float* logits, int32_t* ids, float* weights) {
        scores_.resize(by.experts);
        score(by, logits);
        choose(by, logits);
        for (int j = 0; j < by.top_k; j++) ids[j] = place_of(best_[j]);
        for (int j = 0; j < by.top_k; j++) weights[j] = scores_[ids[j]];
        if (by.scoring == Scoring::softmax_of_chosen) {
            for (int j = 0; j < by.top_k; j++) weights[j] = logits[ids[j]];
            softmax(weights, by.top_k, weights);
        }
        weigh(by, ids, weights);
    }

   private:
    static void softmax(const float* x, int n, float* out) {
        const float most = *std::max_element(x, x + n);
        for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
            using V = decltype(v);
            store_first(out + i, exp(load_first<V>(x + i, count) - all<V>(most)), count);
        });
        float total = 0.0f;
        for (int i = 0; i < n; i++) total += out[i];
        for (int i = 0; i < n; i++) out[i] /= total;
    }

    static void sigmoids(const float* x, int n, float* out) {
        for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
            store_first(out + i, sigmoid(load_first<decltype(v)>(x + i, count)), count);
        });
    }

    void score(const Router& by, const float* logits) {
        (by.scoring == Scoring::sigmoid ? sigmoids : softmax)(logits, by.experts, scores_.data());
    }

    // By score and bias; without a bias and groups, by logit, which is the same but for rounding.
    void choose(const Router& by, const float* logits) {
        by_.assign(logits, logits + by.experts);
        if (by.choice_bias || by.groups > 1)
            for (int e = 0; e < by.experts; e++) by_[e] = scores_[e] + (by.choice_bias ? by.choice_bias[e] : 0.0f);
        if (by.groups > 1) leave_groups(by);
        order(by_.data(), by.experts, by.top_k, best_);
    }

    // Whatever is outside the best groups becomes -infinity.
    void leave_groups(const Router& by) {
        const int size = by.experts / by.groups;
        sums_.assign(by.groups, 0.0f);
        for (int g = 0; g < by.groups; g++) {
            order(by_.data() + g * size, size, by.group_best, best_);
            for (int i = 0; i < by.group_best; i++) sums_[g] += by_[g * size + place_of(best_[i])];
        }
        order(sums_.data(), by.groups, by.groups, best_);
        for (int i = by.top_groups; i < by.groups; i++) {
            float* left = by_.data() + place_of(best_[i]) * size;
            std::fill(left, left + size, -std::numeric_limits<float>::infinity());
        }
    }

    static void order(const float* x, int n, int count, std::vector<uint64_t>& best) {
        best.resize(n);
        for (int i = 0; i < n; i++) best[i] = in_order(x[i], i);
        std::partial_sort(best.begin(), best.begin() + count, best.end(), std::greater<>());
    }

    static void weigh(const Router& by, const int32_t* ids, float* weights) {
        float total = 0.0f;
        for (int j = 0; j < by.top_k; j++) total += weights[j];
        for (int j = 0; j < by.top_k; j++) {
            if (by.renormalizes) weights[j] /= total + by.epsilon;
            weights[j] *= by.scale;
            if (by.expert_scale) weights[j] *= by.expert_scale[ids[j]];
        }
    }

    std::vector<float> scores_, by_, sums_;
    std::vector<uint64_t> best_;
};

}  // namespace penstock
