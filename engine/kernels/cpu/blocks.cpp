// Reads ggml's blocks into panels in one pass: the integers and factors that engine/quant/storages/gguf.py makes of them,
// which has their layouts, too. The rows of a panel are unpacked into memory of the thread's own, and packed from there.
#include "blocks.h"

#include "pack.h"

namespace penstock {
namespace {

constexpr int kUnitSize = 256;  // inputs that share a unit

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What the blocks of a type hold. With counts, each block has a unit; without, the unit is the scale or the offset itself.
struct BlockFacts {
    int size, num_bytes, group;
    bool has_offset, has_counts;
    Type unit;  // float16 or bfloat16
};

BlockFacts facts_of(BlockType type) {
    switch (type) {
        case BlockType::q8_0: return {32, 34, 32, false, false, Type::f16};
        case BlockType::q4_0: return {32, 18, 32, false, false, Type::f16};
        case BlockType::q4_1: return {32, 20, 32, true, false, Type::f16};
        case BlockType::q5_0: return {32, 22, 32, false, false, Type::f16};
        case BlockType::q5_1: return {32, 24, 32, true, false, Type::f16};
        case BlockType::q2_k: return {256, 84, 16, true, true, Type::f16};
        case BlockType::q3_k: return {256, 110, 16, false, true, Type::f16};
        case BlockType::q4_k: return {256, 144, 32, true, true, Type::f16};
        case BlockType::q5_k: return {256, 176, 32, true, true, Type::f16};
        case BlockType::q6_k: return {256, 210, 16, false, true, Type::f16};
        case BlockType::iq4_nl: return {32, 18, 32, false, false, Type::f16};
        case BlockType::iq4_xs: return {256, 136, 32, false, true, Type::f16};
        case BlockType::mxfp4: return {32, 17, 32, false, false, Type::bf16};
    }
    return {};
}

// Where a block's numbers go: its integers, its counts, one of a group, and the bits of its units.
struct BlockNumbers {
    int8_t* weights;
    int8_t *scales, *offsets;
    uint16_t *scale_unit, *offset_unit;
};

uint16_t half_at(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, sizeof bits);
    return bits;
}

uint16_t negative_half_at(const uint8_t* bytes) { return half_at(bytes) ^ 0x8000; }

// The lower halves of `width` bytes at a time, then the upper ones.
template <int kWidth>
void read_nibbles(const uint8_t* in, int count, int8_t* out) {
    for (int run = 0; run < count; run += kWidth)
        for (int j = 0; j < kWidth; j++) {
            out[2 * run + j] = static_cast<int8_t>(in[run + j] & 15);
            out[2 * run + kWidth + j] = static_cast<int8_t>(in[run + j] >> 4);
        }
}

// Adds the lowest two bits of 32 bytes at a time, then the next, shifted to the left.
void add_quarters(const uint8_t* in, int shift, int8_t* out) {
    for (int run = 0; run < 64; run += 32)
        for (int part = 0; part < 4; part++)
            for (int j = 0; j < 32; j++)
                out[4 * run + 32 * part + j] |= static_cast<int8_t>((in[run + j] >> 2 * part & 3) << shift);
}

// Adds bit i of each of 32 bytes to the integers from 32 i on, shifted to the left.
void add_high_bits(const uint8_t* in, int shift, int8_t* out) {
    for (int part = 0; part < 8; part++)
        for (int j = 0; j < 32; j++) out[32 * part + j] |= static_cast<int8_t>((in[j] >> part & 1) << shift);
}

void add_fifth_bits(const uint8_t* in, int8_t* out) {
    uint32_t bits;
    std::memcpy(&bits, in, sizeof bits);
    for (int j = 0; j < 32; j++) out[j] |= static_cast<int8_t>((bits >> j & 1) << 4);
}

void add(int count, int number, int8_t* out) {
    for (int j = 0; j < count; j++) out[j] = static_cast<int8_t>(out[j] + number);
}

void look_up(const int8_t* table, int count, int8_t* out) {
    for (int j = 0; j < count; j++) out[j] = table[out[j]];
}

// The scales and minima of Q4_K and Q5_K, in 12 bytes.
void read_scales_and_minima(const uint8_t* in, const BlockNumbers& out) {
    for (int j = 0; j < 4; j++) {
        out.scales[j] = static_cast<int8_t>(in[j] & 63);
        out.offsets[j] = static_cast<int8_t>(in[4 + j] & 63);
        out.scales[4 + j] = static_cast<int8_t>((in[8 + j] & 15) | in[j] >> 6 << 4);
        out.offsets[4 + j] = static_cast<int8_t>(in[8 + j] >> 4 | in[4 + j] >> 6 << 4);
    }
}

void read_q2_k(const uint8_t* in, const BlockNumbers& out) {
    std::memset(out.weights, 0, 256);
    add_quarters(in + 16, 0, out.weights);
    for (int j = 0; j < 16; j++) {
        out.scales[j] = static_cast<int8_t>(in[j] & 15);
        out.offsets[j] = static_cast<int8_t>(in[j] >> 4);
    }
    *out.scale_unit = half_at(in + 80);
    *out.offset_unit = negative_half_at(in + 82);
}

void read_q3_k(const uint8_t* in, const BlockNumbers& out) {
    std::memset(out.weights, 0, 256);
    add_quarters(in + 32, 0, out.weights);
    add_high_bits(in, 2, out.weights);
    add(256, -4, out.weights);
    read_nibbles<8>(in + 96, 8, out.scales);
    for (int j = 0; j < 16; j++) out.scales[j] |= static_cast<int8_t>((in[104 + j % 4] >> j / 4 * 2 & 3) << 4);
    add(16, -32, out.scales);
    *out.scale_unit = half_at(in + 108);
}

void read_q4_k(const uint8_t* in, const BlockNumbers& out) {
    read_nibbles<32>(in + 16, 128, out.weights);
    read_scales_and_minima(in + 4, out);
    *out.scale_unit = half_at(in);
    *out.offset_unit = negative_half_at(in + 2);
}

void read_q5_k(const uint8_t* in, const BlockNumbers& out) {
    read_nibbles<32>(in + 48, 128, out.weights);
    add_high_bits(in + 16, 4, out.weights);
    read_scales_and_minima(in + 4, out);
    *out.scale_unit = half_at(in);
    *out.offset_unit = negative_half_at(in + 2);
}

void read_q6_k(const uint8_t* in, const BlockNumbers& out) {
    read_nibbles<64>(in, 128, out.weights);
    add_quarters(in + 128, 4, out.weights);
    add(256, -32, out.weights);
    std::memcpy(out.scales, in + 192, 16);
    *out.scale_unit = half_at(in + 208);
}

void read_iq4_xs(const uint8_t* in, const BlockNumbers& out) {
    read_nibbles<16>(in + 8, 128, out.weights);
    look_up(kIq4, 256, out.weights);
    read_nibbles<1>(in + 4, 4, out.scales);
    for (int j = 0; j < 8; j++) out.scales[j] |= static_cast<int8_t>((in[2 + j / 4] >> j % 4 * 2 & 3) << 4);
    add(8, -32, out.scales);
    *out.scale_unit = half_at(in);
}

// The bits of half of a scale in E8M0 as bfloat16, in which 2^-128 and 2^-127 are denormal; NaN stays one.
uint16_t half_scale(uint8_t e) {
    return static_cast<uint16_t>(e < 2 ? 32 << e : (e == 255 ? 255 : e - 1) << 7);
}

// Those of 32 weights: float16 numbers, maybe 32 fifth bits, and the rest of the bits.
void read_small(BlockType type, const uint8_t* in, const BlockNumbers& out) {
    if (type == BlockType::mxfp4) {
        *out.scale_unit = half_scale(in[0]);
        read_nibbles<16>(in + 1, 16, out.weights);
        return look_up(kDoubled, 32, out.weights);
    }
    *out.scale_unit = half_at(in);
    const uint8_t* rest = in + 2;
    if (type == BlockType::q8_0) return void(std::memcpy(out.weights, rest, 32));
    if (type == BlockType::q4_1 || type == BlockType::q5_1) {
        *out.offset_unit = half_at(rest);
        rest += 2;
    }
    const bool has_fifth = type == BlockType::q5_0 || type == BlockType::q5_1;
    read_nibbles<16>(rest + (has_fifth ? 4 : 0), 16, out.weights);
    if (has_fifth) add_fifth_bits(rest, out.weights);
    if (type == BlockType::q4_0) add(32, -8, out.weights);
    if (type == BlockType::q5_0) add(32, -16, out.weights);
    if (type == BlockType::iq4_nl) look_up(kIq4, 32, out.weights);
}

void read_block(BlockType type, const uint8_t* in, const BlockNumbers& out) {
    switch (type) {
        case BlockType::q2_k: return read_q2_k(in, out);
        case BlockType::q3_k: return read_q3_k(in, out);
        case BlockType::q4_k: return read_q4_k(in, out);
        case BlockType::q5_k: return read_q5_k(in, out);
        case BlockType::q6_k: return read_q6_k(in, out);
        case BlockType::iq4_xs: return read_iq4_xs(in, out);
        default: return read_small(type, in, out);
    }
}

// The numbers of a row as its blocks have them.
struct RowNumbers {
    BlockFacts facts;
    std::vector<int8_t> scales, offsets;            // counts, one of each group
    std::vector<uint16_t> scale_units, offset_units;  // one of each block

    float unit(uint16_t bits) const {
        return facts.unit == Type::bf16 ? to_float(BFloat{bits}) : to_float(Half{bits});
    }

    float number(const std::vector<int8_t>& counts, const std::vector<uint16_t>& units, int group) const {
        if (!facts.has_counts) return unit(units[group]);
        return static_cast<float>(counts[group]) * unit(units[group * facts.group / facts.size]);
    }
    float scale(int group) const { return number(scales, scale_units, group); }
    float offset(int group) const { return number(offsets, offset_units, group); }

    bool is_finite(const std::vector<uint16_t>& units) const {
        const uint16_t exponent = facts.unit == Type::bf16 ? 0x7f80 : 0x7c00;
        return std::none_of(units.begin(), units.end(), [=](uint16_t bits) { return (bits & exponent) == exponent; });
    }

    int fault() const { return (is_finite(scale_units) ? 0 : 1) | (is_finite(offset_units) ? 0 : 2); }

    void read(const BlockRows& part, int row, int k, int8_t* weights) {
        facts = facts_of(part.type);
        const int blocks = k / facts.size, counts = facts.has_counts ? facts.size / facts.group : 0;
        scales.resize(static_cast<size_t>(blocks) * counts);
        offsets.resize(facts.has_offset ? scales.size() : 0);
        scale_units.resize(blocks);
        offset_units.resize(facts.has_offset ? blocks : 0);
        const uint8_t* in = part.rows + static_cast<size_t>(part.order ? part.order[row] : row) * part.row_bytes;
        for (int i = 0; i < blocks; i++, in += facts.num_bytes)
            read_block(part.type, in,
                       {weights + static_cast<size_t>(i) * facts.size, scales.data() + i * counts,
                        offsets.data() + i * counts, scale_units.data() + i, offset_units.data() + i});
        if (part.raised) add(k, part.raised, weights);
    }
};

template <class T>
void put(std::vector<char>& to, size_t row, size_t runs, size_t run, T number) {
    std::memcpy(to.data() + (row * runs + run) * sizeof number, &number, sizeof number);
}

// What a thread unpacks the rows of a panel into, as LinearSource has them.
class PanelNumbers {
   public:
    void read(const BlocksSource& source, const Linear& linear, int panel, std::atomic<int>* faults) {
        const size_t k = linear.k, groups = linear.groups(), rows = kPanel;
        weights_.resize(rows * k);
        scales_.resize(rows * groups * linear.scales.values.size());
        offsets_.resize(linear.offsets ? rows * groups * linear.offsets.values.size() : 0);
        const size_t units = linear.scales.units.runs;
        scale_units_.resize(units ? rows * units * linear.scales.units.size() : 0);
        offset_units_.resize(units && linear.offsets ? rows * units * linear.offsets.units.size() : 0);
        for (int c = 0; c < kPanel; c++) {
            int row = linear.source_row(panel, c), part = 0;
            if (row < 0) continue;
            while (row >= source.parts[part].num_rows) row -= source.parts[part++].num_rows;
            row_.read(source.parts[part], row, linear.k, reinterpret_cast<int8_t*>(weights_.data() + c * k));
            if (const int fault = row_.fault()) faults[part].fetch_or(fault);
            put_factors(linear, source.parts[part], c);
            if (units) put_units(linear, source.parts[part], c);
        }
    }

    void pack(Linear& linear, int panel) const {
        pack_weights(linear, rows_of(linear, panel, weights_, linear.k), panel);
        pack_factors(linear, linear.scales, scales_, scale_units_, panel);
        if (linear.offsets) pack_factors(linear, linear.offsets, offsets_, offset_units_, panel);
    }

   private:
    static PanelRows rows_of(const Linear& linear, int panel, const std::vector<char>& numbers, size_t row_bytes) {
        PanelRows rows{};
        for (int c = 0; c < kPanel; c++)
            if (linear.source_row(panel, c) >= 0) rows[c] = numbers.data() + c * row_bytes;
        return rows;
    }

    static void pack_factors(const Linear& linear, GroupNumbers& to, const std::vector<char>& values,
                             const std::vector<char>& units, int panel) {
        pack_numbers(to.values, rows_of(linear, panel, values, to.values.runs * to.values.size()), panel);
        if (to.units.data) pack_numbers(to.units, rows_of(linear, panel, units, to.units.runs * to.units.size()), panel);
    }

    void put_factors(const Linear& linear, const BlockRows& part, size_t c) {
        const int groups = linear.groups(), repeats = row_.facts.group / linear.group;
        for (int g = 0; g < groups; g++) {
            const int own = g / repeats;
            switch (linear.scales.values.type) {
                case Type::int8: put(scales_, c, groups, g, row_.scales[own]); break;
                case Type::f32: put(scales_, c, groups, g, row_.scale(own)); break;
                default: put(scales_, c, groups, g, row_.scale_units[own]);
            }
            if (!linear.offsets) continue;
            const bool has = row_.facts.has_offset;
            switch (linear.offsets.values.type) {
                case Type::int8: put(offsets_, c, groups, g, (has ? row_.offsets : row_.scales)[own]); break;
                case Type::f32:
                    put(offsets_, c, groups, g, has ? row_.offset(own) : static_cast<float>(-part.raised) * row_.scale(own));
                    break;
                default: put(offsets_, c, groups, g, row_.offset_units[own]);
            }
        }
    }

    void put_units(const Linear& linear, const BlockRows& part, size_t c) {
        const int units = linear.scales.units.runs;
        for (int u = 0; u < units; u++) {
            put_unit(scale_units_, linear.scales.units, c, u, row_.scale_units[u]);
            if (!linear.offsets) continue;
            if (row_.facts.has_offset)
                put_unit(offset_units_, linear.offsets.units, c, u, row_.offset_units[u]);
            else
                put(offset_units_, c, units, u, static_cast<float>(-part.raised) * row_.unit(row_.scale_units[u]));
        }
    }

    void put_unit(std::vector<char>& to, const RunNumbers& numbers, size_t c, int u, uint16_t bits) const {
        if (numbers.type == Type::f32) return put(to, c, numbers.runs, u, row_.unit(bits));
        put(to, c, numbers.runs, u, bits);
    }

    RowNumbers row_;
    std::vector<char> weights_, scales_, offsets_, scale_units_, offset_units_;
};

bool fits(const BlocksSource& source) {
    int rows = 0;
    if (source.linear->group < 1) return false;
    for (int i = 0; i < source.num_parts; i++) {
        const BlockRows& part = source.parts[i];
        const BlockFacts facts = facts_of(part.type);
        if (source.linear->k % facts.size || facts.group % source.linear->group) return false;
        rows += part.num_rows;
    }
    return rows == source.linear->rows;
}

}  // namespace

std::unique_ptr<Linear> pack_blocks(Team& team, const BlocksSource& source) {
    const LinearSource& own = *source.linear;
    if (!fits(source)) return nullptr;
    const bool has_units = static_cast<Type>(own.scales.type) == Type::int8;
    auto linear = lay_out(team, own, {true, has_units}, {source.has_offset != 0, has_units && source.has_offset});
    if (!linear) return nullptr;
    std::vector<PanelNumbers> numbers(team.size());
    std::vector<std::atomic<int>> faults(source.num_parts);
    run_chunks(team, static_cast<uint32_t>(linear->panels), [&](uint32_t panel, int worker) {
        numbers[worker].read(source, *linear, static_cast<int>(panel), faults.data());
        numbers[worker].pack(*linear, static_cast<int>(panel));
    });
    for (int i = 0; i < source.num_parts; i++) source.parts[i].fault = faults[i];
    const bool is_sound = std::all_of(faults.begin(), faults.end(), [](const auto& fault) { return fault == 0; });
    return is_sound ? std::move(linear) : nullptr;
}

}  // namespace penstock
