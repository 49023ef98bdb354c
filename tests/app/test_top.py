"""`penstock top`: who takes a running server."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from penstock.app import top
from penstock.app.errors import OperatorError, TransientError
from tests.app.command import penstock
from tests.app.test_remote import serving

EVENTS = "/v1/events?detail=tenants"
SERVER = {
    "state": "ready",
    "lanes": {
        "interactive": {
            "waiting": 12,
            "forecast_ttft_ms": 812,
            "promised_ttft_ms": 1000,
            "attainment": 0.994,
            "coverage": {"promised": 500, "kept": 497, "low": 0.983, "high": 0.998},
        },
        "batch": {
            "waiting": 0,
            "forecast_ttft_ms": None,
            "promised_ttft_ms": None,
            "attainment": None,
            "coverage": None,
        },
    },
    "engine": {"running": 8, "waiting": 12, "kv_blocks": 200, "kv_free_blocks": 50},
}
NOISY = {"tenant": "noisy", "share": 0.62, "waiting": 12, "running": 5, "refused": 40}
OTHERS = {"tenants": 3, "share": 0.38, "waiting": 0, "running": 3, "refused": 0}
SCREEN = """\
http://x  ready: 8 running, 12 waiting, 75% of KV blocks in use

tenant      work, last minute  waiting  running  refused, last minute
----------  -----------------  -------  -------  --------------------
noisy                     62%       12        5                    40
(3 others)                38%        0        3                     0

lane         waiting  first token in, s  promised, s   kept   95 % interval
-----------  -------  -----------------  -----------  -----  --------------
interactive       12              0.812            1  99.4%  98.3% to 99.8%
batch              0                  -            -      -               -"""


def test_the_screen_begins_with_who_takes_most() -> None:
    assert top.screen("http://x", SERVER, {"tenants": [NOISY], "others": OTHERS}) == SCREEN


def test_nobody_is_summed_up_where_all_are_named() -> None:
    told = {"tenants": [NOISY], "others": {**OTHERS, "tenants": 0}}
    assert "others" not in top.screen("http://x", SERVER, told)


def test_a_real_server_is_shown_once(live_server: str) -> None:
    done = penstock("top", "--url", live_server, "--once")
    assert done.returncode == 0, done.stderr
    head, tenants, lanes = done.stdout.strip().split("\n\n")
    assert head.startswith(f"{live_server}  ready: ")
    columns = tenants.splitlines()[0].split("  ")
    assert [column.strip() for column in columns if column] == [
        "tenant", "work, last minute", "waiting", "running", "refused, last minute",
    ]  # fmt: skip
    assert [line.split()[0] for line in lanes.splitlines()[2:]] == ["interactive", "standard", "batch"]


def test_a_server_that_is_not_there_may_come() -> None:
    done = penstock("top", "--url", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (75, "")
    assert "http://127.0.0.1:1 does not answer" in done.stderr
    assert penstock("top", "--url", "ftp://x").returncode == 2


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "HTTP 401; put a key into OPENAI_API_KEY"), (404, "HTTP 404$")]
)
def test_a_refusal_says_what_is_missing(status: int, hint: str) -> None:
    with serving([], changes={EVENTS: (status, b"")}) as server, pytest.raises(OperatorError, match=hint):
        list(top._events(server.url))


def test_events_are_read_until_the_server_ends_them(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"server": SERVER, "tenants": {"tenants": [NOISY], "others": OTHERS}}
    text = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n: ping\n\n" for kind, data in told.items())
    with (
        serving([], changes={EVENTS: (200, 2 * text.encode())}) as server,
        pytest.raises(TransientError, match="ended the connection"),
    ):
        top.run(Namespace(url=server.url, once=False))
    screen = SCREEN.replace("http://x", server.url)
    assert capsys.readouterr().out == f"{screen}\n\n" * 2
