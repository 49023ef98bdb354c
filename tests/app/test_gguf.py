"""GGUF files as an operator has them: `--model FILE.gguf`, wherever a model is named."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.held_out import held_out
from demo.score import Talker
from lab.quality import distance
from loadtests.forked import ForkedServer
from penstock.app.bench.runs import read_subject
from penstock.app.bench.server_process import ServerProcess
from penstock.app.build import build
from penstock.app.check import theirs
from penstock.app.checkpoint import (
    DEMO_MODEL,
    find_checkpoint,
    fingerprint,
)
from penstock.app.doctor import Severity, check_model, check_types
from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.engine.model.checkpoint import read_tokenizer
from tests.app.command import penstock
from tests.engine.gguf_files import same, write_gguf


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in Q8_0."""
    return write_gguf(
        DEMO_MODEL,
        tmp_path_factory.mktemp("demo") / "demo-Q8_0.gguf",
        same("Q8_0"),
        pre="smollm",
        general__sampling__temp=0.5,
    )


# Where it lies, and what it is called


def test_a_file_that_is_not_there_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError, match=r"^--model some/model\.gguf: there is no file some/model\.gguf$"):
        find_checkpoint("some/model.gguf")


def test_the_parts_of_a_model_have_a_fingerprint(tmp_path: Path) -> None:
    first = write_gguf(DEMO_MODEL, tmp_path / "demo.gguf", num_parts=2)
    before = fingerprint(first)
    second = tmp_path / "demo-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes() + bytes(32))
    assert fingerprint(first) != before


# What serves it


def test_doctor_knows_it(demo: Path) -> None:
    settings = Settings(model=str(demo), device="cpu")
    assert check_model(settings).text == str(demo)
    (types,) = check_types(settings)
    assert types.level is Severity.OK


def test_the_bench_measures_it_with_its_words(demo: Path) -> None:
    assert read_subject(demo).token_ids == read_subject(DEMO_MODEL).token_ids


def test_recommended_sampling_is_the_default(demo: Path) -> None:
    assert build(Settings(model=str(demo))).service.options.defaults.temperature == 0.5


def test_it_is_read_without_torch(demo: Path) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from penstock.engine.model.checkpoint import *; import penstock.app.build; "
        f"path = Path({str(demo)!r}); read_config(path); read_tokenizer(path); read_generation_defaults(path); "
        "assert not {'torch', 'gguf', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("break_", "said"),
    [
        (lambda content: content[: len(content) // 2], "is truncated: it has"),
        (lambda content: content[:1000], "is truncated: its header goes on"),
        (lambda content: b"GGML" + content[4:], "is no GGUF file"),
        (
            lambda content: content.replace(b"smollm", b"smell!"),
            r"tokenizer\.ggml\.pre smell! is not supported",
        ),
    ],
)
def test_a_broken_file_is_refused_in_a_line(
    demo: Path, tmp_path: Path, break_: Callable[[bytes], bytes], said: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(break_(demo.read_bytes()))
    with pytest.raises(OperatorError, match=rf"^{path}.* {said}|^{path}: {said}") as caught:
        build(Settings(model=str(path)))
    assert "\n" not in str(caught.value)


def test_the_command_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    done = penstock("serve", "--port", "0", "--model", str(tmp_path / "model.gguf"))
    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert last == f"penstock: {tmp_path}/model.gguf is truncated: its header goes on at byte 4 of 4"
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("one_thread")
def test_it_is_as_good_as_int8(demo: Path) -> None:
    exact = partial(theirs.log_probabilities, theirs.load(DEMO_MODEL))
    of_int8 = {"model": str(DEMO_MODEL), "quantize": "int8", "quantize_group_size": "32"}
    found, int8 = (
        distance({"device": "cpu", "num_blocks": "1024", **flags}, exact)
        for flags in ({"model": str(demo)}, of_int8)
    )
    assert found.agreement > 0.9
    assert found.mean_kl == pytest.approx(int8.mean_kl, rel=0.2)


def test_texts_have_the_ids_of_the_directory(demo: Path) -> None:
    expected, found = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), read_tokenizer(demo)
    for ids, _ in held_out(expected, 40):
        text = expected.decode(ids, skip_special_tokens=True)
        assert found.encode(text, add_special=True) == expected.encode(text).ids


def test_it_answers_as_the_directory_does(demo: Path) -> None:
    """The directory's answers are greedy ones in float32, by transformers."""
    questions = ("What is 3 + 4?", "What is the opposite of hot?", "What is the capital of France?")
    expected = [
        text
        for text, _ in Talker(DEMO_MODEL).answer([[("user", question)] for question in questions], most=24)
    ]
    with ForkedServer(["--model", str(demo)]) as server:
        assert [answer(server, "demo-Q8_0", question) for question in questions] == expected


def answer(server: ServerProcess, model: str, question: str) -> str:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    message = {"role": "user", "content": question}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 24}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    content = json.loads(connection.getresponse().read())
    connection.close()
    return str(content["choices"][0]["message"]["content"])
