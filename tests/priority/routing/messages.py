"""Messages of replicas for tests of routing; they differ in the given fields alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.room import Held
from penstock.priority.routing.router import RouteQuery
from penstock.priority.routing.state import Change, LaneWork, Load, Role, Snapshot
from tests.priority.simulated_engine import COEFFICIENTS

BLOCK_SIZE = 16
MEASURED = tuple(COEFFICIENTS.values())


def chain(name: str, num_blocks: int) -> list[bytes]:
    """Hashes of a chain; equal names, equal chains as far as both go."""
    return [blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(num_blocks)]


def load(
    lanes: Mapping[Lane, LaneWork] | None = None,
    *,
    queued: int = 0,
    num_free_kv: int = 400_000,
    num_running: int = 0,
    coefficients: tuple[float, ...] = MEASURED,
    is_draining: bool = False,
    pull_rate: float = 0.0,
) -> Load:
    """`queued` tokens of tenant a wait in the interactive lane, unless all lanes are given."""
    interactive = LaneWork(queued={"a": queued} if queued else {}, num_waiting=int(queued > 0))
    return Load(
        lanes={lane: LaneWork() for lane in Lane} | {Lane.INTERACTIVE: interactive} | dict(lanes or {}),
        coefficients=coefficients,
        num_free_kv=num_free_kv,
        held=Held(
            num_running=num_running,
            num_kv=400_000 - num_free_kv,
            endings=[(1_000.0 * i, 20_000.0, 10.0) for i in range(1, 21)],
            life_steps=2_000.0,
        ),
        is_draining=is_draining,
        pull_rate=pull_rate,
    )


def snapshot(
    name: str,
    state: Load | None = None,
    *,
    blocks: Sequence[bytes] = (),
    model: str = "demo",
    policies: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
    role: Role = Role.BOTH,
) -> Snapshot:
    return Snapshot(
        replica=name,
        epoch=f"{name}, first",
        model=model,
        block_size=BLOCK_SIZE,
        num_kv_tokens=400_000,
        max_batch_tokens=2_048,
        max_num_seqs=192,
        policies=policies,
        load=state or load(),
        blocks=blocks,
        role=role,
    )


def change(
    name: str,
    number: int,
    state: Load | None = None,
    *,
    stored: Sequence[bytes] = (),
    removed: Sequence[bytes] = (),
    counted: Sequence[int] = (),
) -> Change:
    return Change(
        epoch=f"{name}, first", number=number, load=state, stored=stored, removed=removed, counted=counted
    )


def ask(
    hashes: Sequence[bytes] = (),
    *,
    num_prompt: int | None = None,
    lane: Lane = Lane.INTERACTIVE,
    tenant: str = "a",
    waited_s: float = 0.0,
    **promise: Any,
) -> RouteQuery:
    """A prompt of exactly these blocks and a few tokens, or of so many tokens."""
    length = BLOCK_SIZE * len(hashes) + 5 if num_prompt is None else num_prompt
    return RouteQuery(
        lane=lane, tenant=tenant, num_prompt=length, hashes=hashes, waited_s=waited_s, **promise
    )
