"""Blocks of other servers: right ones are read, and slow, gone or lying servers cost a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection

import pytest

from penstock.engine.tiers import peer
from penstock.engine.tiers.block_file import HEADER_BYTES, BlockKey, digest_of, pack, parse_key
from penstock.engine.tiers.chain import BlockReader, Read, TierChain
from penstock.engine.tiers.host import HostTier
from penstock.engine.tiers.peer import MAX_KEYS, SHUN_S, PeerTier
from tests.clock import Clock

DIGEST = digest_of(["weights", "layout"])
BLOCK_BYTES = 4_096
KEYS = [BlockKey(number.to_bytes(2, "big") * 8) for number in range(MAX_KEYS + 40)]
Answer = Callable[[socket.socket, list[BlockKey]], None]
"""What a server sends when it was asked for these blocks."""


def payload_of(key: BlockKey) -> bytes:
    return key.hash * (BLOCK_BYTES // 16)


def packed(keys: Sequence[BlockKey], digest: bytes = DIGEST) -> bytes:
    return b"".join(pack(key, payload_of(key), digest) for key in keys)


def send(connection: socket.socket, body: bytes, status: str = "200 OK", length: int | None = None) -> None:
    num = len(body) if length is None else length
    connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {num}\r\n\r\n".encode() + body)


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers so, and the heads of the requests that came."""
    heads: list[str] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += connection.recv(65_536)
                    heads.append(head.decode())
                    names = head.split()[1].decode().rpartition("/")[2]
                    answer(connection, [key for key in map(parse_key, names.split(",")) if key is not None])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def tier(clock: Clock | None = None) -> PeerTier:
    return PeerTier(DIGEST, BLOCK_BYTES, {"x-penstock-cluster": "the secret"}, clock or Clock())


def give(connection: socket.socket, keys: list[BlockKey]) -> None:
    send(connection, packed(keys))


def test_blocks_are_read_in_batches_with_the_secret() -> None:
    with serving(give) as (source, heads):
        peers = tier()
        peers.expect(source, KEYS)
        for key in KEYS:
            assert peers.has(key)
            assert bytes(peers.read(key) or b"") == payload_of(key)
            assert not peers.has(key)  # it is the server's own from here on
    assert len(heads) == -(-len(KEYS) // MAX_KEYS)
    assert heads[0].startswith(f"GET /internal/kv/{DIGEST.hex()}/{KEYS[0].text},{KEYS[1].text},")
    assert "x-penstock-cluster: the secret" in heads[0]
    stats = peers.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_failures) == (len(KEYS), 0, 0)
    assert stats.bytes_read == len(KEYS) * BLOCK_BYTES


def test_a_request_asks_for_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_REQUEST_BYTES", 3 * BLOCK_BYTES)
    with serving(give) as (source, heads):
        peers = tier()
        peers.expect(source, KEYS[:7])
        assert all(peers.read(key) for key in KEYS[:7])
    assert len(heads) == 3


def test_what_is_expected_twice_is_asked_for_once() -> None:
    """The first part of a chain is expected while more of it is computed, and then all of it."""
    with serving(give) as (source, heads):
        peers = tier()
        peers.expect(source, KEYS[:4], is_busy=True)
        assert peers.read(KEYS[0]) is not None
        peers.expect(source, KEYS[1:6])
        assert all(peers.read(key) for key in KEYS[1:6])
    names = [head.split()[1].rpartition("/")[2].split(",") for head in heads]
    assert names == [[key.text for key in keys] for keys in (KEYS[:4], KEYS[4:6])]


def test_nothing_is_looked_for_that_is_not_expected() -> None:
    peers = tier()
    assert not peers.has(KEYS[0])
    assert peers.read(KEYS[0]) is None


def test_what_a_server_does_not_have_ends_a_chain_and_is_no_fault() -> None:
    """It has three of them: the first three are read, and nobody asks for those after them."""
    with serving(lambda connection, keys: send(connection, packed(keys[:3]))) as (source, heads):
        peers = tier()
        peers.expect(source, KEYS[:10])
        found = [peers.read(key) is not None for key in KEYS[:4]]
        assert found == [True, True, True, False]
        assert not any(map(peers.has, KEYS))
        peers.expect(source, KEYS[10:11])
        assert peers.has(KEYS[10])  # it is not left alone
    assert len(heads) == 1
    assert peers.stats().num_failures == 0


def other_digest(connection: socket.socket, keys: list[BlockKey]) -> None:
    send(connection, packed(keys, digest_of(["other weights"])))


def other_blocks(connection: socket.socket, keys: list[BlockKey]) -> None:
    send(connection, packed(keys[::-1]))


def damaged(connection: socket.socket, keys: list[BlockKey]) -> None:
    body = bytearray(packed(keys))
    body[HEADER_BYTES] ^= 1
    send(connection, bytes(body))


def too_large(connection: socket.socket, keys: list[BlockKey]) -> None:
    send(connection, pack(keys[0], bytes(BLOCK_BYTES + 1), DIGEST))


def cut_short(connection: socket.socket, keys: list[BlockKey]) -> None:
    send(connection, packed(keys[:1])[:-1], length=HEADER_BYTES + BLOCK_BYTES)


def refusing(connection: socket.socket, _: list[BlockKey]) -> None:
    send(connection, b"", status="401 Unauthorized")


def no_http(connection: socket.socket, _: list[BlockKey]) -> None:
    connection.sendall(b"what?\r\n\r\n")


def hanging_up(connection: socket.socket, _: list[BlockKey]) -> None:
    connection.close()


LIARS = [other_digest, other_blocks, damaged, too_large, cut_short, refusing, no_http, hanging_up]


@pytest.mark.parametrize("answer", LIARS)
def test_a_server_that_lies_is_left_alone_for_a_while(answer: Answer) -> None:
    clock = Clock()
    with serving(answer) as (source, heads):
        peers = tier(clock)
        peers.expect(source, KEYS[:3])
        assert peers.read(KEYS[0]) is None
        assert not any(map(peers.has, KEYS))
        peers.expect(source, KEYS[:3])
        assert not peers.has(KEYS[0])
        assert len(heads) == 1
        clock.now += SHUN_S + 1
        peers.expect(source, KEYS[:3])
        assert peers.has(KEYS[0])
    assert peers.stats().num_failures == 1


def test_what_came_before_a_fault_is_kept() -> None:
    def one_then_other(connection: socket.socket, keys: list[BlockKey]) -> None:
        send(connection, packed(keys[:1]) + packed(keys[1:2], digest_of(["other"])))

    with serving(one_then_other) as (source, _):
        peers = tier()
        peers.expect(source, KEYS[:2])
        assert peers.read(KEYS[0]) is not None
        assert not peers.has(KEYS[1])


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"http://127.0.0.1:{listener.getsockname()[1]}"
    peers = tier()
    peers.expect(source, KEYS[:1])
    assert peers.read(KEYS[0]) is None
    assert peers.stats().num_failures == 1


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SILENT_S", 0.05)
    over = threading.Event()

    def silent(*_: object) -> None:
        over.wait()

    with serving(silent) as (source, _):
        peers = tier()
        peers.expect(source, KEYS[:1])
        assert peers.read(KEYS[0]) is None  # or this would never return
        over.set()
    assert peers.stats().num_failures == 1


def test_a_busy_server_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []

    def connection(host: str, port: int, *, timeout: float) -> HTTPConnection:
        timeouts.append(timeout)
        return HTTPConnection(host, port, timeout=timeout)

    monkeypatch.setattr(peer, "HTTPConnection", connection)
    with serving(give) as (source, _):
        for is_busy in (True, False):
            peers = tier()
            peers.expect(source, KEYS[:1], is_busy=is_busy)
            assert peers.read(KEYS[0]) is not None
    assert timeouts == [peer.BUSY_S, peer.SILENT_S]


def test_a_server_that_stops_in_the_middle_is_given_up_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken to be busy, and given so much time once: no other chain is asked for, but what came is read."""
    monkeypatch.setattr(peer, "SILENT_S", 3600.0)
    monkeypatch.setattr(peer, "BUSY_S", 0.05)
    over = threading.Event()

    def stop_after_two(connection: socket.socket, keys: list[BlockKey]) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n" + packed(keys[:2]))
        over.wait()

    with serving(stop_after_two) as (source, heads):
        peers = tier()
        peers.expect(source, KEYS[:4], is_busy=True)
        peers.expect(source, KEYS[4:8], is_busy=True)
        assert peers.read(KEYS[0]) is not None
        assert [peers.has(key) for key in KEYS[:8]] == [False, True, *[False] * 6]
        assert peers.read(KEYS[1]) is not None
        over.set()
    assert len(heads) == 1
    assert peers.stats().num_failures == 1


def test_a_server_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent for long, and would never be done."""
    monkeypatch.setattr(peer, "ANSWER_S", 0.2)
    over = threading.Event()

    def drip(connection: socket.socket, _: list[BlockKey]) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not over.wait(0.01):
            connection.sendall(b"x: y\r\n"[:1])

    with serving(drip) as (source, _):
        peers = tier()
        peers.expect(source, KEYS[:1])
        assert peers.read(KEYS[0]) is None
        over.set()
    assert peers.stats().num_failures == 1


def test_what_was_expected_is_forgotten_when_its_time_is_over() -> None:
    clock = Clock()
    peers = tier(clock)
    peers.expect("http://127.0.0.1:1", KEYS)
    clock.now += peer.EXPECT_S + 1
    assert not peers.has(KEYS[0])
    assert peers.read(KEYS[0]) is None
    peers.expect("http://127.0.0.1:1", [])
    assert not peers._pulls


def test_the_rate_is_what_was_measured() -> None:
    clock = Clock()
    peers = tier(clock)
    assert peers.rate == peer.NOMINAL_RATE

    def slow(connection: socket.socket, keys: list[BlockKey]) -> None:
        clock.now += 2.0
        give(connection, keys)

    with serving(slow) as (source, _):
        peers.expect(source, KEYS[:4])
        assert all(peers.read(key) for key in KEYS[:4])
    assert peers.rate == pytest.approx(4 * BLOCK_BYTES / 2.0)
    assert peers.read_rate.seconds(BLOCK_BYTES, clock.now) == pytest.approx(2.0 / 4)


def test_the_time_until_a_busy_server_gives_is_not_that_of_reading() -> None:
    """Else reading would seem to take as long as computing, since it goes on step by step."""
    clock = Clock()

    def give_after_a_step(connection: socket.socket, keys: list[BlockKey]) -> None:
        clock.now += 2.0
        give(connection, keys)

    with serving(give_after_a_step) as (source, _):
        peers = tier(clock)
        peers.expect(source, KEYS[:4], is_busy=True)
        assert all(peers.read(key) for key in KEYS[:4])
    assert peers.rate == peer.NOMINAL_RATE
    assert peers.read_rate.seconds(BLOCK_BYTES, clock.now) == 0.0
    assert peers.stats().bytes_read == 4 * BLOCK_BYTES


def test_who_needs_nothing_of_a_silent_server_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "BUSY_S", 60.0)
    monkeypatch.setattr(peer, "ANSWER_S", 60.0)
    over, near = threading.Event(), HostTier(1 << 20)
    near.write(KEYS[-1], b"near")
    come = threading.Semaphore(0)

    def silent(*_: object) -> None:
        over.wait()

    with serving(silent) as (source, _):
        peers = tier()
        reader = BlockReader(TierChain([near, peers], Clock()), BLOCK_BYTES, 1 << 20, come.release)
        reader.start()
        for number in range(4):  # more than there are threads
            peers.expect(source, KEYS[number : number + 1], is_busy=True)
            reader.ask(Read(KEYS[number], None, number, lambda: True))
        reader.ask(Read(KEYS[-1], None, 4, lambda: True))
        assert come.acquire(timeout=10)
        [(read, payload)] = reader.arrivals
        assert (read.place, payload) == (4, b"near")
        over.set()
        reader.close(10)
