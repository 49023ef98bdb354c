"""Fixtures of the demo model's tests."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from demo.corpus import texts
from demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of 320 tokens; a module that needs another has its own."""
    return train_tokenizer(texts(1, 40), vocab_size=320)
