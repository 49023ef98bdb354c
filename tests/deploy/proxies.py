"""A real nginx and a real Envoy with the configurations that are shipped, on ports of their own."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

from tests.deploy.files import DEPLOY

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent))
HOST = "llm.example.com"
START_S = 20.0
UPLOAD = (
    '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{}\r\n--x--\r\n'
)
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Proxy:
    """A proxy that listens."""

    port: int
    certificate: Path | None = None
    """What the proxy's own is checked with; None if it speaks no TLS."""
    plain_port: int = 0
    """Where it speaks none beside that."""

    @contextmanager
    def ask(
        self,
        path: str,
        body: bytes | None = None,
        host: str = HOST,
        method: str | None = None,
        kind: str = "application/json",
        origin: str | None = None,
    ) -> Iterator[HTTPResponse]:
        """Asks by the proxy's name."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as plain:
            connection = HTTPConnection(host) if self.certificate is None else HTTPSConnection(host)
            connection.sock = plain
            if self.certificate is not None:
                context = ssl.create_default_context(cafile=str(self.certificate))
                connection.sock = context.wrap_socket(plain, server_hostname=HOST)
            asked = method or ("POST" if body else "GET")
            headers = {"content-type": kind} if origin is None else {"content-type": kind, "origin": origin}
            connection.request(asked, path, body, headers)
            with closing(connection), connection.getresponse() as reply:
                yield reply

    def told(self, path: str, body: Mapping[str, Any] | None = None, method: str | None = None) -> Any:
        """Returns the JSON of a reply, and the headers as `headers`."""
        with self.ask(path, None if body is None else json.dumps(body).encode(), method=method) as reply:
            return {**json.load(reply), "status": reply.status, "headers": reply.headers}

    def upload(self, host: str = HOST, origin: str | None = None) -> tuple[int, Any]:
        """Uploads a file of two bytes as a page of this origin does; returns the status and the JSON of the reply."""
        form = "multipart/form-data; boundary=x"
        with self.ask("/v1/files", UPLOAD.encode(), host, kind=form, origin=origin) as reply:
            return reply.status, json.load(reply) | {"headers": reply.headers}


@contextmanager
def nginx(folder: Path, shipped: str, server: str) -> Iterator[Proxy]:
    """Starts an nginx with a file of deploy/, in front of a server's host and port."""
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
    proxy = Proxy(free_port(), certificate, free_port())
    own = {
        "127.0.0.1:8000": server,
        "listen 80;": f"listen 127.0.0.1:{proxy.plain_port};",
        "listen 443 ": f"listen 127.0.0.1:{proxy.port} ",
        "/etc/nginx/tls": str(folder),
    }
    (folder / "penstock.conf").write_text(replaced(shipped, own))
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    warnings = [
        line for line in tested.stderr.splitlines() if "[warn]" in line and "listen ... http2" not in line
    ]
    assert warnings == []  # but for that form, which old and new versions take
    with running(command, proxy.port, folder / "error.log"):
        yield proxy


@contextmanager
def envoy(folder: Path, shipped: str, server: str) -> Iterator[Proxy]:
    """Starts an Envoy, like `nginx`, without TLS."""
    proxy = Proxy(free_port())
    own = {
        "port_value: 8000": f"port_value: {server.rpartition(':')[2]}",
        "address: 0.0.0.0, port_value: 8080": f"address: 127.0.0.1, port_value: {proxy.port}",
    }
    config, log = folder / "envoy.yaml", folder / "envoy.log"
    config.write_text(replaced(shipped, own))
    command = [str(ENVOY), "-c", str(config), "--concurrency", "1", "-l", "warn", "--log-path", str(log)]
    with running([*command, "--use-dynamic-base-id"], proxy.port, log):
        yield proxy


def replaced(shipped: str, own: Mapping[str, str]) -> str:
    """Returns the text of a file of deploy/ with ports and folders of a test's own."""
    text = (DEPLOY / shipped).read_text()
    for theirs, ours in own.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Runs a program that listens on a port."""
    process = subprocess.Popen(command)
    try:
        end_s = time.monotonic() + START_S
        while not listens(port):
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
