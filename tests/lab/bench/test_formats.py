"""Every format of the bench is served, in its own width, and stands beside --quantize of that width."""

from __future__ import annotations

import pytest
import torch

from lab.bench.checkpoints import MAKERS
from lab.bench.formats import CASES, SUBJECTS, NoNativeDecoder, Peak, measure
from lab.bench.report import print_formats
from penstock.app.bench.checkpoint import LLAMA_TINY

MIB = 1 << 20


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    try:
        return measure(LLAMA_TINY.name, 0, 1, tmp_path_factory.mktemp("formats"))
    except NoNativeDecoder as error:
        pytest.skip(str(error))


def test_every_format_is_measured_in_its_width(rows: list[dict[str, object]]) -> None:
    assert {subject.format for subject in SUBJECTS} == MAKERS.keys()
    weights = LLAMA_TINY.num_layers * 64 * (64 * 3 + 128 * 3)
    for row, subject in zip(rows, SUBJECTS, strict=True):
        bits = 8 * int(str(row["packed"])) / weights
        # Groups of 32 of 4 bits, with the first layer in 8 bits, or with those of 5 that stand in for Q4_K.
        assert 8 <= bits < 9.5 if subject.like == "int8" else 4 < bits < 7.5


def test_formats_stand_beside_quantize_of_their_width(
    rows: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    for row in rows:
        seconds = 2.0 if row["name"] == "Q4_0" else 1.0
        row["seconds"] = {case.name: seconds for case in CASES}
    print_formats(rows)
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert lines["llama-tiny, Q4_0"].count("0.50") == 2
    assert lines["llama-tiny, GPTQ"].count("1.00") >= 2


def test_a_peak_is_what_was_freed_again() -> None:
    with Peak() as peak:
        kept = torch.ones(8 * MIB // 4)
        torch.ones(64 * MIB // 4)
    assert kept.numel() * 4 <= peak.kept + MIB < 32 * MIB
    assert peak.bytes > 64 * MIB
