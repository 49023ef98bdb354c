"""The users against a real server, as locust runs them: its tables and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.loadtests.scripted import REFUSED, ScriptedServer

LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
KINDS = {"background", "batcher", "chatter", "completer", "leaver", "resumer", "slowreader"}


def start(host: str, run_time: str, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "locust",
        "--locustfile",
        str(LOCUSTFILE),
        "--headless",
        "--json",
        "--host",
        host,
    ]
    command += ["--run-time", run_time, "--exit-code-on-error", "1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_every_user_has_rows_and_only_what_fails_sets_the_status(live_server: str) -> None:
    with ScriptedServer(REFUSED) as busy:
        one = ["--users", "1", "--rate", "20", "Completer"]
        every = start(
            live_server, "4s", "--users", "16", "--spawn-rate", "16", "--rate", "8", "--load-shape", "steps",
            "--stop-timeout", "30", "--tenants", "ann=k1",
        )  # fmt: skip
        refused, lost = start(busy.url, "1s", *one), start("http://127.0.0.1:1", "1s", *one)
        out, errors = every.communicate(timeout=300)
        (of_refused, _), (of_lost, _) = (run.communicate(timeout=300) for run in (refused, lost))
    rows = json.loads(out)
    assert (every.returncode, refused.returncode, lost.returncode) == (0, 0, 1), errors
    assert all(row["num_failures"] == 0 for row in rows)
    of_kind = {(row["method"], row["name"].partition(",")[0]): row for row in rows}
    assert {kind for _, kind in of_kind} == KINDS
    assert {kind for what, kind in of_kind if what == "e2e"} == KINDS - {"leaver"}
    assert {kind for what, kind in of_kind if what == "left"} == {"leaver"}
    assert {row["name"].partition(", ")[2] for row in rows} == {
        "interactive, ann",
        "standard, ann",
        "batch, ann",
    }
    assert {what for what, kind in of_kind if kind == "chatter"} >= {
        "client late",
        "ttft",
        "tpot",
        "longest itl",
        "queue",
    }
    chatter = {
        what: row["total_response_time"] / row["num_requests"]
        for (what, kind), row in of_kind.items()
        if kind == "chatter"
    }
    assert 0 <= chatter["queue"] < chatter["ttft"] < chatter["e2e"]
    assert 0 < chatter["tpot"] < chatter["longest itl"] < chatter["e2e"]
    assert {row["method"] for row in json.loads(of_refused)} == {"client late", "refused"}
    (failed,) = (row for row in json.loads(of_lost) if row["method"] == "e2e")
    assert failed["num_failures"] == failed["num_requests"] > 0
