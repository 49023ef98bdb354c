#include "attention.h"

template penstock::Attention penstock::attention_of<penstock::Int8>();
template penstock::Attention penstock::latents_of<penstock::Int8>();
