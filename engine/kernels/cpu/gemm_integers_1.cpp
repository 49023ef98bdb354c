#include "gemm_integers.h"

template void penstock::multiply_by_vectors<1>(const Linear&, int, int, const Activations&, int, float*, size_t);
