#include "attention.h"

template penstock::Attention penstock::attention_of<penstock::Int4Pair>();
