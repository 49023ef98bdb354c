"""The table of what each type costs, on a few conversations."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from app.checkpoint import DEMO_MODEL
from lab.demo.gguf_files import encode
from lab.demo.held_out import Talk, held_out
from lab.demo.perplexity import CASES, Case, load, perplexity, table
from lab.demo.score import Talker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def talks() -> list[Talk]:
    return held_out(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), 4)


def test_it_is_the_perplexity_of_transformers(talks: list[Talk]) -> None:
    model = Talker(DEMO_MODEL).model
    total, count = 0.0, 0
    for ids, said in talks:
        with torch.no_grad():
            likelihoods = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            if said[place]:
                total -= float(likelihoods[place - 1, ids[place]])
                count += 1
    found = perplexity(load(DEMO_MODEL, dtype="float32"), talks)
    assert found == pytest.approx(math.exp(total / count), rel=1e-5)


def test_every_case_is_held_against_the_first(talks: list[Talk]) -> None:
    lines = list(table(DEMO_MODEL, talks, [CASES[0], Case("int8", {"quantize": "int8"})]))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in cells] == ["float32", "int8"]
    assert cells[0][2] == "+0.000 %"
    change = float(cells[1][1]) / float(cells[0][1]) - 1
    assert float(cells[1][2].removesuffix(" %")) == pytest.approx(100 * change, abs=2e-3)
    assert cells[1][2] != "+0.000 %"


@pytest.mark.parametrize(("type", "most"), [("Q8_0", 1.002), ("Q4_K", 1.05)])
def test_a_gguf_file_is_written_for_its_case(talks: list[Talk], type: str, most: float) -> None:
    *_, float32, written = table(DEMO_MODEL, talks, [CASES[0], Case(type, {"dtype": "float32"}, gguf=type)])
    first, found = (float(line.split("|")[2]) for line in (float32, written))
    assert found != first
    assert first / most < found < first * most


@pytest.mark.parametrize("type", [Type.Q4_0, Type.Q4_K])
def test_what_the_library_reads_is_nearer_than_simple_rounding(type: Type) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    weight[0] = 0
    weight[1] = np.abs(weight[1]) + 1
    found = gguf.quants.dequantize(encode(weight, type), type)
    assert not found[0].any()
    groups = weight.reshape(-1, 32)
    if type == Type.Q4_0:
        simple = gguf.quants.dequantize(gguf.quants.quantize(weight, type), type).reshape(groups.shape)
    else:
        low = np.minimum(groups.min(1, keepdims=True), 0)
        step = np.maximum((np.maximum(groups.max(1, keepdims=True), 0) - low) / 15, 1e-9)
        simple = np.rint((groups - low) / step) * step + low
    for rows in (slice(0, 32), slice(32, None)):  # of one sign, and of both
        error, of_simple = (
            ((other - groups)[rows] ** 2).sum() for other in (found.reshape(groups.shape), simple)
        )
        assert error < 0.95 * of_simple


def test_a_checkpoint_is_made_for_its_case(talks: list[Talk], capsys: pytest.CaptureFixture[str]) -> None:
    made = Case("made", {"dtype": "float32"}, made="--method rtn --calibration-tokens 1024")
    *_, float32, quantized = table(DEMO_MODEL, talks, [CASES[0], made])
    perplexities, sizes = (
        [float(line.split("|")[column].replace(",", "")) for line in (float32, quantized)]
        for column in (2, 4)
    )
    assert perplexities[0] * 1.001 < perplexities[1] < perplexities[0] * 1.2
    assert sizes[1] < sizes[0] / 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rtn, 4 bits")
