"""A real nginx with the configuration that is shipped, in front of a real server."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import pytest

from loadtests.forked import ForkedServer
from tests.deploy.files import DEPLOY

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
HOST = "llm.example.com"
MAIN = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/penstock.conf;
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Proxy:
    """An nginx that listens on ports of its own."""

    http: int
    https: int
    certificate: Path

    @contextmanager
    def ask(self, path: str, body: bytes | None = None, host: str = HOST) -> Iterator[HTTPResponse]:
        """Asks over TLS; the certificate is checked for the proxy's name."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        with (
            socket.create_connection(("127.0.0.1", self.https), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as secure,
        ):
            connection = HTTPSConnection(host)
            connection.sock = secure
            connection.request("POST" if body else "GET", path, body, {"content-type": "application/json"})
            with connection.getresponse() as reply:
                yield reply


def start(folder: Path, server_url: str) -> tuple[Proxy, subprocess.Popen[bytes]]:
    key, certificate = folder / "privkey.pem", folder / "fullchain.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={HOST}",
    ]
    request += ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(request, check=True, capture_output=True)
    proxy = Proxy(free_port(), free_port(), certificate)
    text = (DEPLOY / "nginx.conf").read_text()
    for shipped, own in (
        ("127.0.0.1:8000", urlsplit(server_url).netloc),
        ("listen 80;", f"listen 127.0.0.1:{proxy.http};"),
        ("listen 443 ", f"listen 127.0.0.1:{proxy.https} "),
        ("/etc/nginx/tls", str(folder)),
    ):
        assert shipped in text
        text = text.replace(shipped, own)
    (folder / "penstock.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    assert "[warn]" not in tested.stderr
    process = subprocess.Popen(command)
    for _ in range(100):
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", proxy.https)) == 0:
                return proxy, process
        time.sleep(0.05)
    process.kill()
    raise AssertionError((folder / "error.log").read_text())


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In front of a server without keys that was told the proxy's name."""
    with ForkedServer(["--allowed-hosts", HOST]) as server:
        found, process = start(tmp_path_factory.mktemp("nginx"), server.url)
        yield found
        process.terminate()
        process.wait()


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


def test_plain_http_is_sent_to_tls(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.http), timeout=10) as plain:
        plain.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        head = plain.recv(4096).decode()
    assert head.startswith("HTTP/1.1 308 ")
    assert f"Location: https://{HOST}/v1/chat/completions\r\n" in head


def test_the_operators_paths_are_open_to_this_machine(proxy: Proxy) -> None:
    with proxy.ask("/metrics") as reply:
        assert b"penstock_" in reply.read()
