"""A real nginx and a real Envoy pass requests to two real servers, and ask a real switch which one gets each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess, samples
from tests.deploy.proxies import ENVOY, HOST, NGINX, Proxy, envoy, free_port, nginx

SECRET = "a secret of the tests"
CHAT = "/v1/chat/completions"
MODEL = "penstock-demo"


class Cluster:
    """Two servers, a switch that is only asked, and the proxies that ask it."""

    def __init__(self, folder: Any, stack: ExitStack) -> None:
        own = ["--cluster-secret", SECRET, "--threads", "1"]
        self.replicas: dict[str, ServerProcess] = {}
        for name in ("r0", "r1"):
            self.replicas[name] = ForkedServer([*own, "--replica", name])
            stack.callback(self.replicas[name].stop)
        addresses = [replica.url for replica in self.replicas.values()]
        command = (sys.executable, "-m", "penstock", "switch", *addresses)
        self.switch = ForkedServer(["--cluster-secret", SECRET, "--allowed-hosts", HOST], command)
        stack.callback(self.switch.stop)
        for address in addresses:
            self.switch.wait_line(f"replica {address} is there")
        server = urlsplit(self.switch.url).netloc
        self.proxies: dict[str, Proxy] = {}
        if NGINX is not None:
            started = nginx(folder.mktemp("nginx"), "nginx-switch.conf", server)
            self.proxies["nginx"] = stack.enter_context(started)
        if ENVOY is not None:
            started = envoy(folder.mktemp("envoy"), "envoy-switch.yaml", server)
            self.proxies["envoy"] = stack.enter_context(started)

    def num_pulled(self) -> float:
        """Prompt tokens that replicas were to take from each other."""
        found = [one for one in samples(self.switch.url) if one.name == "penstock_switch_pulled_tokens_total"]
        return sum(one.value for one in found)

    def proxy(self, name: str) -> Proxy:
        if name not in self.proxies:
            pytest.skip(f"needs {name}")
        return self.proxies[name]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory, stack)


both = pytest.mark.parametrize("name", ["nginx", "envoy"])


def turn(proxy: Proxy, *texts: str) -> tuple[str, str, int, int]:
    """Who answered a conversation of these texts, with what, and of how many tokens it had how many in its cache."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    told = proxy.told(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0})
    assert told["status"] == 200, told
    text = told["choices"][0]["message"]["content"]
    timings = told["timings"]
    return told["headers"]["x-penstock-replica"], text, timings["cached_tokens"], timings["prompt_tokens"]


@both
def test_a_conversation_goes_on_where_its_beginning_is_cached(name: str, cluster: Cluster) -> None:
    proxy = cluster.proxy(name)
    # Long enough for what is cached, and what is under way, to outweigh what else the replicas have to do.
    texts = [f"{number} {name} " + "tell me of a fox that meets a wolf. " * 120 for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        begun = [*zip(texts, pool.map(partial(turn, proxy), texts), strict=True)]
    assert {replica for _, (replica, *_) in begun} == {"r0", "r1"}
    for text, (replica, answer, _, num_prompt) in begun:
        num_pulled = cluster.num_pulled()
        again, _, num_cached, _ = turn(proxy, text, answer, "And then?")
        if again == replica:
            assert num_cached == num_prompt // 16 * 16
        else:  # that one was slow for a while: only then is its KV taken from it
            assert cluster.num_pulled() - num_pulled >= num_prompt // 16 * 16


@both
def test_a_stream_passes_as_it_comes(name: str, cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with cluster.proxy(name).ask("/v1/completions", json.dumps(body).encode()) as reply:
        assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        parts = [*iter(reply.read1, b"")]
    assert b"data: [DONE]" in b"".join(parts)
    assert median(map(len, parts)) < 1024


@both
@pytest.mark.parametrize("owner", ["r0", "r1"])
def test_a_resumable_stream_is_followed_and_forgotten_at_its_owner(
    name: str, owner: str, cluster: Cluster
) -> None:
    proxy = cluster.proxy(name)
    body = {"model": MODEL, "prompt": f"{name} {owner}", "max_tokens": 24, "ignore_eos": True, "stream": True}
    replica = Proxy(cluster.replicas[owner].port)
    asked = json.dumps({**body, "stream_options": {"resumable": True}}).encode()
    with replica.ask("/v1/completions", asked, host="localhost") as reply:
        text = reply.read().decode()
    path = f"/v1/completions/{re.findall(r'cmpl-[0-9a-f]+', text)[0]}"
    with proxy.ask(f"{path}?stream=true&starting_after=0") as reply:
        assert reply.headers["x-penstock-replica"] == owner
        assert reply.read().decode() == text[text.index("\n\nid: ") + 2 :]
    assert proxy.told(path, method="DELETE")["deleted"]
    assert proxy.told(path)["status"] == 404


@both
def test_what_is_refused_is_refused_in_the_servers_own_words(name: str, cluster: Cluster) -> None:
    proxy = cluster.proxy(name)
    wrong = proxy.told(CHAT, {"model": MODEL})
    assert (wrong["status"], wrong["error"]["param"]) == (400, "messages")
    hidden = proxy.told("/internal/state")
    assert (hidden["status"], hidden["error"]["code"]) == (404, "not_found")
    with proxy.ask("/v1/models", host="other.example.com") as reply:
        assert reply.status == 421
    with proxy.ask("/v1/completions", b"x" * (5 * 1024 * 1024)) as reply:
        assert reply.status == 413


@both
def test_what_is_uploaded_goes_to_a_replica(name: str, cluster: Cluster) -> None:
    status, file = cluster.proxy(name).upload()
    assert (status, file["bytes"]) == (200, 2)
    assert file["headers"]["x-penstock-replica"] in ("r0", "r1")


@both
def test_a_page_uploads_to_its_own_origin_whatever_the_port(name: str, cluster: Cluster) -> None:
    proxy = cluster.proxy(name)
    scheme = "https" if proxy.certificate else "http"
    for host in (HOST, f"{HOST}:8443"):
        assert proxy.upload(host, f"{scheme}://{host}")[0] == 200
        assert proxy.upload(host, "https://other.example.com")[0] == 403


def test_after_a_kill_conversations_go_on_elsewhere(cluster: Cluster) -> None:
    """The last test of this module: a replica is gone after it."""
    names = [name for name in ("nginx", "envoy") if name in cluster.proxies]
    text = "Tell me once more of the wolf that met a fox in a wood by the sea."
    lost, answer, *_ = turn(cluster.proxy(names[0]), text)
    url = cluster.replicas[lost].url
    cluster.replicas[lost].kill()
    cluster.switch.wait_line(f"replica {url} is left out")
    for name in names:
        assert turn(cluster.proxy(name), text, answer, "And then?")[0] != lost


# What nginx does where the chosen replica is gone already


class Scripted(BaseHTTPRequestHandler):
    """A switch that sends the first request for a path to a port that nobody listens on, and the next one here."""

    protocol_version = "HTTP/1.1"
    asked: list[str]
    dead: int
    server: ThreadingHTTPServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers: Mapping[str, str] = {}
        if self.path.startswith("/choose"):
            body, is_first = b"", self.path not in self.asked
            self.asked.append(self.path)
            port = self.dead if is_first else self.server.server_port
            headers = {"x-accel-redirect": "@replica", "x-penstock-address": f"http://127.0.0.1:{port}"}
            if "batches" in self.path:
                headers = {**headers, "x-penstock-once": "1"}
        self.send_response(200)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def scripted() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    kind = type("Asked", (Scripted,), {"asked": asked, "dead": free_port()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_nginx_asks_again_where_a_replica_is_gone_but_for_what_is_done_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        scripted() as (server, asked),
        nginx(tmp_path_factory.mktemp("n"), "nginx-switch.conf", server) as proxy,
    ):
        for path, status, num_asked in ((CHAT, 200, 2), ("/v1/batches", 502, 1)):
            with proxy.ask(path, b"{}") as reply:
                assert reply.status == status
                assert status != 200 or reply.read() == b"{}"
            assert asked.count(f"/choose{path}") == num_asked
