// What the machine can do: the ceilings that `penstock bench` prints beside what the decoder does.
#pragma once

#include "product.h"

namespace penstock {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Flop of `rounds` turns of twelve independent chains that never leave the registers.
inline double multiply_add(int rounds, float* sink) {
    v8 sums[12];
    unrolled<12>(PENSTOCK_EACH(i) { sums[i] = splat(1.0f + i); });
    v8 factor = splat(0.999f), term = splat(1e-3f);
    for (int round = 0; round < rounds; round++) {
        unrolled<12>(PENSTOCK_EACH(i) { sums[i] = fma(sums[i], factor, term); });
#if PENSTOCK_AVX2
        asm volatile("" : "+x"(factor), "+x"(term));  // or the compiler works it out beforehand
#endif
    }
    v8 total = splat(0.0f);
    unrolled<12>(PENSTOCK_EACH(i) { total += sums[i]; });
    *sink = sum(total);
    return 2.0 * kLanes * 12 * rounds;
}

// GFLOP/s of all threads together, the best of a few short runs.
inline double measure_fma(Team& team) {
    constexpr int kRounds = 2'000'000;
    std::vector<float> sink(team.size() * 64);
    double best = 0.0;
    for (int repeat = 0; repeat < 20; repeat++) {
        const double start = now();
        run_chunks(team, static_cast<uint32_t>(team.size() * 2),
                   [&](uint32_t, int worker) { multiply_add(kRounds, &sink[worker * 64]); });
        best = std::max(best, 2.0 * kLanes * 12 * kRounds * team.size() * 2 / (now() - start) / 1e9);
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
        jobs.push_back({{linear, x.activations(linear->form), rows, out.data(), n + 16, Form::f32, nullptr, nullptr}, by, &team});
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
