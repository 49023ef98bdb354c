"""Which addresses a server can be put on, what it calls them, and which of them are open to others."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

import pytest

from penstock.app.errors import OperatorError
from penstock.app.listen import bind, is_loopback, url

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
        parts = urlsplit(url(listener))
        assert (parts.scheme, parts.hostname, parts.path) == ("http", opened, "")
        assert parts.port == listener.getsockname()[1] != 0
        assert is_loopback(listener) is private
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            assert connection.getpeername()[1] == parts.port


def test_localhost_is_private() -> None:
    with bind("localhost", 0) as listener:
        assert is_loopback(listener)


@needs_ipv6
def test_a_port_taken_on_one_family_is_free_on_the_other() -> None:
    with bind("127.0.0.1", 0) as first, bind("::1", first.getsockname()[1]) as second:
        assert urlsplit(url(first)).port == urlsplit(url(second)).port


def test_two_free_ports_are_two() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", 0) as second:
        assert url(first) != url(second)


def test_many_can_wait_at_once() -> None:
    """Nobody accepts yet: that is how it is while the model loads."""
    with bind("127.0.0.1", 0) as listener:
        waiting = [socket.create_connection(listener.getsockname(), timeout=10) for _ in range(200)]
        for connection in waiting:
            connection.close()


def test_the_listener_never_blocks_the_event_loop() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(BlockingIOError):
        listener.accept()


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
