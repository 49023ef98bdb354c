"""Watermarks in the sampler: the tokens that the detector calls green get delta more, whoever chooses."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.request import Sequence
from penstock.engine.sampling import marks, reference
from penstock.engine.sampling.marks import Marks
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import Choose
from penstock.engine.text.watermark import Watermark
from tests.engine.sampling.cases import CPU, VOCAB, holding, make_logits, make_sequence, sample

NUM = 24
MARKS = st.builds(
    Watermark,
    key=st.integers(0, 2**64 - 1),
    gamma=st.sampled_from([1e-12, 0.1, 0.25, 0.5, 0.9, 1 - 1e-12]),
    delta=st.sampled_from([0.5, 2.0, 30.0]),
)
FIELDS: list[dict[str, Any]] = [
    {"watermark": Watermark(key=7)},
    {"watermark": Watermark(key=2**64 - 1, gamma=0.25, delta=5.0), "temperature": 0.0},
    {},
    {"watermark": Watermark(key=2**63, delta=1.0), "typical_p": 0.7, "top_k": 20},
    {"watermark": Watermark(key=9), "top_p": 0.6, "repetition_penalty": 1.3, "logit_bias": {5: -100.0}},
    {"top_a": 0.3},
]


def by_definition(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """The logits with what the detector's rule adds."""
    rows = logits.clone()
    for row, sequence in zip(rows, sequences, strict=True):
        mark = sequence.request.sampling.watermark
        for token_id in range(VOCAB if mark else 0):
            assert mark is not None
            row[token_id] += mark.delta * mark.is_green(sequence.token_ids[-1], token_id)
    return rows


def sequences_of(num: int = NUM) -> list[Sequence]:
    return [
        make_sequence({**FIELDS[i % len(FIELDS)], "seed": i}, [i % 5], [i % VOCAB] * (i % 3))
        for i in range(num)
    ]


def sample_marked(sampler: Sampler, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    seats = torch.arange(len(sequences), dtype=torch.int32)
    numbers = torch.tensor([one.num_output_tokens for one in sequences], dtype=torch.int32)
    previous = torch.tensor([one.token_ids[-1] for one in sequences], dtype=torch.int32)
    return sampler.sample(
        logits, seats, numbers, sampler.filters(range(len(sequences))), None, previous
    ).tolist()


@given(st.lists(st.tuples(MARKS, st.integers(0, 2**31 - 1)), min_size=1, max_size=5), st.integers(1, 300))
def test_green_tokens_are_the_detectors(rows: list[tuple[Watermark, int]], vocab: int) -> None:
    of_seats = Marks(len(rows), CPU)
    for seat, (mark, _) in enumerate(rows):
        assert of_seats.assign(seat, mark)
    logits = torch.linspace(-3, 3, vocab).to(torch.float16).repeat(len(rows), 1)
    before = logits.clone()
    previous = torch.tensor([token_id for _, token_id in rows], dtype=torch.int32)
    found = of_seats.marked(logits, torch.arange(len(rows), dtype=torch.int32), previous)
    for row, (mark, token_id) in enumerate(rows):
        added = [mark.delta * mark.is_green(token_id, i) for i in range(vocab)]
        assert torch.equal(found[row], before[row].float() + torch.tensor(added))
    assert torch.equal(logits, before)


def test_every_implementation_chooses_the_same(choose: Choose) -> None:
    """As if the logits had come so, alone and beside others."""
    sequences, logits = sequences_of(), make_logits(NUM, 4)
    without = [
        make_sequence(
            {**FIELDS[i % len(FIELDS)], "watermark": None, "seed": i}, [i % 5], [i % VOCAB] * (i % 3)
        )
        for i in range(NUM)
    ]
    expected = sample(holding(without), by_definition(logits, sequences), dict(enumerate(without)))
    assert expected != sample(holding(without), logits, dict(enumerate(without)))
    for one in (reference.choose, choose):
        assert sample_marked(holding(sequences, choose=one), logits, sequences) == expected
        alone = [
            sample_marked(holding([sequence], choose=one), logits[i : i + 1], [sequence])[0]
            for i, sequence in enumerate(sequences)
        ]
        assert alone == expected


def test_rows_are_hashed_in_parts(monkeypatch: Any) -> None:
    sequences, logits = sequences_of(), make_logits(NUM, 5)
    expected = sample_marked(holding(sequences), logits, sequences)
    monkeypatch.setitem(marks._AT_ONCE, "cpu", 7 * VOCAB)
    assert sample_marked(holding(sequences), logits, sequences) == expected


def test_the_next_sequence_of_a_seat_has_no_mark_left() -> None:
    plain = [make_sequence({"seed": i}, [1]) for i in range(NUM)]
    sampler, logits = holding(sequences_of()), make_logits(NUM, 3)
    assert sampler.filters(range(NUM)).marked
    for seat in range(1, NUM):
        sampler.assign(seat, plain[seat])
    assert not sampler.filters(range(1, NUM)).marked
    beside = [sequences_of()[0], *plain[1:]]
    expected = sample(holding(plain), logits, dict(enumerate(plain)))
    assert sample_marked(sampler, logits, beside)[1:] == expected[1:]
