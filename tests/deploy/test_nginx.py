"""A real nginx with the configuration that is shipped, in front of a real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from statistics import median
from urllib.parse import urlsplit

import pytest

from loadtests.forked import ForkedServer
from tests.deploy.proxies import HOST, NGINX, Proxy, nginx

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In front of a server without keys that was told the proxy's name."""
    with (
        ForkedServer(["--allowed-hosts", HOST]) as server,
        nginx(tmp_path_factory.mktemp("nginx"), "nginx.conf", urlsplit(server.url).netloc) as found,
    ):
        yield found


def test_a_stream_passes_as_it_comes(proxy: Proxy) -> None:
    """Parts do not wait until a buffer of some KiB is full; a busy machine may bring some of them together."""
    body = {"model": "penstock-demo", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with proxy.ask("/v1/completions", json.dumps(body).encode()) as reply:
        assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        parts = [*iter(reply.read1, b"")]
    assert b"data: [DONE]" in b"".join(parts)
    assert median(map(len, parts)) < 1024


def test_a_body_beyond_the_limit_is_refused_by_the_server_in_its_own_words(proxy: Proxy) -> None:
    body = json.dumps({"model": "penstock-demo", "prompt": "x" * (5 * 1024 * 1024)}).encode()
    with proxy.ask("/v1/completions", body) as reply:
        assert reply.status == 413
        assert json.load(reply)["error"]["code"] == "body_too_large"


def test_a_host_that_was_not_allowed_is_refused(proxy: Proxy) -> None:
    for host, status in ((HOST, 200), ("other.example.com", 421)):
        with proxy.ask("/v1/models", host=host) as reply:
            assert reply.status == status


@pytest.mark.parametrize("host", [HOST, f"{HOST}:8443"])
def test_a_page_uploads_to_its_own_origin_whatever_the_port(host: str, proxy: Proxy) -> None:
    assert proxy.upload(host, f"https://{host}")[0] == 200
    assert proxy.upload(host, "https://other.example.com")[0] == 403


def test_plain_http_is_sent_to_tls(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.plain_port), timeout=10) as plain:
        plain.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        head = plain.recv(4096).decode()
    assert head.startswith("HTTP/1.1 308 ")
    assert f"Location: https://{HOST}/v1/chat/completions\r\n" in head


def test_the_operators_paths_are_open_to_this_machine(proxy: Proxy) -> None:
    with proxy.ask("/metrics") as reply:
        assert b"penstock_" in reply.read()
