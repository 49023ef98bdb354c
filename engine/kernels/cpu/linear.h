// A whole linear applied to rows of activations: what a product is, and how it is cut into chunks for the team.
#pragma once

#include <limits>

#include "activations.h"

namespace penstock {

constexpr int kRowBlock = 96;      // rows per chunk, by vectors
constexpr int kTileRowBlock = 512; // by tiles, and not more than kHeldBytes, but
constexpr int kLeastRowBlock = 256;
constexpr size_t kHeldBytes = 800 << 10;  // of rows that stay in the second-level cache while panels pass
constexpr int kChunkPanels = 16;   // at most, per chunk; half as many by tiles

// What the sums of one chunk take: the scratch of a team's worker.
constexpr size_t kSumsBytes = sizeof(float) * kPanel * std::max(kChunkPanels * kRowBlock, kChunkPanels / 2 * kTileRowBlock);
constexpr int kWidestRow = 1 << 15;  // a norm's or a mixer's, which go through it, too
static_assert(kSumsBytes >= kWidestRow * sizeof(float));

// Of a gated linear, the activation of the gates; relu2, that of the outputs of one that is not.
enum class Gate : int32_t { silu = 0, gelu = 1, relu2 = 2, gelu_erf = 3 };

// An activation with more to it: f(min(gate, limit)) * (clamp(up, -limit, limit) + shift), where silu is
// x * sigmoid(alpha * x). Of a linear that is not gated, f(min(x, limit)).
struct Bend {
    Gate f;
    float limit;  // or infinity
    float alpha, shift;
};

constexpr Bend kSquaredRelu{Gate::relu2, std::numeric_limits<float>::infinity(), 1.0f, 0.0f};

// out [rows][n] = (x times the linear, + bias; of a gated one activation(gate) * up; or relu2 of it) * scale, capped, +
// residual. `out` may be `residual`.
struct Product {
    const Linear* linear;
    Activations x;
    int rows;
    void* out;
    size_t ldo;
    Form out_form;          // float32, or bfloat16 without a residual
    const float* residual;  // with out's stride, or null
    const Linear* next;     // the linear of the next product, or null
    Gate gate = Gate::silu;
    float scale = 1.0f;
    float softcap = 0.0f;   // c: y becomes c tanh(y / c); 0 is none
    const Bend* bend = nullptr;  // in place of the gate, or null
};

struct Cut {
    int panels;  // per chunk
    int rows;    // per chunk
    int panel_chunks;
    int row_chunks;
    int ahead;  // chunks of panels from the one in work to the same thread's next

    uint32_t chunks() const { return static_cast<uint32_t>(panel_chunks * row_chunks); }
};

// Enough chunks that a thread which loses its core leaves the others work, none so small that claiming it shows. There
// may be several such linears in a phase.
Cut cut(const Linear& linear, int rows, int threads, int linears = 1);

// 1 / (1 + e^-x), from the exponential that cannot overflow.
template <class V>
PENSTOCK_INLINE V sigmoid(V x) {
    const V one = all<V>(1.0f), e = exp_below((V)((IntsOf<V>)x | std::numeric_limits<int32_t>::min()));
    return (x < V{} ? e : one) / (one + e);
}

template <class V>
PENSTOCK_INLINE V silu(V x) {
    return x * sigmoid(x);
}

// x * Phi(x) by its approximation with tanh, which is x * sigmoid(2 u).
template <class V>
PENSTOCK_INLINE V gelu(V x) {
    return x * sigmoid(all<V>(1.5957691216057308f) * (x + all<V>(0.044715f) * x * x * x));
}

// x * Phi(x), with erf to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
template <class V>
PENSTOCK_INLINE V gelu_erf(V x) {
    const V one = all<V>(1.0f), z = (x < V{} ? -x : x) * all<V>(0.70710678f), t = one / (one + all<V>(0.3275911f) * z);
    V tail = all<V>(1.061405429f);
    for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) tail = tail * t + all<V>(c);
    tail = all<V>(0.5f) * t * tail * exp_below(-z * z);
    return x * (x < V{} ? tail : one - tail);
}

// Of the gates of a gated linear.
template <class V>
PENSTOCK_INLINE V activated(Gate f, V x) {
    return f == Gate::silu ? silu(x) : f == Gate::gelu ? gelu(x) : gelu_erf(x);
}

// One chunk of a product, whose sums go through a team's scratch.
void multiply(const Product& job, const Cut& by, uint32_t chunk, float* sums);

// One product of float32 rows as a program of its own; rows are converted first where the linear wants them otherwise.
void apply(Team& team, const Linear& linear, const float* x, size_t ldx, int rows, float* out);

}  // namespace penstock
