"""Errors in the engine's inputs. Each message is one line, fit for the operator's terminal."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be served: it is missing, broken, or of a kind that is not supported."""


class NotEnoughMemory(Exception):
    """Weights, or the smallest useful KV cache, do not fit in the memory that is free."""


class MemoryHeld(NotEnoughMemory):
    """The model would fit if other processes held none of the GPU's memory."""


class InstructionSetError(Exception):
    """The level of the native CPU kernels that was asked for does not exist, or this machine cannot use it."""
