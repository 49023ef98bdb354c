"""Storages of the weights of linear maps in checkpoints, and their quantization."""
