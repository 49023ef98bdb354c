"""Conversations packed into rows. A batch depends on (seed, step) alone, so a resumed run sees the same ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.tokenizer import BOS, END, Message, encode_conversation, encode_text, special_id

Source = Callable[[Random, int], list[Message]]
MISSES_ALLOWED = 30


@dataclass(frozen=True)
class Batch:
    """All [rows, length]. A target of -100 is not learnt; `talks` numbers the conversations of a row."""

    inputs: Tensor
    targets: Tensor
    talks: Tensor

    def split(self, rows: int) -> Iterator["Batch"]:
        parts = (torch.split(tensor, rows) for tensor in (self.inputs, self.targets, self.talks))
        return (Batch(*tensors) for tensors in zip(*parts, strict=True))

    def to(self, device: str) -> "Batch":
        return Batch(self.inputs.to(device), self.targets.to(device), self.talks.to(device))


def batch(tokenizer: Tokenizer, source: Source, rng: Random, rows: int, length: int) -> Batch:
    """Every conversation is whole and starts with its own <|bos|>; the rest of a row is padding."""
    bos = special_id(tokenizer, BOS)
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
    return Batch(inputs, targets, (inputs == bos).cumsum(1))


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """A conversation, or a plain text: one message of no role, learnt whole."""
    if messages[0][0]:
        return encode_conversation(tokenizer, messages)
    body = encode_text(tokenizer, messages[0][1])
    ids = [special_id(tokenizer, BOS), *body, special_id(tokenizer, END)]
    return ids, [False, *([True] * (len(ids) - 1))]
