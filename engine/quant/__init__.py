"""How checkpoints store the weights of linear maps."""
