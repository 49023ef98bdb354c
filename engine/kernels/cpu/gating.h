// Rows that are let through by others, element by element, as the next linear reads them.
#pragma once

#include "program.h"

namespace penstock {

// out = activation(gates) * x; `out` may be `x`.
template <class Activation>
PENSTOCK_INLINE void let_through(const float* gates, const float* x, int n, float* out, const Activation& activation) {
    for_vectors(n, PENSTOCK_VECTORS(v, i, count) {
        using V = decltype(v);
        store_first(out + i, activation(load_first<V>(gates + i, count)) * load_first<V>(x + i, count), count);
    });
}

inline void let_through(Gate gate, const float* gates, const float* x, int n, float* out) {
    if (gate == Gate::silu) return let_through(gates, x, n, out, [](auto y) { return silu(y); });
    let_through(gates, x, n, out, [gate](auto y) { return activated(gate, y); });
}

// What the heads of a mixer made of a token becomes what it reads of `row`, what its first linear made of that.
inline void let_through(const Mixer& by, const float* made, const float* row, float* out) {
    const int width = by.width();
    if (by.kind == MixerKind::mamba) {
        const int size = width / by.key_heads;
        let_through(Gate::silu, row, made, width, out);
        for (int at = 0; at < width; at += size) rms_norm(out + at, by.norm + at, size, by.eps, out + at);
        return;
    }
    for (int at = 0; at < width; at += by.values) rms_norm(made + at, by.norm, by.values, by.eps, out + at);
    let_through(Gate::silu, row + by.channels, out, width, out);
}

// What attention made of a token, by the gates before its queries.
inline void let_through_by_sigmoid(const float* gates, const float* attended, int n, float* out) {
    let_through(gates, attended, n, out, [](auto y) { return sigmoid(y); });
}

}  // namespace penstock
