"""Every command with a wrong argument, file, port or model: exit status 2, or 75 for a port in use, and one line.

What belongs to `simulate`, `quantize`, `key` and `bench` alone is tried with their own tests.
"""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.app import cli
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from tests.app.command import penstock

SECRET = "--cluster-secret=sixteen-characters"

# What is typed, and what the line must name. {tmp}: an empty folder. {file}: a file that is no model, no JSON, no keys
# and no trace. {model}: a checkpoint. {full}: a folder with something in it. {port}: a port that is taken.
TABLE = [
    ("", "usage: penstock"),
    ("sevre", "unknown command sevre; did you mean serve?"),
    ("--prot", "unknown argument --prot"),
    ("serve --prot 80", "unknown argument --prot; did you mean --port?"),
    ("serve now", "unknown argument now"),
    ("serve --port", "--port"),
    ("serve --port http", "--port"),
    ("serve --port 99999", "--port"),
    ("serve --port {port}", "--port {port}: another program listens there already"),
    ("serve --port 0 --metrics-port {port}", "--metrics-port {port}: another program listens there already"),
    ("serve --port 0 --grpc-port {port}", "--grpc-port {port}: another program listens there already"),
    ("serve --port 1024 --grpc-port 1024", "grpc_port and port are both 1024"),
    ("serve --port 1024 --metrics-port 1024", "metrics_port and port are both 1024"),
    ("serve --port 0 --host 256.1.1.1", "--host 256.1.1.1"),
    ("serve --port 0 --host 192.0.2.1", "--host 192.0.2.1"),
    ("serve --port 0 --host 0.0.0.0", "--api-keys-file"),
    ("serve --port 0 --host ::", "--insecure"),
    ("serve --config {tmp}/none.toml", "--config {tmp}/none.toml"),
    ("serve --config {tmp}", "--config {tmp}"),
    ("serve --config {file}", "--config {file}: not TOML"),
    ("serve --port 0 --model {tmp}/none", "--model {tmp}/none: there is no directory"),
    ("serve --port 0 --model {tmp}", "config.json"),
    ("serve --port 0 --model {file}", "--model {file}"),
    ("serve --port 0 --model {tmp}/none.gguf", "--model {tmp}/none.gguf: there is no file"),
    ("serve --port 0 --model {model} --revision v1", "--revision v1: {model} is not on the hub"),
    ("serve --port 0 --revision v1", "--revision v1: the demo model is not on the hub"),
    ("serve --port 0 --draft-revision v1", "--draft-revision v1"),
    ("serve --port 0 --draft {tmp}", "--draft {tmp}"),
    ("serve --port 0 --draft {model}", "--draft {model}"),
    ("serve --port 0 --tensor-parallel 2 --draft {model}", "--tensor-parallel"),
    ("serve --port 0 --tensor-parallel 7", "7"),
    ("serve --port 0 --kv-keep few", "--kv-keep"),
    ("serve --port 0 --kv-keep -1", "--kv-keep"),
    ("serve --port 0 --model {model} --kv-keep 31", "--kv-keep 31 must be 0, which keeps all, or between 32 and"),
    ("serve --port 0 --model {model} --kv-keep 5000", "--kv-keep 5000 must be 0"),
    ("serve --port 0 --pipeline-parallel 7", "7"),
    ("serve --port 0 --api-keys-file {tmp}/keys", "--api-keys-file {tmp}/keys: No such file"),
    ("serve --port 0 --api-keys-file {file}", "--api-keys-file {file}, line 1"),
    ("serve --port 0 --redis-url nonsense", "--redis-url"),
    ("serve --otlp-endpoint localhost", "--otlp-endpoint"),
    ("serve --threads 1000000", "--threads: must be at most"),
    ("serve --numa 999", "--numa: must be a NUMA node that has a core which this process may use"),
    ("serve --dtype int3", "--dtype"),
    ("serve --kv-dtype int3", "--kv-dtype"),
    ("serve --quantize int3", "--quantize"),
    ("serve --quantize-group-size 64", "quantize_group_size 64 needs quantize"),
    ("serve --kv-memory much", "--kv-memory: must be a size like 2GiB"),
    ("serve --lane-standard speed=3", "--lane-standard: keys are"),
    ("serve --lane-standard ttft=soon", "--lane-standard: ttft must be a number"),
    ("serve --cluster-secret short", "--cluster-secret"),
    ("serve --no-speculation yes", "unknown argument yes"),
    ("switch", "--replicas-file"),
    ("switch --num-blocks 9", "unknown argument --num-blocks"),
    ("switch localhost", "localhost"),
    ("switch http://127.0.0.1:1/path", "http://127.0.0.1:1/path"),
    ("switch --replicas-file {tmp}/none", "--replicas-file {tmp}/none"),
    ("switch --replicas-file {file}", "nonsense"),
    ("switch --port 0 http://127.0.0.1:1", "PENSTOCK_CLUSTER_SECRET"),
    (f"switch --port {{port}} {SECRET} http://127.0.0.1:1", "--port {port}: another program"),
    (f"switch --port 0 {SECRET} --model {{tmp}} http://127.0.0.1:1", "--model {tmp}"),
    (f"switch --port 0 {SECRET} --host 0.0.0.0 http://127.0.0.1:1", "--insecure"),
    ("cluster", "ACTION"),
    ("cluster depoly", "unknown action depoly; did you mean deploy?"),
    ("cluster deploy --port http", "--port"),
    ("cluster deploy --replica 3", "--replica"),
    ("cluster deploy --metrics-port 9", "--metrics-port"),
    ("cluster deploy --grpc-port 9", "--grpc-port"),
    ("cluster deploy --nodes 3", "unknown argument --nodes"),
    ("cluster scale", "REPLICAS"),
    ("cluster drain", "REPLICA"),
    ("cluster status now", "unknown argument now"),
    ("quantize", "MODEL"),
    ("quantize {model}", "OUT"),
    ("quantize {tmp}/none {tmp}/out", "MODEL {tmp}/none"),
    ("quantize {file} {tmp}/out", "MODEL {file}"),
    ("quantize {model} {tmp}/out --calibration-tokens many", "--calibration-tokens"),
    ("quantize {model} {tmp}/out --revision v1", "{model} is not on the hub"),
    ("key", "NAME"),
    ("key alice weight", "weight"),
    ("key alice top=fast", "top: "),
    ("key alice --colour", "unknown argument --colour"),
    ("check {tmp}", "{tmp}"),
    ("check --dtype int3", "--dtype"),
    ("doctor {tmp}", "{tmp}"),
    ("doctor {file}", "{file}"),
    ("doctor {tmp}/none", "{tmp}/none"),
    ("doctor {model} --model {model}", "not both"),
    ("doctor {model} more", "unknown argument more"),
    ("doctor {model} --kv-dtypes int8", "unknown argument --kv-dtypes; did you mean --kv-dtype?"),
    ("doctor {model} --url http://127.0.0.1:1", "--url goes with nothing else"),
    ("doctor --url localhost", "localhost"),
    ("top --url localhost", "localhost"),
    ("doctor {model} --revision v1", "--revision v1"),
    ("doctor --dtype int3", "--dtype"),
    ("kernels", "action"),
    ("kernels burn", "burn"),
    ("kernels build x", "x"),
    ("kernels list --out {file}", "--out {file}"),
    ("kernels build --out {file}", "--out {file}"),
    ("watermark find {file} --model {model} --watermark-key-file {file}", "action"),
    ("watermark detect {file} --model {model}", "--watermark-key-file"),
    ("watermark detect {file} --model {model} --watermark-key-file {file}", "--watermark-key-file {file}"),
    ("watermark detect {file} --model {tmp} --watermark-key-file {tmp}/none", "--watermark-key-file {tmp}/none"),
    ("bench --streams some", "--streams"),
    ("bench --streams 0", "--streams"),
    ("bench --dtype int3", "--dtype"),
    ("bench --quantize int3", "--quantize"),
    ("bench --ladder --price cheap", "--price"),
    ("bench --model {tmp}/none", "--model {tmp}/none"),
    ("bench --model {file}", "--model {file}"),
    ("bench --json {tmp}/none/figures.json", "--json {tmp}/none/figures.json"),
    ("bench --only generate --json {full}", "--json {full}"),
    ("simulate --router best --replicas 2", "best"),
    ("simulate --replicas none", "--replicas"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The braces of the table stand for these."""
    file = tmp_path_factory.mktemp("file") / "nonsense.txt"
    file.write_text("nonsense\n")
    full = tmp_path_factory.mktemp("full")
    (full / "diary.txt").write_text("dear diary\n")
    model = ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("models"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {
            "tmp": str(tmp_path_factory.mktemp("empty")),
            "file": str(file),
            "full": str(full),
            "model": str(model),
            "port": str(listener.getsockname()[1]),
        }


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize(("typed", "named"), TABLE, ids=[typed or "nothing" for typed, _ in TABLE])
def test_a_mistake_is_one_line_that_names_it(
    typed: str,
    named: str,
    places: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("too short\n"))
    status = cli.main(typed.format(**places).split())
    said = capfd.readouterr()
    assert status == (cli.EXIT_TRANSIENT if "port {port}" in typed else cli.EXIT_USAGE)
    if not typed:
        assert named in said.out
        return
    *before, line = said.err.splitlines()
    assert line.startswith("penstock: ")
    assert named.format(**places) in line
    assert not [one for one in before if " starting on " not in one and " metrics on " not in one]


def test_every_command_is_in_the_table() -> None:
    assert {typed.split()[0] for typed, _ in TABLE if typed} >= cli._COMMANDS.keys()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PENSTOCK_MAX_BATCH_TOKENS": "0"}, "PENSTOCK_MAX_BATCH_TOKENS: "),
        ({"PENSTOCK_MAX_BATCH": "9"}, "unknown variable PENSTOCK_MAX_BATCH"),
        ({"PENSTOCK_CPU_ISA": "abacus"}, "PENSTOCK_CPU_ISA"),
    ],
)
def test_a_wrong_variable_is_one_line_of_a_process(variables: dict[str, str], named: str) -> None:
    done = penstock("serve", "--port", "0", **variables)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_process_leaves_is_no_half_of_anything(tmp_path: Path, places: dict[str, str]) -> None:
    """A mistake in the last argument is found before anything was written."""
    done = penstock("quantize", places["model"], str(tmp_path / "out"), "--calibration", "/nowhere")
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []
