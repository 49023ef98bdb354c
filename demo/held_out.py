"""Conversations that the demo model has not learnt from: what it is measured with."""

from __future__ import annotations

from random import Random

from tokenizers import Tokenizer

from demo.corpus import conversation
from demo.tokenizer import encode_conversation

SEED = "held out"  # training seeds are numbers
MAX_TOKENS = 500

Talk = tuple[list[int], list[bool]]
"""The token ids of a conversation, and which of them the assistant says."""


def held_out(tokenizer: Tokenizer, count: int) -> list[Talk]:
    rng = Random(SEED)
    return [encode_conversation(tokenizer, conversation(rng, MAX_TOKENS)) for _ in range(count)]
