"""`penstock cluster` checks its arguments before it needs Ray."""

from __future__ import annotations

import sys

import pytest

from penstock.app.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: ACTION"),
        ("scael 2", "unknown action scael; did you mean scale?"),
        ("scale", "the following arguments are required: REPLICAS"),
        ("drain", "the following arguments are required: REPLICA"),
        ("status --port 1", "unknown argument --port"),
        ("deploy --port x", "--port: "),
        ("deploy --replica a", "--replica: replicas cannot have it in common"),
        ("deploy --role decode", "--role: replicas cannot have it in common"),
        ("deploy --metrics-port 9", "--metrics-port: replicas cannot have it in common"),
        ("deploy --log-level error", "--log-level: must be info or debug"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("action", ["deploy", "status", "scale 2", "drain a", "down"])
def test_without_ray_it_says_how_to_install_it(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["cluster", *action.split()]) == 2
    assert capsys.readouterr().err == (
        "penstock: Ray is not installed; `pip install 'penstock[cluster]'` installs it\n"
    )
