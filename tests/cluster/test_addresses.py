"""Where replicas are: what is an address, replicas behind TLS, and the secret that they know a switch by."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.app.switch import ReplicasFile, make_switch
from penstock.cluster import upstream
from penstock.cluster.members import parse_address
from penstock.cluster.upstream import Address
from penstock.gateway.wire.frames import DONE
from tests.cluster.scripted_replicas import PATIENCE_S, Call, FixedPicker, RelayApp, replica
from tests.cluster.test_relay import asked
from tests.cluster.test_switch import SECRET, cluster, make_gateway, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8001", Address("127.0.0.1", 8001)),
        ("gpu-1:8001", Address("gpu-1", 8001)),
        ("http://[::1]:8001/", Address("::1", 8001)),
        ("https://gpu-1:443", Address("gpu-1", 443, is_tls=True)),
    ],
)
def test_an_address_is_a_host_and_a_port(given: str, meant: Address) -> None:
    assert parse_address(given) == meant
    assert parse_address(str(meant)) == meant


@pytest.mark.parametrize(
    "given", ["http://gpu-1", "ftp://gpu-1:21", "unix:///run/x", "http://gpu-1:8001/v1", "gpu-1:x"]
)
def test_what_is_none_is_refused_by_name(given: str, tmp_path: Path) -> None:
    named = tmp_path / "replicas"
    named.write_text(f"# ours\n{given}\n")
    with pytest.raises(OperatorError, match=r"not like http://HOST:PORT or https://HOST:PORT"):
        ReplicasFile((), named).read()


def test_a_switch_without_a_secret_says_what_it_needs() -> None:
    with pytest.raises(OperatorError, match="the same PENSTOCK_CLUSTER_SECRET, of at least 16 characters"):
        make_switch(Settings.load({}), None, is_open=True)


async def test_the_secret_stands_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with cluster(
        make_gateway("a"), make_gateway("b", cluster_secret="another secret"), ready=1
    ) as found:
        await until(lambda: "does not take this switch's secret" in caplog.text)
        await found.chat()
    assert SECRET not in caplog.text
    assert "another secret" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=replica"
    made = f"openssl req -x509 {kind} -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt"
    subprocess.run(made.split(), check=True, capture_output=True, timeout=PATIENCE_S)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.fixture
def served(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture(autouse=True)
def _own_context() -> Iterator[None]:
    upstream.tls_context.cache_clear()
    yield
    upstream.tls_context.cache_clear()


async def whole(call: Call) -> None:
    call.reply()
    call.end(b"data: 1\n\n", DONE)


async def test_a_replica_behind_tls_is_read_like_any_other(
    certificate: Path, served: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with replica(whole, served) as address:
        assert str(address).startswith("https://")
        reply = await asked(RelayApp(FixedPicker(address)))
    assert reply.content == b"data: 1\n\n" + DONE


async def test_a_certificate_that_nobody_signed_and_no_tls_are_told(
    served: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(whole, served) as unsigned, cluster(make_gateway("a")) as found:
        plain = found.addresses["a"]
        bare = Address(plain.host, plain.port, is_tls=True)
        await found.switch.members.set([plain, unsigned, bare])
        await until(lambda: f"{bare} is left out" in caplog.text and f"{unsigned} is left out" in caplog.text)
        assert f"replica {unsigned} is left out: its certificate is not to be trusted: self" in caplog.text
        assert f"replica {bare} is left out: it does not speak TLS" in caplog.text
