"""The listening socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.app.errors import OperatorError
from penstock.app.listen import bind, check_exposure, is_loopback, port_of, url
from penstock.app.settings import FrontSettings

pytestmark = pytest.mark.anyio


def test_a_free_port_is_taken_and_named() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert port_of(listener) == listener.getsockname()[1]
        assert is_loopback(listener)


def test_whoever_connects_waits() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as connection:
        assert connection.getpeername() == listener.getsockname()


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


def test_all_addresses_are_opened_through_this_machine_s_own() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not is_loopback(listener)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6_addresses_stand_in_brackets() -> None:
    with bind("::1", 0) as listener:
        assert url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


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


def test_an_address_of_elsewhere_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"--host 192\.0\.2\.1: not an address of this machine"):
        bind("192.0.2.1", 0)


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
