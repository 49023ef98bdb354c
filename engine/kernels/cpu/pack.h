// Packs weights as the kernels want them: see panels.h.
#pragma once

#include <array>
#include <utility>

#include "panels.h"

namespace penstock {

// Scales or offsets: floating-point numbers, or int8 that count units, which some groups share.
struct FactorSource {
    const void* values;  // [rows][k / group, rounded up], or null
    const void* units;   // [rows][k / group / span] of a floating-point type; or null: offsets in int8 count -scales
    int32_t type, unit_type;
};

// What a linear is packed from.
struct LinearSource {
    int32_t type, rows, k, gated;
    int32_t group;               // k per scale: k itself, or of integers a multiple of 16 that divides it, else of 8
    int32_t span;                // groups per unit
    int32_t is_exact;            // see form_for
    int32_t rounding, rotation;  // see Linear; of integers only
    const void* weight;          // [rows][k]; a byte each: places, or integers, which see Linear::lowest
    FactorSource scales, offsets;
    const int32_t* permutation;  // [k]: weight i multiplies input permutation[i]; or null. Of integers only
    const float* bias;           // [rows], or null
    const float* table;          // [16]: what places stand for, of integers whole numbers of 8 bits; or null
};

constexpr size_t kWordsAtOnce = 64;  // of each row: what they become stays in the first-level cache for all rows of a panel

// The source rows of a panel's columns, null in the padding.
using PanelRows = std::array<const char*, kPanel>;

inline PanelRows panel_rows(const Linear& linear, const void* source, size_t row_bytes, int p) {
    PanelRows rows{};
    for (int c = 0; c < kPanel; c++)
        if (const int row = linear.source_row(p, c); row >= 0) rows[c] = static_cast<const char*>(source) + row * row_bytes;
    return rows;
}

// Calls put(panel, i, column, word) for every word of the rows of a panel, which is 0 before. A weight has `size` bytes in
// the source, and the last word of a row maybe fewer weights than others.
template <class Word, class Put>
void pack_panel(const Linear& linear, const PanelRows& rows, size_t size, int p, const Put& put) {
    char* out = linear.data.get() + p * linear.panel_bytes();
    std::memset(out, 0, linear.panel_bytes());
    const size_t bytes = linear.k * size, whole = bytes / sizeof(Word), left = bytes % sizeof(Word);
    for (size_t from = 0; from < whole + (left > 0); from += kWordsAtOnce)
        for (int c = 0; c < kPanel; c++) {
            const char* in = rows[c];
            if (in == nullptr) continue;
            const size_t to = std::min(whole, from + kWordsAtOnce);
            Word word{};
            for (size_t i = from; i < to; i++) {
                std::memcpy(&word, in + i * sizeof word, sizeof word);
                put(out, i, c, word);
            }
            if (to - from == kWordsAtOnce || left == 0) continue;
            word = {};
            std::memcpy(&word, in + whole * sizeof word, left);
            put(out, whole, c, word);
        }
}

// Neighbours in k that lie side by side are one word.
template <class Word>
void pack_words(const Linear& linear, const PanelRows& rows, size_t size, int p) {
    pack_panel<Word>(linear, rows, size, p, [](char* out, size_t i, int c, Word word) {
        reinterpret_cast<Word*>(out)[i * kPanel + c] = word;
    });
}

// Places in a table of floats.
inline void pack_places(const Linear& linear, const PanelRows& rows, int p) {
    pack_panel<uint8_t>(linear, rows, 1, p, [&](char* out, size_t i, int c, uint8_t code) {
        const auto [byte, shift] = linear.low_bits_at(linear.place(static_cast<int>(i), c));
        out[byte] |= static_cast<char>(code << shift);
    });
}

// Integers of less than 8 bits, four at a time, or their places in a table.
template <Type kType>
void pack_bits(const Linear& linear, const PanelRows& rows, int p) {
    constexpr int kLow = low_bits_of(kType), kParts = 8 / kLow;
    constexpr uint32_t kEach = 0x01010101, kLowest = kEach * ((1 << kLow) - 1);
    const uint32_t half = kType == Type::int_places || linear.offsets ? 0 : kEach << (bits_of(kType) - 1);
    uint8_t place_of[256] = {};  // of each integer as a byte
    if (kType == Type::int_places)
        for (int i = 0; i < 16; i++) place_of[static_cast<uint8_t>(static_cast<int8_t>(linear.table[i]))] = static_cast<uint8_t>(i);
    pack_panel<uint32_t>(linear, rows, 1, p, [=, &linear, &place_of](char* out, size_t i, int c, uint32_t four) {
        if (kType == Type::int_places)
            for (int j = 0; j < 32; j += 8) four = (four & ~(255u << j)) | uint32_t(place_of[four >> j & 255]) << j;
        const uint32_t codes = four ^ half;  // of a number from -half on, less that, in the low bits
        reinterpret_cast<uint32_t*>(out)[i / kParts * kPanel + c] |= (codes & kLowest) << i % kParts * kLow;
        char* high = out + linear.high_bits(static_cast<int>(i) * 4) + c / 2;
        for (int plane = 0; plane < planes_of(kType); plane++, high += 8) {
            const uint32_t bits = ((codes >> (kLow + plane) & kEach) * 0x01020408) >> 24 & 15;
            *high |= static_cast<char>(bits << c % 2 * 4);
        }
    });
}

inline void pack_weights(const Linear& linear, const PanelRows& rows, int p) {
    const Type type = linear.type;
    if (type == Type::places) return pack_places(linear, rows, p);
    if (bits_of(type) % 8) return with_bits(type, [&](auto t) { pack_bits<t()>(linear, rows, p); });
    const size_t size = is_integer(type) || is_coded(type) ? 1 : size_of(type);
    switch (size * linear.together()) {
        case 4: return pack_words<uint32_t>(linear, rows, size, p);
        case 2: return pack_words<uint16_t>(linear, rows, size, p);
        default: return pack_words<uint8_t>(linear, rows, size, p);
    }
}

// Numbers as they are, 0 for outputs that are not there; a Word has their size.
template <class Word>
void pack_numbers_of(RunNumbers& numbers, const PanelRows& rows, int p) {
    const int runs = numbers.runs;
    Word* out = reinterpret_cast<Word*>(numbers.data.get()) + static_cast<size_t>(p) * runs * kPanel;
    for (int run = 0; run < runs; run++)
        for (int c = 0; c < kPanel; c++, out++) {
            *out = Word{};
            if (rows[c] != nullptr) std::memcpy(out, rows[c] + run * sizeof(Word), sizeof(Word));
        }
}

inline void pack_numbers(RunNumbers& numbers, const PanelRows& rows, int p) {
    switch (numbers.size()) {
        case 1: return pack_numbers_of<uint8_t>(numbers, rows, p);
        case 2: return pack_numbers_of<uint16_t>(numbers, rows, p);
        default: return pack_numbers_of<uint32_t>(numbers, rows, p);
    }
}

inline void pack_all_numbers(RunNumbers& numbers, const Linear& linear, const void* source) {
    if (source == nullptr) return;
    for (int p = 0; p < linear.panels; p++)
        pack_numbers(numbers, panel_rows(linear, source, numbers.runs * numbers.size(), p), p);
}

// Which numbers there are of a FactorSource.
struct FactorParts {
    bool values, units;

    static FactorParts of(const FactorSource& source) { return {source.values != nullptr, source.units != nullptr}; }
};

inline RunNumbers lay_out_runs(SharedPages& pages, const Linear& linear, bool is_there, int32_t type, int runs) {
    RunNumbers numbers{static_cast<Type>(type), runs, {}};
    if (is_there) numbers.data = pages.allocate<char>(static_cast<size_t>(linear.panels) * runs * kPanel * numbers.size());
    return numbers;
}

inline GroupNumbers lay_out_groups(SharedPages& pages, const Linear& linear, const FactorSource& source, FactorParts parts,
                                   int span) {
    const int groups = linear.groups();
    return {lay_out_runs(pages, linear, parts.values, source.type, groups),
            lay_out_runs(pages, linear, parts.units, source.unit_type, groups / span), span};
}

// The padding of k that a product's steps need.
inline int padded_depth(Form form, int k, int group) {
    if (form == Form::f32) return k;
    if (form == Form::bf16) return round_up(k, 32);
    return group == k ? round_up(k, 64) : k;
}

// A linear with memory for its weights, scales and offsets, and with all else that the source has; null if the kernels have
// no such linear.
inline std::unique_ptr<Linear> lay_out(Team& team, const LinearSource& source, FactorParts scales, FactorParts offsets) {
    const Type type = static_cast<Type>(source.type);
    const bool gated = source.gated != 0;
    const int k = source.k, group = is_integer(type) || is_coded(type) ? source.group : std::max(1, k);
    if (is_integer(type) && (k % std::max(1, group) || (group != k && group % kLeastGroup))) return nullptr;
    if (is_coded(type) && group != k && (group < 1 || group % kUnit)) return nullptr;
    if (is_integer(type) && k > kMostIntegers) return nullptr;
    const int rotation = source.rotation;
    if (rotation && (rotation > kMostRotated || rotation & (rotation - 1) || k % rotation || source.permutation)) return nullptr;
    if (type == Type::int4 && group != k && group > kMostUnpacked) return nullptr;
    const bool in_groups = is_integer(type) && type != Type::int4 && type != Type::int8;
    const bool narrow = in_groups || source.scales.type != 0 || source.offsets.type != 0;
    if (narrow && (group == k || group > kMostUnpacked)) return nullptr;
    if (k / std::max(1, group) % std::max(1, source.span)) return nullptr;
    const Form form = form_for(type, source.is_exact != 0);
    const int n = gated ? source.rows / 2 : source.rows;
    const int panels = divide_up(n, kPanel) * (gated ? 2 : 1);
    auto linear = std::make_unique<Linear>(
        Linear{type, form, n, k, padded_depth(form, k, group), group, divide_up(k, group), gated, panels,
               {}, {}, {}, {}, {}, {}, static_cast<Rounding>(source.rounding), rotation});
    SharedPages& pages = team.pages();
    linear->data = pages.allocate<char>(panels * linear->panel_bytes());
    linear->bias = lay_out_runs(pages, *linear, source.bias != nullptr, static_cast<int32_t>(Type::f32), 1);
    pack_all_numbers(linear->bias, *linear, source.bias);
    linear->scales = lay_out_groups(pages, *linear, source.scales, scales, source.span);
    linear->offsets = lay_out_groups(pages, *linear, source.offsets, offsets, source.span);
    if (source.permutation) {
        linear->permutation = allocate<int32_t>(k);
        std::copy(source.permutation, source.permutation + k, linear->permutation.get());
    }
    if (source.table) {
        linear->table = allocate<float>(16);
        std::copy(source.table, source.table + 16, linear->table.get());
    }
    return linear;
}

inline std::unique_ptr<Linear> pack(Team& team, const LinearSource& source) {
    auto linear = lay_out(team, source, FactorParts::of(source.scales), FactorParts::of(source.offsets));
    if (!linear) return nullptr;
    for (auto [numbers, from] : {std::pair{&linear->scales, &source.scales}, {&linear->offsets, &source.offsets}}) {
        pack_all_numbers(numbers->values, *linear, from->values);
        pack_all_numbers(numbers->units, *linear, from->units);
    }
    if (linear->type == Type::e4m3)
        for (size_t i = 0; i < linear->scales.bytes(linear->panels) / sizeof(float); i++)
            reinterpret_cast<float*>(linear->scales.values.data.get())[i] *= kNumberUnit;
    const size_t size = is_integer(linear->type) || is_coded(linear->type) ? 1 : size_of(linear->type);
    run_chunks(team, static_cast<uint32_t>(linear->panels), [&](uint32_t p, int) {
        const int panel = static_cast<int>(p);
        pack_weights(*linear, panel_rows(*linear, source.weight, linear->k * size, panel), panel);
    });
    return linear;
}

// Writes all source rows, [rows][k] float32.
inline void unpack(Team& team, const Linear& linear, float* out) {
    run_chunks(team, static_cast<uint32_t>(linear.outputs()), [&](uint32_t row, int) {
        linear.unpack_row(static_cast<int>(row), out + static_cast<size_t>(row) * linear.k);
    });
}

}  // namespace penstock
