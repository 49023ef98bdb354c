"""How the weights of linear maps are stored in checkpoints, and how they are quantized."""
