// The outputs that sums become.
#pragma once

#include "linear.h"

namespace penstock {

// f(min(x, limit)); NaN stays as it is.
PENSTOCK_INLINE wide bent(const Bend& by, wide x) {
    const wide limit = all<wide>(by.limit), y = x > limit ? limit : x;
    if (by.f == Gate::gelu || by.f == Gate::gelu_erf) return activated(by.f, y);
    if (by.f == Gate::relu2) return y < wide{} ? wide{} : y * y;
    return y * sigmoid(y * all<wide>(by.alpha));
}

PENSTOCK_INLINE wide lifted(const Bend& by, wide up) {
    const wide limit = all<wide>(by.limit), below = up > limit ? limit : up;
    return (below < -limit ? -limit : below) + all<wide>(by.shift);
}

// Some rows of sums, and the outputs that they become: times scales, plus bias, through the activation, plus residual.
template <class Sum>
struct Outputs {
    const Sum* sums;  // [panels][by_panel / 16][16]
    size_t by_panel;
    const float* panel_scales;  // [panels][16], or null
    const float* row_scales;    // of int8 rows, or null
    const float* bias;          // [panels][16], or null
    char* out;
    const char* residual;  // or null
    size_t stride;         // bytes between rows of out, and of the residual
    int columns;           // from the first to the last that there is
    Gate gate;
    float scale, softcap;
    const Bend* bend;
};

template <class Sum>
Outputs<Sum> outputs_of(const Product& job, int panel, int row, const Sum* sums, size_t by_panel) {
    const Linear& linear = *job.linear;
    const int column = (linear.gated ? panel / 2 : panel) * kPanel;
    const size_t size = size_of(job.out_form), place = static_cast<size_t>(row) * job.ldo + column;
    const bool is_scaled = std::is_same_v<Sum, int32_t> || linear.scales_sums();
    return {sums,
            by_panel,
            is_scaled ? linear.panel_scales(panel) : nullptr,
            job.x.form == Form::int8 ? job.x.scales + row : nullptr,
            linear.bias.data ? linear.bias.at<float>(panel, 0) : nullptr,
            static_cast<char*>(job.out) + place * size,
            job.residual ? reinterpret_cast<const char*>(job.residual + place) : nullptr,
            job.ldo * size,
            linear.n - column,
            job.gate,
            job.scale,
            job.softcap,
            job.gate == Gate::relu2 ? &kSquaredRelu : job.bend};
}

PENSTOCK_INLINE void store_as(float* out, wide y) { store(out, y); }
PENSTOCK_INLINE void store_as(BFloat* out, wide y) { store_operands(out, y); }
PENSTOCK_INLINE void store_as(float* out, float y) { *out = y; }
PENSTOCK_INLINE void store_as(BFloat* out, float y) { *out = tile_operand(y); }

// Writes the first `count` of y plus the residual.
template <class Out>
PENSTOCK_INLINE void put(Out* out, const float* residual, wide y, int count) {
    if (count >= kWide) return store_as(out, residual ? y + load_as<wide>(residual) : y);
    for (int i = 0; i < count; i++) store_as(out + i, residual ? residual[i] + y[i] : y[i]);
}

// Rows [from, end) of a panel, or of a gated linear's two that belong together.
template <class Sum, bool kGated, class Out>
void finish_panel(const Outputs<Sum>& to, int panel, int from, int end) {
    const float scale = to.scale, softcap = to.softcap;  // here, where no store can change them
    const Gate gate = to.gate;
    const bool is_plain = scale == 1.0f && softcap == 0.0f;
    for (int j = 0; j < kPanel; j += kWide) {
        const int column = (kGated ? panel / 2 : panel) * kPanel + j, count = to.columns - column;
        if (count <= 0) return;
        const size_t factor = static_cast<size_t>(panel) * kPanel + j;
        for (int r = from; r < end; r++) {
            const auto output = [&](int q) __attribute__((always_inline)) {
                const Sum* sums = to.sums + (panel + q) * to.by_panel + r * kPanel + j;
                wide y;
                if constexpr (std::is_same_v<Sum, int32_t>) {
                    wide_int exact;
                    std::memcpy(&exact, sums, sizeof exact);
                    y = __builtin_convertvector(exact, wide);
                } else {
                    y = load_as<wide>(sums);
                }
                if (to.panel_scales) y = y * load_as<wide>(to.panel_scales + factor + q * kPanel);
                if (to.row_scales) y = y * all<wide>(to.row_scales[r]);
                if (to.bias) y = y + load_as<wide>(to.bias + factor + q * kPanel);
                return y;
            };
            wide y = output(0);
            if (to.bend)
                y = kGated ? bent(*to.bend, y) * lifted(*to.bend, output(kGated)) : bent(*to.bend, y);
            else if constexpr (kGated)
                y = activated(gate, y) * output(1);
            if (!is_plain) {
                y = y * all<wide>(scale);
                if (softcap > 0.0f) y = all<wide>(softcap) * tanh(y / all<wide>(softcap));
            }
            const char* residual = to.residual ? to.residual + r * to.stride : nullptr;
            put(reinterpret_cast<Out*>(to.out + r * to.stride) + column,
                residual ? reinterpret_cast<const float*>(residual) + column : nullptr, y, count);
        }
    }
}

template <class Sum>
using FinishPanel = void (*)(const Outputs<Sum>&, int panel, int from, int end);

template <class Sum>
FinishPanel<Sum> finish_of(const Product& job) {
    if (job.out_form == Form::bf16)
        return job.linear->gated ? finish_panel<Sum, true, BFloat> : finish_panel<Sum, false, BFloat>;
    return job.linear->gated ? finish_panel<Sum, true, float> : finish_panel<Sum, false, float>;
}

constexpr int kRowsAhead = 12;

// The lines of outputs that will be written lie in the other core's cache, often, and writes wait for one another.
template <class Sum>
PENSTOCK_INLINE void fetch_outputs(const Outputs<Sum>& to, size_t column, int from, int end) {
    for (int r = from; r < end; r++) __builtin_prefetch(to.out + r * to.stride + column, 1);
}

}  // namespace penstock
