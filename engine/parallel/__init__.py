"""A model on several ranks, each a process with a part of every layer; see docs/internals/parallel.md."""
