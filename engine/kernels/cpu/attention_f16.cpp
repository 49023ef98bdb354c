#include "attention.h"

template penstock::Attention penstock::attention_of<penstock::Half>();
template penstock::Attention penstock::latents_of<penstock::Half>();
