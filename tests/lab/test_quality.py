"""The table of what each type costs, of the demo model as a GGUF file of 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Linear, ModuleDict

from lab.quality import Case, add_noise, table
from penstock.app.checkpoint import DEMO_MODEL
from tests.engine.gguf_files import same, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

IMPOSSIBLE = Case("impossible", {"quantize_group_size": "64"})
CASES = (
    Case("float32", {"dtype": "float32"}),
    Case("int8", {"quantize": "int8"}),
    Case("int4", {"quantize": "int4"}),
    Case("made", made="--method gptq --bits 8 --calibration-tokens 1024"),
)


def test_noise_is_at_most_half_a_step_and_the_same_again() -> None:
    torch.manual_seed(1)
    before = ModuleDict({"q_proj": Linear(64, 6), "lm_head": Linear(64, 6)}).state_dict()
    found = []
    for _ in range(2):
        network = ModuleDict({"q_proj": Linear(64, 6), "lm_head": Linear(64, 6)})
        network.load_state_dict(before)
        add_noise(network)
        found.append(network.state_dict())
    for name, tensor in before.items():
        assert torch.equal(found[0][name], found[1][name])
        assert torch.equal(found[0][name], tensor) == (name != "q_proj.weight")
    groups, noisy = (weights["q_proj.weight"].view(6, 2, 32) for weights in (before, found[0]))
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    share = (noisy - groups) / steps[..., None]
    assert -0.501 < share.min() < -0.45
    assert 0.45 < share.max() < 0.501


@pytest.mark.long("benches")
def test_the_table_has_what_each_case_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(DEMO_MODEL, tmp_path / "demo-Q4_1.gguf", same("Q4_1"), pre="smollm")
    _, _, *lines, last = table([file], [*CASES, IMPOSSIBLE])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:2] for row in cells] == [
        ["demo-Q4_1", name] for name in ("as published", *(case.name for case in CASES))
    ]
    published, float32, int8, int4, made = (float(row[2]) for row in cells)
    assert float32 <= 1e-6 < published < int8
    assert int8 < 0.1 * int4
    assert made < 0.1 * int4
    for row in cells:
        agreeing, places = (int(number.replace(",", "")) for number in row[3].split(" of "))
        assert 0.5 * places < agreeing <= places
    sizes = [float(row[4]) for row in cells]
    assert sizes[3] < sizes[2] < sizes[1]
    assert last.startswith("| demo-Q4_1 | impossible | quantize_group_size 64 needs quantize ")
    out, err = capsys.readouterr()
    assert out == ""
    assert "gptq, 8 bits" in err
