// The C interface that library.py declares. Nothing is thrown across it: a null pointer or a status says what failed.
#include "blocks.h"
#include "decoder.h"
#include "drafts.h"
#include "inputs.h"
#include "likely.h"
#include "measure.h"
#include "pack.h"
#include "rounding.h"
#include "sample.h"
#include "steps.h"

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

// The status that a function returns, or kNoMemory if it throws.
template <class Function>
int32_t status_of(Function function) {
    int32_t status = kNoMemory;
    guarded([&] { return status = function(); });
    return status;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The sizes of the structures that Python fills in, in the order of structs.py, and 0.
const int32_t* penstock_sizes() {
    static const int32_t sizes[] = {
        sizeof(Shape), sizeof(Router), sizeof(Bend), sizeof(Experts), sizeof(Mixer), sizeof(Op), sizeof(Model), sizeof(Step),
        sizeof(FactorSource), sizeof(LinearSource), sizeof(BlockRows), sizeof(BlocksSource), sizeof(GatherArgs),
        sizeof(ChooseArgs), sizeof(LikelyArgs), sizeof(StepTables), sizeof(TableStep), 0};
    return sizes;
}

Team* penstock_team_new(int32_t threads) {
    return guarded([&] { return new Team(threads, kSumsBytes); });
}

void penstock_team_free(Team* team) {
    if (team->is_whole()) delete team;
}

void penstock_team_time(Team* team, int32_t on) { team->time(on != 0); }

void penstock_team_times(Team* team, KindTime* out) { team->times(out); }

Linear* penstock_linear_new(Team* team, const LinearSource* source) {
    return guarded([&] { return pack(*team, *source).release(); });
}

Linear* penstock_linear_of_blocks(Team* team, const BlocksSource* source) {
    return guarded([&] { return pack_blocks(*team, *source).release(); });
}

void penstock_linear_free(Linear* linear) { delete linear; }

void penstock_linear_cap(Linear* linear, float scale, float softcap) {
    linear->scale = scale;
    linear->softcap = softcap;
}

int64_t penstock_linear_bytes(const Linear* linear) { return static_cast<int64_t>(linear->bytes()); }

int32_t penstock_linear_form(const Linear* linear) { return static_cast<int32_t>(linear->form); }

void penstock_linear_unpack(Team* team, const Linear* linear, float* out) { unpack(*team, *linear, out); }

int32_t penstock_linear_apply(Team* team, const Linear* linear, const float* x, int64_t ldx, int32_t rows, float* out) {
    return status_of([&] {
        if (rows > 0) apply(*team, *linear, x, static_cast<size_t>(ldx), rows, out);
        return kOk;
    });
}

Decoder* penstock_decoder_new(Team* team, const Model* model) {
    return guarded([&] { return new Decoder(*team, *model); });
}

void penstock_decoder_set_program(Decoder* decoder, const Op* ops, int32_t num_ops) {
    decoder->set_program(ops, num_ops);
}

void penstock_decoder_free(Decoder* decoder) { delete decoder; }

int32_t penstock_decoder_run(Decoder* decoder, const Step* step, float* out) {
    return status_of([&] { return decoder->run(*step, out); });
}

void penstock_decoder_take_touched(Decoder* decoder, int64_t* out) { decoder->experts().take_touched(out); }

void penstock_decoder_take_rows(Decoder* decoder, int64_t* out) { decoder->experts().take_rows(out); }

int32_t penstock_run_experts(Team* team, const Experts* experts, const float* x, int32_t rows, const int32_t* ids,
                             const float* weights, float* out) {
    return status_of([&] {
        if (rows > 0) run_experts(*team, *experts, x, rows, ids, weights, out);
        return kOk;
    });
}

int32_t penstock_route(const Router* router, const float* logits, int32_t rows, int32_t* ids, float* weights) {
    return status_of([&] {
        Routing routing;
        for (size_t r = 0; r < static_cast<size_t>(rows); r++)
            routing.route(*router, logits + r * router->experts, ids + r * router->top_k, weights + r * router->top_k);
        return kOk;
    });
}

Chooser* penstock_chooser_new(Team* team) {
    return guarded([&] { return new Chooser(*team); });
}

void penstock_chooser_free(Chooser* chooser) { delete chooser; }

int32_t penstock_choose(Chooser* chooser, const ChooseArgs* args) {
    return status_of([&] { return chooser->choose(*args) ? kOk : kBadSeat; });
}

int32_t penstock_likely(Team* team, const LikelyArgs* args) {
    return status_of([&] {
        Likely(*team, *args).run();
        return kOk;
    });
}

Drafts* penstock_drafts_new(Team* team, Decoder* decoder, const Linear* head, Chooser* chooser,
                            const StepTables* tables) {
    return guarded([&] { return new Drafts(*team, *decoder, *head, *chooser, *tables); });
}

void penstock_drafts_free(Drafts* drafts) { delete drafts; }

int32_t penstock_drafts_run(Drafts* drafts, const TableStep* first, const int32_t* counts, int32_t num,
                            int32_t* token_ids) {
    return status_of([&] { return drafts->run(*first, counts, num, token_ids); });
}

StepQueue* penstock_steps_new(Team* team, Decoder* decoder, const Linear* head, Chooser* chooser,
                              const StepTables* tables) {
    return guarded([&] { return new StepQueue(*team, *decoder, *head, *chooser, *tables); });
}

void penstock_steps_free(StepQueue* steps) {
    if (steps->is_whole()) delete steps;
}

int64_t penstock_steps_put(StepQueue* steps, const TableStep* step) {
    return guarded([&] { return steps->put(*step); });
}

int32_t penstock_steps_run(StepQueue* steps, const TableStep* step, int32_t* token_ids) {
    return status_of([&] { return steps->run(*step, token_ids); });
}

int32_t penstock_steps_wait(StepQueue* steps, int64_t number, int32_t* token_ids) {
    return steps->wait(number, token_ids);
}

void penstock_steps_drain(StepQueue* steps) { steps->drain(); }

void penstock_round_with_offsets(const float* x, const float* importance, int64_t rows, int64_t groups, int32_t n,
                                 int32_t bits, int8_t* out, uint16_t* scales, uint16_t* offsets) {
    round_with_offsets(x, importance, rows, groups, n, bits, out, scales, offsets);
}

void penstock_round_to_largest(const float* x, int64_t groups, int64_t n, int32_t rotation, int8_t* out, float* scales) {
    round_to_largest(x, groups, n, rotation, out, scales);
}

int32_t penstock_gather(const GatherArgs* args) { return gather(*args); }

double penstock_measure_peak(Team* team, int32_t instruction) {
    return guarded([&] { return measure_peak(*team, static_cast<Instruction>(instruction)); });
}

double penstock_measure_reading(Team* team, const float* x, int64_t n, int32_t rows, int32_t repeats) {
    return guarded([&] { return measure_reading(*team, x, n, rows, repeats); });
}

double penstock_measure_products(Team* team, const Linear* const* linears, int32_t count, int32_t rows,
                                 int32_t repeats) {
    return guarded([&] { return measure_products(*team, {linears, linears + count}, rows, repeats); });
}
}
#pragma GCC visibility pop
