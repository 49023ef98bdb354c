"""Fixtures of the demo model's tests: a small tokenizer, and one thread for small tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from lab.demo.corpus import texts
from lab.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as these are only slowed down by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of 320 tokens; a module that needs another has its own."""
    return train_tokenizer(texts(1, 40), vocab_size=320)
