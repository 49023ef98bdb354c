"""`penstock simulate`: what it writes, and what it refuses."""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.app.cli import main
from penstock.app.errors import OperatorError
from penstock.app.simulate import command, inputs
from penstock.app.simulate.capacity import Search, sentence
from penstock.app.simulate.inputs import (
    GPU_COST,
    Traffic,
    check_can_run,
    read_lanes,
    read_traffic,
)
from penstock.app.simulate.plots import SIZE
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.run import POLICIES, Machine
from penstock.priority.simulator.trace import SCENARIOS, Arrival, write_trace

SMALL = ("--scenario", "noisy-burst", "--kind", "chat", "--rate", "20", "--duration", "8")
GOOD_LINE = '{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n'
GPU = Machine(coefficients=GPU_COST)

Simulate = Callable[..., int]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """The command in this process, its log left to pytest."""
    monkeypatch.setattr(command, "configure_log", lambda _: None)
    return lambda *arguments: main(["simulate", *map(str, arguments)])


def refusal(penstock: Simulate, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that is said about arguments that cannot be."""
    assert penstock(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("penstock: ")
    assert error.count("\n") == 1
    return error


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


# What it writes


def test_the_table_fits_a_terminal_and_names_every_policy(
    penstock: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(*SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    assert [line.split()[0] for line in lines[3:7]] == list(POLICIES)
    assert lines[1].split()[:2] == ["policy", "goodput/s"]


def test_only_the_policies_asked_for(penstock: Simulate, tmp_path: Path) -> None:
    assert penstock(*SMALL, "--policies", "penstock,fcfs", "--json", tmp_path / "f.json") == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [one["policy"] for one in figures["policies"]] == ["penstock", "fcfs"]


def test_the_json_has_it_all_and_no_infinity(penstock: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert penstock(*SMALL, "--ttft", "0.5", "--json", path) == 0
    figures = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert figures["promises"]["interactive"] == {"ttft_s": 0.5, "tpot_s": 0.1}
    assert figures["promises"]["batch"] == {"ttft_s": None, "tpot_s": None}
    assert figures["machine"]["coefficients"] == dict(GPU_COST)
    for one in figures["policies"]:
        assert one["total"]["offered"] == figures["traffic"]["requests"]
        assert set(one["lanes"]) == {"interactive", "batch"}
        assert set(one["tenants"]) >= {"noisy", "batch"}
        assert set(one["lanes"]["interactive"]["ttft_s"]) == {"p50", "p90", "p99"}


@pytest.mark.parametrize("policies", ["fcfs,strict,fair,penstock", "fair"])
def test_the_plots_are_pngs_of_the_right_size(penstock: Simulate, tmp_path: Path, policies: str) -> None:
    folder = tmp_path / "new" / "plots"
    assert penstock(*SMALL, "--policies", policies, "--plots", folder) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["promise.png", "ttft.png"]
    assert {png_size(path) for path in folder.iterdir()} == {SIZE}


def test_plots_of_batch_alone_are_drawn_too(penstock: Simulate, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(write_trace([Arrival(0.0, 9, 2, Lane.BATCH)])))
    assert penstock("--trace", trace, "--plots", tmp_path) == 0
    assert png_size(tmp_path / "ttft.png") == SIZE


def test_matplotlib_is_only_loaded_for_plots() -> None:
    code = (
        "import sys; from penstock.app.cli import main;"
        f"assert main(['simulate', *{SMALL}]) == 0; assert 'matplotlib' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert " requests, " in done.stderr
    assert "policy" in done.stdout


def test_a_written_trace_gives_the_same_figures(penstock: Simulate, tmp_path: Path) -> None:
    trace, one, two = tmp_path / "trace.jsonl", tmp_path / "1.json", tmp_path / "2.json"
    assert penstock(*SMALL, "--policies", "strict", "--write-trace", trace, "--json", one) == 0
    assert penstock("--trace", trace, "--policies", "strict", "--json", two) == 0
    first, second = (json.loads(path.read_text())["policies"][0]["total"] for path in (one, two))
    assert first["offered"] == second["offered"]
    assert first["work"] == second["work"]
    assert first["ttft_s"]["p50"] == pytest.approx(second["ttft_s"]["p50"], abs=1e-3)


def test_a_number_of_requests_instead_of_a_duration() -> None:
    for scenario in SCENARIOS:
        options = parse("--scenario", scenario, "--kind", "chat", "--rate", "50", "--requests", "130")
        assert len(read_traffic(options).arrivals) == 130


def test_a_trace_can_be_replayed_at_another_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(write_trace(Arrival(100.0 + number, 9, 2) for number in range(11))))
    assert read_traffic(parse("--trace", str(trace))).rate == pytest.approx(1.1)
    arrivals = read_traffic(parse("--trace", str(trace), "--rate", "4.4")).arrivals
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([number / 4 for number in range(11)])


def test_flags_go_before_the_cost_file(penstock: Simulate, tmp_path: Path) -> None:
    cost, path = tmp_path / "cost.json", tmp_path / "figures.json"
    cost.write_text(json.dumps({**GPU_COST, "max_num_seqs": 7, "device": "a card"}))
    assert penstock(*SMALL, "--cost", cost, "--alpha-s", "0.02", "--policies", "fcfs", "--json", path) == 0
    machine = json.loads(path.read_text())["machine"]
    assert machine["coefficients"] == {**GPU_COST, "alpha_s": 0.02}
    assert machine["max_num_seqs"] == 7


def test_a_promise_takes_its_waiting_time_with_it() -> None:
    policy = DEFAULT_POLICIES[Lane.INTERACTIVE]
    ttl_s = [read_lanes(parse("--ttft", ttft))[Lane.INTERACTIVE].ttl_s for ttft in ("0.5", "1000")]
    assert ttl_s == [policy.ttl_s, 2000.0]


def test_traces_of_the_largest_sizes() -> None:
    inputs._check_size(1.0, 2_000_000)
    inputs._check_size(0.1, 10_000_000)


def test_a_machine_that_just_holds_a_request() -> None:
    machine = Machine(coefficients=GPU_COST, num_kv_tokens=90, max_model_len=100)
    traffic = Traffic("made", [Arrival(0.0, 80, 10)], lambda _: [])
    check_can_run(traffic, machine, parse())
    with pytest.raises(
        OperatorError, match=r"^a request of made can never run: 80 prompt and 10 output tokens, .* 89 "
    ):
        check_can_run(traffic, replace(machine, num_kv_tokens=89), parse())


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--scenario", "quiet"], "--scenario"),
        (["--kind", "poetry"], "--kind"),
        (["--policies", "fcfs,lottery"], "lottery"),
        (["--rate", "0"], "--rate: must be greater than 0, not 0"),
        (["--rate", "1e9"], "--rate and --duration"),
        (["--rate", "1", "--requests", "2000001"], "--rate and --duration make more than 2,000,000 requests"),
        (
            ["--rate", "1e-6", "--duration", "10000001"],
            "--rate and --duration make a trace of more than 10,000,000 s",
        ),
        (["--rate", "0.001"], "--duration is too short"),
        (["--duration", "0"], "--duration"),
        (["--requests", "0"], "--requests: must be at least 1"),
        (["--requests", "5", "--duration", "5"], "not allowed with"),
        (["--scale", "0"], "--scale"),
        (["--scale", "1000"], "can never run"),
        (["--seed", "x"], "--seed"),
        (["--ttft", "0"], "--ttft: must be greater than 0"),
        (["--tpot", "-1"], "--tpot"),
        (["--beta-s", "-1"], "--beta-s: must be at least 0"),
        (
            ["--alpha-s", "0", "--beta-s", "0", "--gamma-s", "0", "--delta-s", "0", "--epsilon-s", "0"],
            "take no time",
        ),
        (["--cost", "/nowhere/cost.json"], "--cost /nowhere/cost.json: No such file"),
        (["--trace", "/nowhere/trace.jsonl"], "--trace /nowhere/trace.jsonl: No such file"),
        (["--trace", "/"], "--trace /: Is a directory"),
        (["--trace", "x", "--scenario", "steady"], "not allowed with"),
        (["--trace", "x", "--kind", "chat"], "--kind does not go with --trace"),
        (["--trace", "x", "--seed", "0"], "--seed does not go with --trace"),
        (["--json", "/nowhere/f.json"], "--json /nowhere/f.json"),
        (["--write-trace", "/nowhere/t"], "--write-trace /nowhere/t"),
        (["--plots", "/proc/plots"], "--plots /proc/plots"),
        (["--capacity", "--plots", "p"], "--plots does not go with --capacity"),
        (["--capacity", "--policies", "fcfs"], "--policies does not go with --capacity"),
        (["--capacity", "--target", "100.5"], "--target"),
        (["--capacity", "--machines", "0"], "--machines"),
        (["--machines", "2"], "--machines only goes with --capacity"),
        (["--target", "90"], "--target only goes with --capacity"),
        (["--sceanrio", "mixed"], "did you mean --scenario?"),
    ],
)
def test_a_mistake_is_one_line(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(penstock, capsys, *arguments)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("", "the trace is empty"),
        (GOOD_LINE + "{", "line 2: not JSON"),
        (GOOD_LINE.replace("}", ', "lane": "express"}'), "line 1: there is no lane 'express'"),
        ("\n" + GOOD_LINE + "\n" + GOOD_LINE.replace("9", "99999"), "line 4 can never run: 99999 prompt"),
    ],
)
def test_a_hole_in_the_trace_is_named(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: str, named: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    error = refusal(penstock, capsys, "--trace", path)
    assert f"--trace {path}: " in error
    assert named in error


def test_a_trace_that_is_no_text(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refusal(penstock, capsys, "--trace", path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"alpha_s": None}, "alpha_s is missing"),
        ({"beta_s": -1e-6}, "beta_s must be a number of seconds"),
        ({"gamma_s": "fast"}, "gamma_s must be a number of seconds, 0 or more, not 'fast'"),
        ({"delta_s": True}, "delta_s"),
        ({"delta_s": float("nan")}, "delta_s"),
        ({"num_kv_tokens": 0}, "num_kv_tokens must be a whole number"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_model_length": 100}, "did you mean max_model_len?"),
        ({"max_model_len": 64}, "can never run"),
        (dict.fromkeys(GPU_COST, 0), "take no time"),
    ],
)
def test_a_wrong_cost_file_is_named(
    penstock: Simulate,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: dict[str, object],
    named: str,
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**GPU_COST, **change}))
    assert named in refusal(penstock, capsys, *SMALL, "--cost", path)


@pytest.mark.parametrize(
    ("text", "named"), [("{", "not JSON"), ("[1]", "not a JSON object"), ("\0", "not JSON")]
)
def test_a_cost_file_that_is_none(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    assert named in refusal(penstock, capsys, "--cost", path)


def test_plots_without_matplotlib(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'penstock[simulate]'" in refusal(penstock, capsys, "--plots", tmp_path)


# Capacity

SLOW = replace(GPU, coefficients={"alpha_s": 0.05, "beta_s": 1e-3, "gamma_s": 1e-3, "delta_s": 1e-7})
STEADY = ("--scenario", "steady", "--kind", "chat", "--duration", "10")


def test_two_machines_carry_at_least_as_much_as_one() -> None:
    search = Search(read_traffic(parse(*STEADY)), SLOW, DEFAULT_POLICIES, 0.99)
    one, two = search.run(1), search.run(2)
    assert one.rate > 0
    assert two.rate >= one.rate
    assert search.run(2, one.rate).rate >= one.rate
    assert min(one.attainment or 0, two.attainment or 0) >= 0.99


def test_a_promise_that_nothing_keeps_has_no_capacity() -> None:
    lanes = {**DEFAULT_POLICIES, Lane.INTERACTIVE: replace(DEFAULT_POLICIES[Lane.INTERACTIVE], ttft_s=0.01)}
    traffic = read_traffic(parse(*STEADY))
    found = Search(traffic, SLOW, lanes, 0.99).run(1)
    assert (found.rate, found.attainment) == (0.0, None)
    assert "1 machine can promise nothing" in sentence([found], traffic, lanes[Lane.INTERACTIVE], 0.99)


def test_the_answer_is_one_sentence(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "capacity.json"
    costs = [f"--{name.replace('_', '-')}={value}" for name, value in SLOW.coefficients.items()]
    arguments = (*STEADY, *costs, "--capacity", "--machines", "1,2", "--target", "95", "--json", path)
    assert penstock(*arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "1 machine can promise" in out
    assert "2 machines can promise" in out
    capacity = json.loads(path.read_text())["capacity"]
    assert capacity["target"] == 0.95
    assert [one["num_machines"] for one in capacity["found"]] == [1, 2]


def test_capacity_of_traffic_that_is_not_interactive(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(write_trace([Arrival(0.0, 9, 2, Lane.BATCH)])))
    assert "is interactive" in refusal(penstock, capsys, "--trace", path, "--capacity")
