"""Which addresses a server can be put on, what it calls them, and which of them are open to others."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.app.errors import OperatorError
from penstock.app.listen import bind, check_exposure, is_loopback, port_of, url
from penstock.app.settings import FrontSettings

pytestmark = pytest.mark.anyio


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "opened", "private"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.2", True),
        ("0.0.0.0", "127.0.0.1", False),
        pytest.param("::1", "::1", True, marks=needs_ipv6),
        pytest.param("::", "::1", False, marks=needs_ipv6),
    ],
)
def test_the_url_can_be_opened_from_here(host: str, opened: str, private: bool) -> None:
    with bind(host, 0) as listener:
        parts = urlsplit(url(listener, FrontSettings()))
        assert (parts.scheme, parts.hostname, parts.path) == ("http", opened, "")
        assert parts.port == port_of(listener) == listener.getsockname()[1] != 0
        assert is_loopback(listener) is private
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            assert connection.getpeername()[1] == parts.port


def test_localhost_is_private() -> None:
    with bind("localhost", 0) as listener:
        assert is_loopback(listener)


def test_many_can_wait_at_once() -> None:
    """Nobody accepts yet: that is how it is while the model loads."""
    with bind("127.0.0.1", 0) as listener:
        waiting = [socket.create_connection(listener.getsockname(), timeout=10) for _ in range(200)]
        for connection in waiting:
            connection.close()


async def test_a_token_does_not_wait_for_the_client_s_word_on_the_last_one() -> None:
    """Under asyncio's own loop, too."""
    taken = asyncio.get_running_loop().create_future()
    with bind("127.0.0.1", 0) as listener:
        server = await asyncio.start_server(lambda _, writer: taken.set_result(writer), sock=listener)
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await taken
            assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for end in (writer, client):
                end.close()
                await end.wait_closed()


def test_a_second_server_on_the_port_is_refused() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OperatorError, match=f"--port {port}: another program"):
            bind("127.0.0.1", port)


def test_a_port_can_be_taken_again_at_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            listener.accept()[0].close()
    with bind("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize("host", ["256.1.1.1", "not an address", "127.0.0.1:80", "http://127.0.0.1"])
def test_what_is_no_address_is_told(host: str) -> None:
    with pytest.raises(OperatorError) as caught:
        bind(host, 0)
    assert str(caught.value) == f"--host {host}: not an address of this machine"


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EADDRINUSE, "--port 80: another program listens there already; stop it or take another port"),
        (errno.EACCES, "--port 80: this user may not listen there; take a port from 1024 on"),
        (errno.EADDRNOTAVAIL, "--host 127.0.0.1: not an address of this machine (refused)"),
    ],
)
def test_a_refusal_names_the_setting_and_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    closed = list[socket.socket]()

    class Refused(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError(number, "refused")

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(OperatorError) as caught:
        bind("127.0.0.1", 80)
    assert str(caught.value) == told
    assert [listener.fileno() for listener in closed] == [-1]


@pytest.mark.parametrize(
    ("host", "settings", "warnings"),
    [
        ("127.0.0.1", {}, []),
        ("127.0.0.1", {"insecure": True}, []),
        ("0.0.0.0", {"api_keys_file": Path("keys")}, []),
        ("0.0.0.0", {"insecure": True}, ["--insecure: whoever reaches 0.0.0.0 can use this server"]),
    ],
)
def test_who_may_reach_it_is_what_was_asked_for(
    host: str, settings: dict[str, Any], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with bind(host, 0) as listener:
        check_exposure(listener, FrontSettings(host=host, **settings))
    assert caplog.messages == warnings


def test_nobody_lets_everybody_in_unasked() -> None:
    said = "--host 0.0.0.0: whoever reaches it could use this server; give --api-keys-file"
    with bind("0.0.0.0", 0) as listener, pytest.raises(OperatorError) as caught:
        check_exposure(listener, FrontSettings(host="0.0.0.0"))
    assert str(caught.value) == f"{said} (`penstock key` makes keys), or say --insecure"
