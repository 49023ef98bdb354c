// Weights as the kernels want them: panels of 16 outputs, [panel][k][16], padded with zeros.
//
// A gated linear (source: I gate rows, then I up rows) interleaves its panels: panel 2j has gates 16j to 16j + 15,
// panel 2j + 1 the ups of the same indices, so that silu(gate) * up is computed where both were.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace penstock {

constexpr int kPanel = 16;

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2, int8 = 3, int4 = 4 };

inline size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Calls function with a null pointer of the storage type.
template <class Function>
auto with_type(Type type, Function function) {
    if (type == Type::f16) return function(static_cast<Half*>(nullptr));
    if (type == Type::bf16) return function(static_cast<BFloat*>(nullptr));
    return function(static_cast<float*>(nullptr));
}

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

struct Linear {
    Type type;
    int n;  // outputs; of a gated one, pairs
    int k;
    bool gated;
    int panels;
    Buffer<char> data;
    Buffer<float> bias;  // in panel order, or null

    template <class W>
    const W* panel(int p) const {
        return reinterpret_cast<const W*>(data.get()) + static_cast<size_t>(p) * k * kPanel;
    }

    size_t bytes() const { return static_cast<size_t>(panels) * k * kPanel * size_of(type); }

    // Source row of column c of panel p, -1 in the padding.
    int source_row(int p, int c) const {
        const int output = (gated ? p / 2 : p) * kPanel + c;
        if (output >= n) return -1;
        return gated && p % 2 == 1 ? n + output : output;
    }

    // The panel that holds a source row; its column there is the output's number modulo kPanel.
    int panel_of(int row) const { return gated ? (row % n) / kPanel * 2 + row / n : row / kPanel; }

    // Writes the weights of one source row, as they were before packing.
    template <class W>
    void unpack_row(int row, float* out) const {
        const W* w = panel<W>(panel_of(row)) + (gated ? row % n : row) % kPanel;
        for (int i = 0; i < k; i++) out[i] = to_float(w[static_cast<size_t>(i) * kPanel]);
    }
};

// Word: an unsigned integer of the weight's size; packing does not look at the values.
template <class Word>
void pack_panel(const Linear& linear, const Word* source, int p) {
    Word* out = reinterpret_cast<Word*>(linear.data.get()) + static_cast<size_t>(p) * linear.k * kPanel;
    for (int c = 0; c < kPanel; c++) {
        const int row = linear.source_row(p, c);
        const Word* in = row < 0 ? nullptr : source + static_cast<size_t>(row) * linear.k;
        for (int i = 0; i < linear.k; i++) out[static_cast<size_t>(i) * kPanel + c] = in ? in[i] : Word{0};
    }
}

inline std::unique_ptr<Linear> pack(Team& team, Type type, int rows, int k, bool gated, const void* weight,
                                    const float* bias) {
    const int n = gated ? rows / 2 : rows;
    const int panels = divide_up(n, kPanel) * (gated ? 2 : 1);
    auto linear = std::make_unique<Linear>(Linear{type, n, k, gated, panels, nullptr, nullptr});
    linear->data = allocate<char>(linear->bytes());
    if (bias != nullptr) {
        linear->bias = allocate<float>(static_cast<size_t>(panels) * kPanel);
        for (int i = 0; i < panels * kPanel; i++) {
            const int row = linear->source_row(i / kPanel, i % kPanel);
            linear->bias[i] = row < 0 ? 0.0f : bias[row];
        }
    }
    run_chunks(team, static_cast<uint32_t>(panels), [&](uint32_t p, int) {
        if (size_of(type) == 4)
            pack_panel(*linear, static_cast<const uint32_t*>(weight), static_cast<int>(p));
        else
            pack_panel(*linear, static_cast<const uint16_t*>(weight), static_cast<int>(p));
    });
    return linear;
}

// Writes all source rows, [rows][k] float32.
inline void unpack(Team& team, const Linear& linear, float* out) {
    const int rows = linear.gated ? 2 * linear.n : linear.n;
    run_chunks(team, static_cast<uint32_t>(rows), [&](uint32_t row, int) {
        with_type(linear.type, [&](auto* w) {
            using W = std::remove_pointer_t<decltype(w)>;
            linear.unpack_row<W>(static_cast<int>(row), out + static_cast<size_t>(row) * linear.k);
        });
    });
}

}  // namespace penstock
