// What the machine can do: the ceilings that `penstock bench` prints beside what the decoder does.
#pragma once

#include "gemm_tiles.h"
#include "linear.h"

namespace penstock {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- the rate that each product instruction reaches alone -------------------------------------------------------

// measures.py has the names in the same order.
enum class Instruction : int32_t { fma8, fma16, pairs_bf16, vnni, tile_bf16, tile_int8, bytes8 };

// `rounds` turns of loops whose operands are in registers, of tiles in the first-level cache; each returns how many
// multiplications and additions that was. The products go into `kChains` sums, which hides the latency.
constexpr int kChains = 12;

inline double run_fma8(int rounds, float* sink) {
    typedef std::conditional_t<kWide == 4, wide, v8> V;
    V sums[kChains];
    unrolled<kChains>(PENSTOCK_EACH(i) { sums[i] = all<V>(1.0f + i); });
    V factor = all<V>(0.999f), term = all<V>(1e-3f);
    for (int round = 0; round < rounds; round++) {
        unrolled<kChains>(PENSTOCK_EACH(i) { sums[i] = fma(sums[i], factor, term); });
#if PENSTOCK_AVX2
        asm volatile("" : "+x"(factor), "+x"(term));  // or the compiler works it out beforehand
#endif
    }
    V total{};
    unrolled<kChains>(PENSTOCK_EACH(i) { total += sums[i]; });
    *sink = total[0];
    return 2.0 * sizeof(V) / sizeof(float) * kChains * rounds;
}

// Loops of an instruction that adds `operations` of them to a sum; add(sum, operand) is the instruction.
template <class V, class Add>
double run_chains(int rounds, V operand, int operations, const Add& add) {
    V sums[kChains];
    unrolled<kChains>(PENSTOCK_EACH(i) { sums[i] = operand; });
    for (int round = 0; round < rounds; round++) unrolled<kChains>(PENSTOCK_EACH(i) { add(sums[i], operand); });
    return static_cast<double>(operations) * kChains * rounds;
}

#define PENSTOCK_ADD(instruction, constraint)                                          \
    [](auto& sum, const auto& x) __attribute__((always_inline)) {                      \
        asm volatile(instruction " %1, %1, %0" : "+" constraint(sum) : constraint(x)); \
    }

#if PENSTOCK_AVX2
// The four instructions that AVX2 alone takes for 32 products of int8: see add_magnitudes.
inline double run_bytes8(int rounds, float*) {
    const __m256i one = _mm256_set1_epi16(1);
    return run_chains(rounds, _mm256_set1_epi8(1), 2 * 32, [&](auto& sum, const auto& x) __attribute__((always_inline)) {
        __m256i pairs;
        asm volatile("vpxor %2, %2, %1; vpmaddubsw %1, %2, %1; vpmaddwd %3, %1, %1; vpaddd %1, %0, %0"
                     : "+x"(sum), "=&x"(pairs)
                     : "x"(x), "x"(one));
    });
}
#endif

#if defined(__AVX512F__)
inline double run_fma16(int rounds, float*) {
    return run_chains(rounds, _mm512_set1_ps(0.5f), 2 * 16, PENSTOCK_ADD("vfmadd231ps", "v"));
}
#endif

#if defined(__AVX512BF16__)
inline double run_pairs(int rounds, float*) {
    return run_chains(rounds, _mm512_set1_ps(0.5f), 2 * 32, PENSTOCK_ADD("vdpbf16ps", "v"));
}
#endif

#if PENSTOCK_VNNI
inline double run_vnni(int rounds, float*) {
    const wide_int operand = wide_int{} + 0x01010101;
#if PENSTOCK_AVX512
    return run_chains(rounds, operand, 2 * sizeof operand, PENSTOCK_ADD("vpdpbusd", "v"));
#else
    return run_chains(rounds, operand, 2 * sizeof operand, PENSTOCK_ADD("%{vex%} vpdpbusd", "x"));
#endif
}
#endif

#if PENSTOCK_AMX
// A turn loads two tiles of rows and two of weights, and multiplies each with each.
template <bool IsInt8>
double run_tiles(int rounds, float*) {
    constexpr size_t kTile = kTileHeight * kTileBytes, kTurn = 4 * kTile, kTurns = 8;
    const auto data = allocate<char>(kTurns * kTurn);
    std::memset(data.get(), 0x3c, kTurns * kTurn);
    use_tiles(kWholeTiles);
    for (int turn = 0; turn < rounds; turn++) {
        const char* from = data.get() + turn % kTurns * kTurn;
        unrolled<4>(PENSTOCK_EACH(i) { tile_load<4 + i>(from + i * kTile, kTileBytes); });
        unrolled<4>(PENSTOCK_EACH(i) { tile_dot<IsInt8, i, 4 + i / 2, 6 + i % 2>(); });
    }
    return 4 * 2.0 * 16 * 16 * (IsInt8 ? 64 : 32) * rounds;
}
#endif

using RunProducts = double (*)(int rounds, float* sink);

struct Loop {
    RunProducts run;  // null where the library was not built for the instruction
    int rounds;       // less than a millisecond: seldom cut by another process
};

inline Loop loop_of(Instruction instruction) {
    switch (instruction) {
        case Instruction::fma8: return {run_fma8, 200'000};
#if defined(__AVX512F__)
        case Instruction::fma16: return {run_fma16, 200'000};
#endif
#if defined(__AVX512BF16__)
        case Instruction::pairs_bf16: return {run_pairs, 100'000};
#endif
#if PENSTOCK_VNNI
        case Instruction::vnni: return {run_vnni, 200'000};
#endif
#if PENSTOCK_AMX
        case Instruction::tile_bf16: return {run_tiles<false>, 10'000};
        case Instruction::tile_int8: return {run_tiles<true>, 10'000};
#endif
#if PENSTOCK_AVX2
        case Instruction::bytes8: return {run_bytes8, 100'000};
#endif
        default: return {nullptr, 0};
    }
}

// Billions of multiplications and additions a second of all threads together, the best of many short runs; 0 where
// there is no such instruction.
inline double measure_peak(Team& team, Instruction instruction) {
    const Loop loop = loop_of(instruction);
    if (loop.run == nullptr) return 0.0;
    std::vector<float> sinks(team.size() * 64);
    const uint32_t chunks = static_cast<uint32_t>(team.size() * 2);
    std::vector<double> operations(chunks * 8);
    double best = 0.0;
    for (int repeat = 0; repeat < 200; repeat++) {
        const double start = now();
        run_chunks(team, chunks, [&](uint32_t chunk, int worker) {
            operations[chunk * 8] = loop.run(loop.rounds, &sinks[worker * 64]);
        });
        best = std::max(best, operations[0] * chunks / (now() - start) / 1e9);
    }
    return best;
}

// Seconds per product, the best of `repeats` passes over the linears (several, so that they come from memory).
inline double measure_products(Team& team, const std::vector<const Linear*>& linears, int rows, int repeats) {
    struct Job {
        Product product;
        Cut cut;
        Team* team;
    };
    const size_t k = linears[0]->k, n = linears[0]->n;
    std::vector<float> row(k, 0.5f), out(rows * (n + 16));
    Prepared x;
    x.reserve(rows, linears[0]->depth);
    for (int r = 0; r < rows; r++) x.convert(*linears[0], r, row.data());
    std::vector<Job> jobs;
    std::vector<Phase> phases;
    for (const Linear* linear : linears) {
        const Cut by = cut(*linear, rows, team.size());
        const auto run = [](void* all, uint32_t index, uint32_t chunk, int worker) {
            const Job& job = static_cast<Job*>(all)[index];
            multiply(job.product, job.cut, chunk, job.team->scratch(worker));
        };
        phases.push_back({run, static_cast<uint32_t>(jobs.size()), by.chunks()});
        jobs.push_back({{linear, x.activations(*linear), rows, out.data(), n + 16, Form::f32, nullptr, nullptr}, by, &team});
    }
    for (size_t i = 0; i + 1 < jobs.size(); i++) jobs[i].product.next = linears[i + 1];
    double best = 1e30;
    for (int repeat = 0; repeat < repeats; repeat++) {
        const double start = now();
        team.run(jobs.data(), phases.data(), phases.size());
        best = std::min(best, (now() - start) / static_cast<double>(linears.size()));
    }
    return best;
}

// Seconds in which the team reads n numbers from each of the rows once, a row for a chunk; the best of `repeats`.
inline double measure_reading(Team& team, const float* x, int64_t n, int32_t rows, int32_t repeats) {
    std::vector<float> sink(static_cast<size_t>(rows) * 16);
    double best = 1e30;
    for (int repeat = 0; repeat < repeats; repeat++) {
        const double start = now();
        run_chunks(team, static_cast<uint32_t>(rows), [&](uint32_t row, int) {
            v8 most[4] = {};
            const float* from = x + row * n;
            for (int64_t i = 0; i + 4 * kLanes <= n; i += 4 * kLanes)
                unrolled<4>(PENSTOCK_EACH(j) { most[j] = max(most[j], load(from + i + j * kLanes)); });
            sink[row * 16] = max(max(max(most[0], most[1]), max(most[2], most[3])));
        });
        best = std::min(best, now() - start);
    }
    return best;
}

}  // namespace penstock
