"""Measures a router: time per choice of a replica, time per push, and memory per block that it knows."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from random import Random

from penstock.app.bench.statistics import percentile
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.room import Held
from penstock.priority.routing.index import BlockIndex
from penstock.priority.routing.router import Placement, RouteQuery, Router
from penstock.priority.routing.state import HASH_BYTES, Change, LaneWork, Load, Snapshot
from penstock.priority.verdict import Refusal

_BLOCK_SIZE = 16
_SYSTEM_BLOCKS = 32
_TURN_BLOCKS = 12
_NUM_SYSTEMS = 50
_RETURNING = 0.2
"""Part of the requests that are a further turn of one of the last sessions."""
_RECENT = 20_000
_NUM_LOADS = 64
_QUANTILES = (50, 90, 99)


def measure_routing(
    num_replicas: int = 1_000,
    num_sessions: int = 1_000_000,
    num_held: int = 2_000,
    num_blocks: int = 200_000,
    num_kept: int = 1_000_000,
) -> dict[str, float]:
    """Sessions with shared system prompts, on fake replicas that each have two requests open on average.

    Sessions are made while they come; their hashes are made outside what is timed. Times are those of the processor.

    Args:
        num_held: blocks in the cache of a replica; the least used goes first.
        num_blocks: that the memory per block is measured with.
        num_kept: sessions whose every block some replica holds, for the memory that they take all together.
    """
    fleet = _Fleet(num_replicas, num_held)
    fleet.run(num_sessions)
    figures = {
        "replicas": num_replicas,
        "sessions": num_sessions,
        "decisions": len(fleet.choices_us),
        "blocks": fleet.router.index.num_blocks,
        "hit_rate": fleet.num_hit / fleet.num_prompt,
        "push_p50_us": percentile(fleet.pushes_us, 50),
        "block_bytes": _block_bytes(num_blocks, [0]),
        "shared_block_bytes": _block_bytes(num_blocks, [0, num_replicas - 1]),
    }
    figures |= _kept(num_kept, num_replicas)
    return figures | {f"choice_p{q}_us": percentile(fleet.choices_us, q) for q in _QUANTILES}


class _Fleet:
    """A router, and replicas that have nothing but a cache."""

    def __init__(self, num_replicas: int, num_held: int) -> None:
        self.router = Router()
        self.choices_us: list[float] = []
        self.pushes_us: list[float] = []
        self.num_hit = self.num_prompt = 0
        self._rng = Random(0)
        self._loads = [_load(self._rng) for _ in range(_NUM_LOADS)]
        self._num_held = num_held
        self._open: deque[tuple[Placement, list[bytes]]] = deque()
        self._caches: dict[str, OrderedDict[bytes, None]] = {}
        self._numbers: dict[str, int] = {}
        for number in range(num_replicas):
            name = f"replica-{number}"
            self._caches[name], self._numbers[name] = OrderedDict(), 0
            self.router.on_snapshot(_snapshot(name, self._rng.choice(self._loads)), 0.0)

    def run(self, num_sessions: int) -> None:
        recent: list[tuple[int, int]] = []
        num_begun = 0
        gc.disable()  # as in a server, whose garbage is collected between requests
        while num_begun < num_sessions:
            if recent and self._rng.random() < _RETURNING:
                place = self._rng.randrange(len(recent))
                session, num_turns = recent[place]
                recent[place] = session, num_turns + 1
            else:
                session, num_turns = num_begun, 1
                num_begun += 1
                if len(recent) < _RECENT:
                    recent.append((session, 1))
                else:
                    recent[self._rng.randrange(_RECENT)] = session, 1
            self._ask(_chain(session, num_turns))
        gc.enable()

    def _ask(self, hashes: list[bytes]) -> None:
        num_prompt = len(hashes) * _BLOCK_SIZE + 1
        ask = RouteQuery(lane=Lane.INTERACTIVE, tenant="a", num_prompt=num_prompt, hashes=hashes)
        started = time.thread_time()
        choice = self.router.choose(ask, 0.0)
        self.choices_us.append((time.thread_time() - started) * 1e6)
        assert not isinstance(choice, Refusal)
        self.num_hit += choice.num_cached
        self.num_prompt += num_prompt
        self._open.append((choice, hashes))
        if len(self._open) > 2 * len(self._caches):
            self._serve(*self._open.popleft())

    def _serve(self, choice: Placement, hashes: list[bytes]) -> None:
        change = self._change(choice.replica, hashes, choice.ticket)
        started = time.thread_time()
        self.router.on_change(choice.replica, change, 0.0)
        self.pushes_us.append((time.thread_time() - started) * 1e6)
        self.router.note_done(choice.ticket)

    def _change(self, name: str, hashes: list[bytes], ticket: int) -> Change:
        cache = self._caches[name]
        stored = [known for known in hashes if known not in cache]
        for known in reversed(hashes):  # the ends of chains are the first to go
            cache[known] = None
            cache.move_to_end(known)
        removed = [cache.popitem(last=False)[0] for _ in range(len(cache) - self._num_held)]
        self._numbers[name] += 1
        return Change(
            epoch="first",
            number=self._numbers[name],
            load=self._rng.choice(self._loads),
            stored=stored,
            removed=removed,
            counted=[ticket],
        )


def _chain(session: int, num_turns: int) -> list[bytes]:
    own = [_hash(session, i) for i in range(num_turns * _TURN_BLOCKS)]
    return [*_instructions(session % _NUM_SYSTEMS), *own]


@cache
def _instructions(system: int) -> list[bytes]:
    return [_hash(system, -1 - i) for i in range(_SYSTEM_BLOCKS)]


def _hash(name: int, place: int) -> bytes:
    return blake2b(b"%d/%d" % (name, place), digest_size=HASH_BYTES).digest()


def _load(rng: Random) -> Load:
    lanes = {
        lane: LaneWork(
            queued={"a": rng.randrange(1_000), "b": rng.randrange(1_000)},
            num_waiting=2,
            num_running=rng.randrange(20),
            num_prefill_left=rng.randrange(1_000),
            is_lively=True,
        )
        for lane in Lane
    }
    endings = [(10.0 * i, 1_000.0, 1.0) for i in range(20)]
    held = Held(num_running=20, num_kv=20_000, endings=endings, growth=1.0, life_steps=200.0)
    return Load(
        lanes=lanes,
        coefficients=(7e-3, 28e-6, 20e-6, 40e-9, 1e-9),
        num_free_kv=300_000,
        held=held,
        step_s=0.01,
    )


def fake_snapshot(name: str, model: str = "fake") -> Snapshot:
    """The snapshot of a busy replica that does not exist."""
    return _snapshot(name, _load(Random(0)), model)


def _snapshot(name: str, load: Load, model: str = "fake") -> Snapshot:
    return Snapshot(
        replica=name,
        epoch="first",
        model=model,
        block_size=_BLOCK_SIZE,
        num_kv_tokens=400_000,
        max_batch_tokens=2_048,
        max_num_seqs=192,
        policies=DEFAULT_POLICIES,
        load=load,
    )


def _block_bytes(num_blocks: int, slots: Sequence[int]) -> float:
    """Memory that the index takes for a block that the replicas of these slots hold."""
    hashes = [_hash(i, 0) for i in range(num_blocks)]
    tracemalloc.start()
    index = BlockIndex()
    for slot in slots:
        index.add(hashes, 1 << slot)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / index.num_blocks + sys.getsizeof(hashes[0])


def _kept(num_sessions: int, num_replicas: int) -> dict[str, float]:
    """Measures the index when each replica holds the first turns of its share of so many sessions."""
    index = BlockIndex()
    for session in range(num_sessions):
        index.add(_chain(session, 1), 1 << session % num_replicas)
    # Small integers and those that several blocks share are counted once.
    sets = {id(held): sys.getsizeof(held) for shard in index.shards for held in shard.values()}
    tables = sum(sys.getsizeof(shard) for shard in index.shards)
    hashes = sys.getsizeof(_hash(0, 0)) * index.num_blocks
    return {
        "kept_sessions": num_sessions,
        "kept_blocks": index.num_blocks,
        "kept_part": index.limit / index.num_parts,
        "kept_bytes": tables + hashes + sum(sets.values()),
    }
