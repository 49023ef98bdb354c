"""One decoder, and how the checkpoints of four families describe it."""
