"""Files that commands write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.app.errors import OperatorError
from penstock.app.outputs import check_output, write_figures


@dataclass(frozen=True)
class Figure:
    value: int


def test_a_file_that_can_be_written_is_fine(tmp_path: Path) -> None:
    check_output("--out", None)
    check_output("--out", tmp_path / "figures.json")


@pytest.mark.parametrize(
    ("name", "fault"), [("no/figures.json", "there is no such folder"), (".", "this is a folder")]
)
def test_one_that_cannot_is_told(tmp_path: Path, name: str, fault: str) -> None:
    path = tmp_path / name
    with pytest.raises(OperatorError) as caught:
        check_output("--out", path)
    assert str(caught.value) == f"--out {path}: {fault}"


def test_figures_are_json_with_dataclasses_by_their_fields(tmp_path: Path) -> None:
    write_figures(None, Figure(1))
    write_figures(tmp_path / "figures.json", {"a": Figure(1)})
    assert (tmp_path / "figures.json").read_text() == '{\n "a": {\n  "value": 1\n }\n}\n'
