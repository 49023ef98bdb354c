// The products of weights of each kind: every one is a unit of its own, gemm_*.cpp.
#pragma once

#include "gemm_tiles.h"

namespace penstock {

// sums [panels][rows][16] = rows times the panels of floating-point weights; the panels at `ahead` come next.
void multiply_floats(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums,
                     const void* ahead);

// sums [panels][rows, padded to tiles][16] = rows of int8 times the panels.
void multiply_integers(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums);

// sums [panels][by_panel / 16][16] = rows times the panels, whose weights are decoded.
void multiply_coded(const Linear& linear, int panel, int panels, const Activations& x, int rows, float* sums, size_t by_panel);

}  // namespace penstock
