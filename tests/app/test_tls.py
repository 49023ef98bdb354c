"""HTTPS: a server with a certificate, as KServe's template starts it and asks it, and files that are none."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from loadtests.forked import ForkedServer
from penstock.app import switch
from penstock.app.bench.server_process import ServerProcess
from penstock.app.errors import OperatorError
from penstock.app.listen import certificate_of
from penstock.app.remote import check_stream
from penstock.app.settings import FrontSettings
from tests.app.command import penstock

NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"


def openssl(arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has tls.crt and tls.key as KServe mounts them, other.key, locked.key and both.pem."""
    folder = tmp_path_factory.mktemp("tls")
    subject = "-subj /CN=penstock -addext subjectAltName=IP:127.0.0.1"
    openssl(f"req -x509 {NEW_KEY} -nodes {subject} -keyout {folder}/tls.key -out {folder}/tls.crt")
    openssl(f"ecparam -genkey -name prime256v1 -noout -out {folder}/other.key")
    openssl(f"ec -in {folder}/tls.key -aes256 -passout pass:secret -out {folder}/locked.key")
    both = (folder / "tls.crt").read_text() + (folder / "tls.key").read_text()
    (folder / "both.pem").write_text(both)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    files = ["--ssl-certfile", f"{folder}/tls.crt", "--ssl-keyfile", f"{folder}/tls.key"]
    with ForkedServer(["--health", "ready", "--metrics-port", "0", *files]) as server:
        yield server


def status_of(url: str, path: str, certificate: Path) -> int:
    trusted = ssl.create_default_context(cafile=certificate)
    address = urlsplit(url)
    connection = http.client.HTTPSConnection(
        address.hostname or "", address.port, timeout=60, context=trusted
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_it_says_https_everywhere_and_speaks_it_on_both_ports(server: ServerProcess, folder: Path) -> None:
    urls = [server.wait_line(part).split()[-1] for part in (" metrics on ", " ready in ")]
    assert {urlsplit(url).scheme for url in (server.url, *urls)} == {"https"}
    # What kserve/config/llmisvcconfig/config-llm-template.yaml asks for liveness, readiness and the start.
    assert status_of(server.url, "/health", folder / "tls.crt") == 200
    assert status_of(urls[0], "/metrics", folder / "tls.crt") == 200


def test_a_stream_comes_through_and_who_does_not_trust_it_is_told(
    server: ServerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = penstock("doctor", "--url", server.url)
    assert done.returncode == 1
    assert "is not trusted: self" in done.stdout
    assert "SSL_CERT_FILE" in done.stdout
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "tls.crt"))
    assert "32 tokens in " in str(check_stream(server.url))


def test_it_does_not_answer_plain_http(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()
    connection.close()


def test_one_file_may_have_both(folder: Path) -> None:
    settings = FrontSettings(ssl_certfile=folder / "both.pem")
    assert certificate_of(settings) == {"ssl_certfile": folder / "both.pem", "ssl_keyfile": None}


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("gone.crt", "tls.key", "--ssl-certfile {}/gone.crt: No such file or directory"),
        ("tls.crt", "gone.key", "--ssl-keyfile {}/gone.key: No such file or directory"),
        ("tls.key", "tls.key", "--ssl-certfile {}/tls.key: no certificate in PEM format"),
        ("tls.crt", "tls.crt", "--ssl-keyfile {}/tls.crt: no private key in PEM format"),
        ("tls.crt", None, "--ssl-certfile {}/tls.crt: no private key in PEM format"),
        ("tls.crt", "other.key", "--ssl-keyfile {}/other.key: not the key of the certificate"),
        ("tls.crt", "locked.key", "--ssl-keyfile {}/locked.key: the key has a password; give one without"),
        (None, "tls.key", "--ssl-keyfile {}/tls.key: give --ssl-certfile, too"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_named_before_anything_starts(
    folder: Path, certificate: str | None, key: str | None, message: str
) -> None:
    paths = {"ssl_certfile": certificate, "ssl_keyfile": key}
    settings = FrontSettings.model_validate({name: folder / path for name, path in paths.items() if path})
    with pytest.raises(OperatorError) as told:
        switch.run([], None, settings)
    assert str(told.value) == message.format(folder)
