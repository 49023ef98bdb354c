"""Conversations packed into rows. A batch depends on (seed, step) alone, so a resumed run sees the same ones."""

from collections.abc import Callable
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from app.demo.tokenizer import BOS, END, Message, encode_conversation, encode_text, special_id

Source = Callable[[Random, int], list[Message]]
MISSES_ALLOWED = 30


def batch(tokenizer: Tokenizer, source: Source, rng: Random, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both [rows, length]; a target of -100 is not learnt.

    Every conversation is whole and starts with its own <|bos|>; the rest of a row is padding.
    """
    packed: list[tuple[list[int], list[bool]]] = [([], []) for _ in range(rows)]
    misses = 0
    while misses < MISSES_ALLOWED:
        ids, said = encode(tokenizer, source(rng, length))
        row = next((row for row in packed if len(row[0]) + len(ids) <= length + 1), None)
        if row is None:
            misses += 1
        else:
            row[0].extend(ids)
            row[1].extend(said)
    inputs = torch.zeros(rows, length, dtype=torch.long)
    targets = torch.full((rows, length), -100)
    for number, (ids, said) in enumerate(packed):
        row_ids, learnt = torch.tensor(ids), torch.tensor(said)
        inputs[number, : len(ids) - 1] = row_ids[:-1]
        targets[number, : len(ids) - 1] = row_ids[1:].where(learnt[1:], -100)
    return inputs, targets


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """A conversation, or a plain text: one message of no role, learnt whole."""
    if messages[0][0]:
        return encode_conversation(tokenizer, messages)
    body = encode_text(tokenizer, messages[0][1])
    ids = [special_id(tokenizer, BOS), *body, special_id(tokenizer, END)]
    return ids, [False, *([True] * (len(ids) - 1))]
