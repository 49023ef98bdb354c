// The state of one head, row after row: all keys of some columns at a time.
//
// Columns of a state do not see each other, so that threads share a head by them, and those of one task stay in the
// first-level cache. What becomes of a row follows from the state before it and from its own numbers, by sums whose
// order the layer alone says: no cut of a prompt into steps changes a bit.
#pragma once

#include "kv_layout.h"

namespace penstock {

constexpr int kColumns = 32;
constexpr int kColumnParts = kColumns / kWide;

// Sums over keys run side by side, to hide how long an addition takes: as many as there are registers for.
constexpr int kFindChains = kWide == 16 ? 4 : 2;
constexpr int kUpdateChains = kFindChains / 2;

// Calls step(chain, key) for all keys: neighbours belong to chains of their own.
template <int Chains, class Function>
PENSTOCK_INLINE void for_chains(int keys, const Function& step) {
    int i = 0;
    for (; i + Chains <= keys; i += Chains) unrolled<Chains>(PENSTOCK_EACH(c) { step(c, i + c); });
    for (; i < keys; i++) step(std::integral_constant<int, 0>(), i);
}

template <int Chains>
PENSTOCK_INLINE void store_sums(wide (&sums)[Chains][kColumnParts], float* out) {
    unrolled<kColumnParts>(PENSTOCK_EACH(p) {
        wide sum = sums[0][p];
        for (int c = 1; c < Chains; c++) sum += sums[c][p];
        store(out + p * kWide, sum);
    });
}

// found = state^T key, of a state [keys][kColumns].
inline void find(const float* state, const float* key, int keys, float* found) {
    wide sums[kFindChains][kColumnParts] = {};
    for_chains<kFindChains>(keys, [&](auto c, int i) __attribute__((always_inline)) {
        const wide k = all<wide>(key[i]);
        unrolled<kColumnParts>(PENSTOCK_EACH(p) {
            sums[c][p] = fma(load_as<wide>(state + i * kColumns + p * kWide), k, sums[c][p]);
        });
    });
    store_sums(sums, found);
}

// state = shrink * state + key change^T; made = state^T query.
inline void update(float* state, float shrink, const float* key, const float* change, const float* query, int keys,
                   float* made) {
    wide sums[kUpdateChains][kColumnParts] = {}, added[kColumnParts];
    unrolled<kColumnParts>(PENSTOCK_EACH(p) { added[p] = load_as<wide>(change + p * kWide); });
    const wide by = all<wide>(shrink);
    for_chains<kUpdateChains>(keys, [&](auto c, int i) __attribute__((always_inline)) {
        const wide k = all<wide>(key[i]), q = all<wide>(query[i]);
        unrolled<kColumnParts>(PENSTOCK_EACH(p) {
            float* place = state + i * kColumns + p * kWide;
            const wide next = fma(added[p], k, load_as<wide>(place) * by);
            store(place, next);
            sums[c][p] = fma(next, q, sums[c][p]);
        });
    });
    store_sums(sums, made);
}

// Columns of a head as a slot has them, [keys][count], to where they are worked on, and back.
inline void read_columns(const float* slot, int keys, int count, float* state) {
    if (count == kColumns) return (void)std::memcpy(state, slot, static_cast<size_t>(keys) * kColumns * sizeof(float));
    for (int i = 0; i < keys; i++) {
        std::memset(state + i * kColumns, 0, kColumns * sizeof(float));
        std::memcpy(state + i * kColumns, slot + i * count, count * sizeof(float));
    }
}

inline void write_columns(const float* state, int keys, int count, float* slot) {
    if (count == kColumns) return (void)std::memcpy(slot, state, static_cast<size_t>(keys) * kColumns * sizeof(float));
    for (int i = 0; i < keys; i++) std::memcpy(slot + i * count, state + i * kColumns, count * sizeof(float));
}

// log(1 + e^x); where that is small, too, to the last bits: log(u) e / (u - 1) for u = 1 + e, however u is rounded.
PENSTOCK_INLINE v8 softplus(v8 x) {
    const v8 one = splat(1.0f), e = exp(x < v8{} ? x : -x), u = one + e, above = u - one;
    const v8 tail = above > v8{} ? log(u) * (e / above) : e;
    return (x > v8{} ? x : v8{}) + tail;
}

}  // namespace penstock
