#include "attention.h"

template penstock::Attention penstock::attention_of<float>();
template penstock::Attention penstock::latents_of<float>();
