"""gRPC on a real server: the demo model on a port of its own, from its start to its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess
from penstock.app.errors import OperatorError
from penstock.app.rpc import RpcPort
from penstock.app.settings import Settings
from penstock.gateway.access.keys import digest_of
from tests.app.test_tls import openssl
from tests.deploy.proxies import free_port
from tests.docs.markdown import pages
from tests.gateway.rpc.rpc_client import INFERENCE, PENSTOCK, parameters, stubs, texts

DEMO = "penstock-demo"
KEY = "the-key-of-ann-0123456789"
PROMPT = "Once upon a time"
TIMEOUT_S = 60


def start(*arguments: str) -> tuple[ServerProcess, str]:
    """A server, and the address of its gRPC."""
    server = ForkedServer(("--grpc-port", str(free_port()), *arguments))
    return server, server.wait_line(" gRPC on ").split()[-1]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ServerProcess, str]]:
    server, address = start()
    server.wait_ready()
    yield server, address
    assert server.stop() == 0, server.log


@pytest.fixture
def clients(server: tuple[ServerProcess, str]) -> Iterator[tuple[Any, Any, httpx.Client]]:
    """The stubs of both services, and a client of the same server's HTTP."""
    process, address = server
    with grpc.insecure_channel(address) as channel, httpx.Client(base_url=process.url, timeout=60) as http:
        yield *stubs(channel), http


def test_text_is_the_same_as_over_http(clients: tuple[Any, Any, httpx.Client]) -> None:
    inference, penstock, http = clients
    how: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
    body = http.post("/v1/completions", json={"model": DEMO, "prompt": PROMPT, **how}).json()
    expected = body["choices"][0]
    call = penstock.Generate(PENSTOCK.GenerateRequest(prompt=PROMPT, **how), timeout=TIMEOUT_S)
    *deltas, last = call
    assert "".join(reply.text for reply in deltas) == expected["text"]
    assert len(deltas) > 1
    assert (last.finish_reason, last.usage.completion_tokens) == (expected["finish_reason"], 24)
    request = texts(PROMPT, model_name=DEMO, parameters=parameters(**how))
    reply = inference.ModelInfer(request, timeout=TIMEOUT_S)
    assert reply.outputs[0].contents.bytes_contents[0].decode() == expected["text"]


def test_a_chat_and_an_embedding_are_the_same_as_over_http(clients: tuple[Any, Any, httpx.Client]) -> None:
    inference, penstock, http = clients
    messages = [{"role": "user", "content": "Tell me of a fox."}]
    how: Any = {"messages": messages, "max_tokens": 16, "temperature": 0}
    body = http.post("/v1/chat/completions", json={"model": DEMO, **how}).json()
    call = penstock.Generate(PENSTOCK.GenerateRequest(model=DEMO, **how), timeout=TIMEOUT_S)
    assert "".join(reply.text for reply in call) == body["choices"][0]["message"]["content"]
    vectors = http.post("/v1/embeddings", json={"model": DEMO, "input": [PROMPT, "a fox"]}).json()["data"]
    reply = inference.ModelInfer(texts(PROMPT, "a fox", name="input", model_name=DEMO), timeout=TIMEOUT_S)
    (output,) = reply.outputs
    expected = [number for vector in vectors for number in vector["embedding"]]
    assert list(output.shape) == [2, len(expected) // 2]
    assert output.contents.fp32_contents == pytest.approx(expected, abs=1e-5)


def test_the_example_of_the_guide_runs(
    server: tuple[ServerProcess, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (page,) = (page for page in pages() if str(page) == "docs/guide/grpc.md")
    (example,) = (text for language, text in page.blocks if language == "py")
    exec(compile(example.replace("127.0.0.1:8001", server[1]), str(page), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_running_streams_finish_after_sigterm_and_new_calls_are_refused() -> None:
    server, address = start()
    server.wait_ready()
    with grpc.insecure_channel(address) as channel:
        inference, penstock = stubs(channel)
        how: Any = {"max_tokens": 1500, "ignore_eos": True}
        call = penstock.Generate(PENSTOCK.GenerateRequest(prompt=PROMPT, **how), timeout=TIMEOUT_S)
        assert next(call).text
        server.signal()
        server.wait_line(" draining")
        assert not inference.ServerReady(INFERENCE.ServerReadyRequest(), timeout=TIMEOUT_S).ready
        with pytest.raises(grpc.RpcError) as refused:
            inference.ModelInfer(texts(PROMPT, model_name=DEMO), timeout=TIMEOUT_S)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert [reply.finish_reason for reply in call][-1] == "length"
    assert server.wait() == 0
    assert "Traceback" not in server.log


def test_a_stream_that_does_not_finish_in_time_ends_with_a_status() -> None:
    server, address = start("--drain-timeout", "0.1")
    server.wait_ready()
    with grpc.insecure_channel(address) as channel:
        _, penstock = stubs(channel)
        how: Any = {"max_tokens": 1500, "ignore_eos": True}
        call = penstock.Generate(PENSTOCK.GenerateRequest(prompt=PROMPT, **how), timeout=TIMEOUT_S)
        assert next(call).text
        server.signal()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in ended.value.details()
    assert server.wait() == 0


def test_keys_and_the_certificate_hold_for_both_ports(tmp_path: Path) -> None:
    subject = "-subj /CN=penstock -addext subjectAltName=IP:127.0.0.1"
    ec = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    openssl(f"req -x509 {ec} -nodes {subject} -keyout {tmp_path}/tls.key -out {tmp_path}/tls.crt")
    (tmp_path / "keys").write_text(f"ann:sha256:{digest_of(KEY).hex()}\n")
    files = [f"--ssl-certfile={tmp_path}/tls.crt", f"--ssl-keyfile={tmp_path}/tls.key"]
    server, address = start(*files, f"--api-keys-file={tmp_path}/keys", "--access-log")
    with server:
        server.wait_ready()
        trusted = grpc.ssl_channel_credentials((tmp_path / "tls.crt").read_bytes())
        with grpc.secure_channel(address, trusted) as channel:
            _, penstock = stubs(channel)
            request = PENSTOCK.GenerateRequest(prompt=PROMPT, max_tokens=2)
            with pytest.raises(grpc.RpcError) as refused:
                list(penstock.Generate(request, timeout=TIMEOUT_S))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            call = penstock.Generate(
                request, timeout=TIMEOUT_S, metadata=[("authorization", f"Bearer {KEY}")]
            )
            assert list(call)[-1].finish_reason
        assert "tenant ann" in server.wait_line("/penstock.Penstock/Generate 200")


def test_without_grpc_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("penstock.gateway.rpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(OperatorError, match=r"--grpc-port needs gRPC: pip install 'penstock\[grpc\]'"):
        RpcPort(Settings(grpc_port=free_port()))


def test_a_server_without_the_port_imports_no_grpc() -> None:
    code = "import sys, penstock.app.server; print({'grpc', 'google.protobuf'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "set()"
