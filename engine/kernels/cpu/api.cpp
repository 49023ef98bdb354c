// The C interface that native.py calls. Nothing is thrown across it: a null pointer or a status says what failed.
#include "decoder.h"
#include "measure.h"
#include "sample.h"

using namespace penstock;

namespace {

template <class Function>
auto guarded(Function function) -> decltype(function()) {
    try {
        return function();
    } catch (...) {
        return {};
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

Team* penstock_team_new(int32_t threads) {
    return guarded([&] { return new Team(threads); });
}

void penstock_team_free(Team* team) {
    if (team->is_whole()) delete team;
}

Linear* penstock_linear_new(Team* team, int32_t type, int32_t rows, int32_t k, int32_t gated, const void* weight,
                            const float* bias) {
    return guarded([&] { return pack(*team, static_cast<Type>(type), rows, k, gated != 0, weight, bias).release(); });
}

void penstock_linear_free(Linear* linear) { delete linear; }

int64_t penstock_linear_bytes(const Linear* linear) { return static_cast<int64_t>(linear->bytes()); }

int32_t penstock_linear_apply(Team* team, const Linear* linear, const float* x, int32_t rows, float* out) {
    if (rows == 0) return kOk;
    const auto done = guarded([&] {
        std::vector<Buffer<float>> sums;
        for (int i = 0; i < team->size(); i++) sums.push_back(allocate<float>(sums_size()));
        const size_t ldx = linear->k, ldo = linear->n;
        const Product job{linear, x, ldx, rows, out, ldo, nullptr, nullptr};
        const Cut by = cut(*linear, rows, team->size());
        run_chunks(*team, by.chunks(),
                   [&](uint32_t chunk, int worker) { multiply(job, by, chunk, sums[worker].get()); });
        return true;
    });
    return done ? kOk : kNoMemory;
}

Decoder* penstock_decoder_new(Team* team, const Model* model) {
    return guarded([&] { return new Decoder(*team, *model); });
}

void penstock_decoder_free(Decoder* decoder) { delete decoder; }

int32_t penstock_decoder_run(Decoder* decoder, const Step* step, float* logits) {
    int status = kNoMemory;
    guarded([&] {
        status = decoder->run(*step, logits);
        return true;
    });
    return status;
}

int32_t penstock_sample(Team* team, const SampleArgs* args) {
    int status = kNoMemory;
    guarded([&] {
        status = sample(*team, *args) ? kOk : kBadToken;
        return true;
    });
    return status;
}

double penstock_measure_fma(Team* team) {
    return guarded([&] { return measure_fma(*team); });
}

double penstock_measure_products(Team* team, const Linear* const* linears, int32_t count, int32_t rows,
                                 int32_t repeats) {
    return guarded([&] { return measure_products(*team, {linears, linears + count}, rows, repeats); });
}
}
#pragma GCC visibility pop
