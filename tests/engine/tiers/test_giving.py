"""Blocks for other servers: from the device or a tier, in a row, and nothing where something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence as ListLike

import pytest

from penstock.engine.planning.device import OutOfMemory, Payload
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import NO_LIMIT, Request, Sequence
from penstock.engine.tiers import giving
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.chain import TierChain
from penstock.engine.tiers.giving import Giver
from penstock.engine.tiers.host import HostTier
from penstock.engine.tiers.tier import Tier
from tests.clock import Clock

BLOCK_SIZE = 4
KEPT = b"of the tier"


class NumberCarrier:
    """A block's content is its number."""

    num_bytes, layout = 8, "numbers"

    def __init__(self) -> None:
        self.error: Exception | None = None

    def copy_out(self, pages: list[int]) -> NumberCarrier:
        if self.error is not None:
            raise self.error
        self.blocks = pages
        return self

    def wait(self) -> list[Payload]:
        return [content(block) for block in self.blocks]

    def copy_in(self, pages: list[int], payloads: list[Payload]) -> None:  # noqa: ARG002
        raise AssertionError


def content(block: int) -> bytes:
    return block.to_bytes(8, "little")


class Held:
    """A memory with a chain of some blocks, and one who gives them away."""

    def __init__(
        self,
        num_blocks: int,
        windows: tuple[int, ...] = (0,),
        tiers: ListLike[Tier] = (),
        num_computed: int | None = None,
    ) -> None:
        """With `num_computed`, so many of them are there, and the rest is being computed."""
        self.memory = SequenceMemory(64, BLOCK_SIZE, windows=windows)
        tokens = tuple(range(BLOCK_SIZE * num_blocks))
        sequence = Sequence(
            Request(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1))
        )
        self.memory.start(sequence)
        self.memory.commit(sequence, BLOCK_SIZE * (num_blocks if num_computed is None else num_computed))
        self.table, self.hashes = list(sequence.block_table), list(sequence.block_hashes)
        if num_computed is None:
            self.memory.release(sequence)
        self.carrier = NumberCarrier()
        self.num_wakes = 0
        self.giver = Giver(TierChain(tiers, Clock()), self.carrier, self._wake)
        self.given: list[list[Payload]] = []
        self._come = threading.Event()

    def _wake(self) -> None:
        self.num_wakes += 1

    def ask(self, *keys: BlockKey) -> None:
        self.giver.ask(keys, self._take)

    def _take(self, payloads: list[Payload]) -> None:
        self.given.append(payloads)
        self._come.set()

    def came(self) -> list[Payload]:
        """What the thread has given, after a turn."""
        self.giver.turn(self.memory)
        self.giver.start()
        assert self._come.wait(10)
        self.giver.close()
        [payloads] = self.given
        return payloads


def test_what_is_on_the_device_is_copied_in_order() -> None:
    held = Held(5)
    held.ask(*(BlockKey(held.hashes[i]) for i in (1, 0, 4)))
    assert held.num_wakes == 1
    assert held.came() == [content(held.table[i]) for i in (1, 0, 4)]


def test_blocks_of_a_prompt_are_given_before_the_last_is_computed() -> None:
    held = Held(5, num_computed=2)
    assert held.memory.index.is_pending(held.hashes[2], NO_LIMIT)
    held.ask(*map(BlockKey, held.hashes))
    assert held.came() == [content(held.table[0]), content(held.table[1])]


def test_tables_are_told_apart() -> None:
    held = Held(3, windows=(0, 0))
    held.ask(BlockKey(held.hashes[2], 1), BlockKey(held.hashes[2], 0), BlockKey(held.hashes[0], 2))
    assert held.came() == [content(held.table[5]), content(held.table[4])]


def test_a_row_ends_with_what_is_not_here() -> None:
    held = Held(3)
    held.ask(BlockKey(held.hashes[0]), BlockKey(b"?" * 16), BlockKey(held.hashes[1]))
    assert held.came() == [content(held.table[0])]


def test_what_is_in_a_tier_is_read_from_there() -> None:
    tier = HostTier(1 << 20)
    held = Held(3, tiers=[tier])
    key = BlockKey(b"k" * 16)
    tier.write(key, KEPT)
    held.ask(BlockKey(held.hashes[0]), key, BlockKey(held.hashes[1]))
    assert held.came() == [content(held.table[0]), KEPT, content(held.table[1])]


def test_a_turn_copies_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "_TURN_BYTES", 2 * NumberCarrier.num_bytes)
    held = Held(4)
    for keys in (held.hashes[:1], held.hashes[1:2], held.hashes[:3], [b"?" * 16], held.hashes[3:]):
        held.ask(*map(BlockKey, keys))
    num_left = []
    for _ in range(4):
        held.giver.turn(held.memory)
        num_left.append(len(held.giver._asked))
    assert num_left == [3, 2, 0, 0]


def test_what_cannot_be_copied_is_not_given() -> None:
    held = Held(3)
    held.carrier.error = OutOfMemory("none")
    held.ask(BlockKey(held.hashes[0]))
    assert held.came() == []


def test_who_asks_too_much_or_too_late_is_answered() -> None:
    held = Held(3)
    for _ in range(100):
        held.ask(BlockKey(held.hashes[0]))
    assert 0 < len(held.given) < 100
    held.giver.close()
    assert held.given == [[]] * 100


class Passing(HostTier):
    """Has what others have."""

    keeps = False


def test_nothing_is_passed_on_from_another_server() -> None:
    tier = Passing(1 << 20)
    held = Held(2, tiers=[tier])
    key = BlockKey(b"k" * 16)
    tier.write(key, KEPT)
    held.ask(BlockKey(held.hashes[0]), key)
    assert held.came() == [content(held.table[0])]


def test_blocks_of_private_prompts_are_given_to_nobody() -> None:
    held = Held(3)
    held.memory.private.add(held.table[1])
    held.ask(*map(BlockKey, held.hashes))
    assert held.came() == [content(held.table[0])]
