#include "simd.h"

#if PENSTOCK_AVX512 && PENSTOCK_VNNI
#include "gemm_integers.h"

template void penstock::multiply_by_vectors<4>(const Linear&, int, int, const Activations&, int, float*, size_t);
#endif
