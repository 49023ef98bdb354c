"""The ways in which safetensors checkpoints store quantized linear maps: a module for each `quant_method`."""
