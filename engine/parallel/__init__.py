"""A model on several ranks, each a process with a part of every layer, or of some layers; see docs/internals/parallel.md."""
