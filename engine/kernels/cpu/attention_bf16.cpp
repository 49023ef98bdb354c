#include "attention.h"

template penstock::Attention penstock::attention_of<penstock::BFloat>();
template penstock::Attention penstock::latents_of<penstock::BFloat>();
