"""Reads a checkpoint's description, whether it is a directory as Hugging Face has them or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.config import GenerationDefaults, ModelConfig
from penstock.engine.model import parse
from penstock.engine.model.gguf import config as gguf
from penstock.engine.model.gguf.container import is_gguf
from penstock.engine.model.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from penstock.engine.text.tokenizer import Tokenizer


def read_config(path: Path) -> ModelConfig:
    """The config of a checkpoint.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    return gguf.read_config(path) if is_gguf(path) else parse.read_config(path)


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """Returns the sampling parameters that a checkpoint recommends; all are None if it recommends none.

    Raises:
        CheckpointError: the recommendation is malformed.
    """
    return gguf.read_generation_defaults(path) if is_gguf(path) else parse.read_generation_defaults(path)


def read_tokenizer(path: Path) -> Tokenizer:
    """A checkpoint's tokenizer, with its chat template.

    Raises:
        CheckpointError: names the part that is missing, broken or not supported.
    """
    return read_gguf_tokenizer(path) if is_gguf(path) else Tokenizer.load(path)
