"""A model on several ranks, each a process with a part of its layers; see docs/internals/parallel.md."""
