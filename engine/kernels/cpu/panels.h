// Weights as the kernels want them: panels of 16 outputs, padded with zeros.
//
// What lies in a panel depends on the type, so that the product's instruction finds its operands side by side:
//     float32, float16, bfloat16   [k][16]
//     bfloat16 for tiles or pairs  [k / 2][16][2]
//     int8                         [k / 4][16][4]
//     int4                         [k / 8][16][4] bytes, low halves for four k, high halves for the next four
//     int2                         [k / 16][16][4] bytes, their lowest two bits for four k, the next for the next four, ...
//     int5, int6, int3             their low bits like int4 or int2; behind them [k / 4][planes][8] bytes: the bits above
//     integers of a table          their places like int4
//     e4m3                         as bfloat16, a byte each
//     places in a table            the eight halves of 32-bit lane l of 64 bytes are numbers l, l + 16, ... of the 128
//                                  that bfloat16, or float32, would have there
// All but the first two have a scale for every output and group of k, and integers maybe an offset: [group][16] in each
// panel. Those of integers may stay as narrow as a checkpoint has them.
//
// A gated linear (source: I gate rows, then I up rows) interleaves its panels: panel 2j has gates 16j to 16j + 15,
// panel 2j + 1 the ups of the same indices, so that silu(gate) * up is computed where both were.
#pragma once

#include <algorithm>
#include <vector>

#include "pairs.h"
#include "rotation.h"
#include "simd.h"
#include "threads.h"
#include "tiles.h"

namespace penstock {

constexpr int kPanel = 16;
constexpr int kLeastGroup = 16;         // of integers that share a scale: what a step of tiles takes at least
constexpr int kMostUnpacked = 1024;     // k of int4 at a time: whole groups, or a part of a row that is one group
constexpr int kFewUnpacked = 512;      // of int5 and int6 for few rows: they stay in the first-level cache
constexpr int kMostIntegers = 1 << 17;  // in a row: the sum of so many products of int8 fits int32
constexpr int kUnit = 8;                // k of places in a table that lie together
constexpr float kNumberUnit = 256.0f;   // how many times larger scales of e4m3 are kept: see load_numbers

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2, int8 = 3, int4 = 4, e4m3 = 5, places = 6, int5 = 7, int6 = 8,
                           int2 = 9, int3 = 10, int_places = 11,
                           nibbles = 12, magnitudes = 13 };  // while multiplied: int4 in bytes, int8 in two of them

// Of floating-point types.
inline size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Of integers, or of their places; 0 of other types.
constexpr int bits_of(Type type) {
    constexpr int kBits[] = {0, 0, 0, 8, 4, 0, 0, 5, 6, 2, 3, 4, 8, 8};
    return kBits[static_cast<int>(type)];
}

// The low bits of an integer, which may share a byte with those of others, and how many bits are above them.
constexpr int low_bits_of(Type type) { return bits_of(type) == 8 ? 8 : bits_of(type) == 2 || bits_of(type) == 3 ? 2 : 4; }
constexpr int planes_of(Type type) { return bits_of(type) - low_bits_of(type); }

template <Type kType>
using TypeIs = std::integral_constant<Type, kType>;

// Calls function with a constant, which is the type of integers of less than 8 bits.
template <class Function>
void with_bits(Type type, const Function& function) {
    switch (type) {
        case Type::int2: return function(TypeIs<Type::int2>());
        case Type::int3: return function(TypeIs<Type::int3>());
        case Type::int5: return function(TypeIs<Type::int5>());
        case Type::int6: return function(TypeIs<Type::int6>());
        case Type::int_places: return function(TypeIs<Type::int_places>());
        default: return function(TypeIs<Type::int4>());
    }
}

inline bool is_integer(Type type) { return bits_of(type) > 0; }

// Whether weights are decoded to floats before they are multiplied.
inline bool is_coded(Type type) { return type == Type::e4m3 || type == Type::places; }

// The bits of a number in e4m3 in the places that they have in a half, where they stand for 2^-8 of it: its exponent
// counts from 15 and not from 7.
PENSTOCK_INLINE Half half_of(uint8_t e4m3) { return {static_cast<uint16_t>((e4m3 & 0x80) << 8 | (e4m3 & 0x7f) << 7)}; }

// Calls function with a null pointer of the floating-point storage type.
template <class Function>
auto with_type(Type type, Function function) {
    if (type == Type::f16) return function(static_cast<Half*>(nullptr));
    if (type == Type::bf16) return function(static_cast<BFloat*>(nullptr));
    return function(static_cast<float*>(nullptr));
}

inline int divide_up(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return divide_up(a, b) * b; }

// The parts of n, of at most `most` each, that are nearly equal: how large the largest is.
inline int even_part(int n, int most) { return divide_up(n, std::max(1, divide_up(n, most))); }

// What a product reads its activations as.
enum class Form { f32, bf16, int8 };

inline size_t size_of(Form form) { return form == Form::f32 ? 4 : form == Form::bf16 ? 2 : 1; }

// How activations become int8: with a scale for each row, or for each group of the linear; or finely, by groups, what that
// lacks being a row of its own behind the row. See Inputs of quant/integers.py.
enum class Rounding : int32_t { row = 0, groups = 1, fine = 2 };

// is_exact: weights that are decoded are not rounded, nor are their activations.
inline Form form_for([[maybe_unused]] Type type, [[maybe_unused]] bool is_exact) {
    if (is_integer(type)) return Form::int8;
#if PENSTOCK_TILES || PENSTOCK_PAIRS
    if (type == Type::bf16 || (is_coded(type) && !is_exact)) return Form::bf16;
#endif
    return Form::f32;
}

// Numbers of every output and run of k, in panel order: [panel][run][16].
struct RunNumbers {
    Type type = Type::f32;
    int runs = 0;  // of a row
    Buffer<char> data;

    size_t size() const { return type == Type::int8 ? 1 : size_of(type); }
    size_t bytes(int panels) const { return data ? static_cast<size_t>(panels) * runs * kPanel * size() : 0; }

    template <class T>
    const T* at(int panel, int run) const {
        return reinterpret_cast<const T*>(data.get()) + (static_cast<size_t>(panel) * runs + run) * kPanel;
    }

    float number(int panel, int run, int column) const {
        if (type == Type::int8) return static_cast<float>(at<int8_t>(panel, run)[column]);
        return with_type(type, [&](auto* t) { return to_float(at<std::remove_pointer_t<decltype(t)>>(panel, run)[column]); });
    }
};

// Scales or offsets of every output and group, in float32 or as narrow as a checkpoint has them: see FactorSource.
struct GroupNumbers {
    RunNumbers values, units;
    int span = 1;  // groups per unit

    explicit operator bool() const { return values.data != nullptr; }
    bool is_narrow() const { return *this && values.type != Type::f32; }
    size_t bytes(int panels) const { return values.bytes(panels) + units.bytes(panels); }

    float number(int panel, int group, int column) const {
        const float value = values.number(panel, group, column);
        return units.data ? value * units.number(panel, group / span, column) : value;
    }
};

struct Linear {
    Type type;
    Form form;  // of its activations
    int n;      // outputs; of a gated one, pairs
    int k;
    int depth;  // k with the padding of a panel
    int group;  // k per scale
    int num_groups;
    bool gated;
    int panels;
    Buffer<char> data;
    RunNumbers bias;  // float32, one of an output; or null
    GroupNumbers scales, offsets;
    Buffer<int32_t> permutation;
    Buffer<float> table;  // [16], or null
    Rounding rounding = Rounding::row;
    int rotation = 0;  // inputs of a block in which weights are rotated, or 0; 1 / block is theirs, too
    float scale = 1.0f, softcap = 0.0f;  // of an output head: see Product

    int row_parts() const { return rounding == Rounding::fine ? 2 : 1; }
    int groups() const { return num_groups; }
    int group_depth() const { return groups() == 1 ? depth : group; }  // with the padding
    int outputs() const { return gated ? 2 * n : n; }

    size_t panel_bytes() const {
        const size_t count = static_cast<size_t>(depth) * kPanel;
        if (is_integer(type)) return count * bits_of(type) / 8;
        switch (type) {
            case Type::places: return static_cast<size_t>(round_up(depth, kUnit)) * kPanel / 2;
            case Type::e4m3: return static_cast<size_t>(round_up(depth, 2)) * kPanel;
            default: return count * size_of(type);
        }
    }

    size_t bytes() const {
        return panels * panel_bytes() + scales.bytes(panels) + offsets.bytes(panels);
    }

    template <class W>
    const W* panel(int p) const {
        return reinterpret_cast<const W*>(data.get() + p * panel_bytes());
    }

    // Those of all groups of a panel, where they are float32.
    const float* panel_scales(int p) const { return scales.values.at<float>(p, 0); }
    const float* panel_offsets(int p) const { return offsets.values.at<float>(p, 0); }

    bool is_narrow() const { return scales.is_narrow() || offsets.is_narrow(); }

    // What the bits of integers of less than 8 bits stand for, less themselves.
    int lowest() const { return offsets ? 0 : -(1 << (bits_of(type) - 1)); }

    // Whether sums are multiplied by their scales, and not weights.
    bool scales_sums() const { return type == Type::e4m3 && groups() == 1; }

    // Source row of column c of panel p, -1 in the padding.
    int source_row(int p, int c) const {
        const int output = (gated ? p / 2 : p) * kPanel + c;
        if (output >= n) return -1;
        return gated && p % 2 == 1 ? n + output : output;
    }

    // The panel that holds a source row; its column there is the output's number modulo kPanel.
    int panel_of(int row) const { return gated ? (row % n) / kPanel * 2 + row / n : row / kPanel; }
    int column_of(int row) const { return (gated ? row % n : row) % kPanel; }

    // How many neighbours in k lie side by side in a panel.
    int together() const { return is_integer(type) ? 4 : form == Form::bf16 ? 2 : 1; }

    // Where weight (i, column) lies in a panel, counted in weights; of 4 bits, as if each had a byte.
    size_t place(int i, int column) const {
        const int t = together();
        return (static_cast<size_t>(i / t) * kPanel + column) * t + i % t;
    }

    // How many low bits share a byte, and the byte of a panel and the place there of those that would lie at `place`.
    int low_bits() const { return low_bits_of(type); }
    std::pair<size_t, int> low_bits_at(size_t place) const {
        constexpr size_t kBytes = 4 * kPanel;
        const size_t parts = 8 / low_bits(), first = place / (parts * kBytes) * kBytes;
        if (is_integer(type)) return {first + place % kBytes, place / kBytes % parts * low_bits()};
        const size_t lane = place % kPanel, half = place / kPanel % kUnit;
        return {first + lane * 4 + half / 2, half % 2 * 4};
    }

    // Of integers of less than 8 bits: how many bits are above those, and where in a panel those from k on lie.
    int planes() const { return planes_of(type); }
    size_t high_bits(int k) const { return static_cast<size_t>(depth) * kPanel * low_bits() / 8 + k / 4 * 8 * planes(); }

    // The byte of a panel that holds a bit above the low ones of what would lie at `place`, and its place there.
    std::pair<size_t, int> high_bit(size_t place, int plane) const {
        constexpr size_t kQuads = 4 * kPanel;
        return {high_bits(static_cast<int>(place / kQuads) * 4) + plane * 8 + place % kQuads / 8, place % 8};
    }

    // What is in the bits at `place` of a panel of places or integers of less than 8 bits.
    int code_at(int p, size_t place) const {
        const auto [low, shift] = low_bits_at(place);
        int code = panel<uint8_t>(p)[low] >> shift & ((1 << low_bits()) - 1);
        for (int plane = 0; plane < planes(); plane++) {
            const auto [byte, bit] = high_bit(place, plane);
            code |= (panel<uint8_t>(p)[byte] >> bit & 1) << (low_bits() + plane);
        }
        return code;
    }

    float scale_of(int p, int g, int column) const { return scales.number(p, g, column); }

    // Counts without units are of scales, and are taken off.
    float offset_of(int p, int g, int column) const {
        if (!offsets) return 0.0f;
        const float value = offsets.number(p, g, column);
        return offsets.values.type == Type::int8 && !offsets.units.data ? value * -scale_of(p, g, column) : value;
    }

    // Writes the weights of one source row, as they were before packing.
    void unpack_row(int row, float* out) const {
        unpack_as_stored(row, out);
        if (rotation > 0) rotate_back(out, k, rotation);
    }

   private:
    void unpack_as_stored(int row, float* out) const {
        const int p = panel_of(row), column = column_of(row);
        const uint8_t* bytes = panel<uint8_t>(p);
        const auto write = [&](auto number) {  // number(place) is what lies there
            for (int g = 0; g < groups(); g++) {
                const float scale = scales ? scale_of(p, g, column) : 1.0f, offset = offset_of(p, g, column);
                for (int i = g * group; i < std::min(k, (g + 1) * group); i++) {
                    const float w = number(place(i, column)) * scale;
                    out[permutation ? permutation[i] : i] = is_integer(type) ? w + offset : w;
                }
            }
        };
        if (type == Type::int8) return write([&](size_t at) { return static_cast<int8_t>(bytes[at]); });
        if (type == Type::e4m3) return write([&](size_t at) { return to_float(half_of(bytes[at])); });
        if (table) return write([&](size_t at) { return table[code_at(p, at)]; });
        if (is_integer(type)) return write([&](size_t at) { return code_at(p, at) + lowest(); });
        with_type(type, [&](auto* t) {
            const auto* numbers = panel<std::remove_pointer_t<decltype(t)>>(p);
            write([&](size_t at) { return to_float(numbers[at]); });
        });
    }
};

}  // namespace penstock
