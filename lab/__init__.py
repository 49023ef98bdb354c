"""The laboratory: the making of the demo model, and microbenchmarks. No wheel has it."""
