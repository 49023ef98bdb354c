"""What other servers are given: the contents of blocks that are on this one's device, or in tiers of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from queue import SimpleQueue

from penstock.engine.planning.device import DeviceError, PageCarrier, Payload, Staged
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.chain import TierChain

log = logging.getLogger("penstock.engine")

_MOST_ASKED = 64
"""Requests of other servers that may wait; more are given nothing."""
_TURN_BYTES = 64 << 20
"""The bytes after which a turn copies nothing for further requests, so that running streams go on."""
Given = Callable[[list[Payload]], object]
"""Takes the contents of the first of the blocks that were asked for, up to the first that is not here."""


@dataclass(slots=True)
class _Gift:
    """Blocks that another server asked for."""

    keys: ListLike[BlockKey]
    done: Given
    on_device: dict[int, int] = field(default_factory=dict)
    """By the place of a key, the place of its block in `staged`."""
    staged: Staged | None = None


class Giver:
    """Copies blocks on the step thread, and reads tiers in a thread of its own."""

    def __init__(self, chain: TierChain, carrier: PageCarrier, wake: Callable[[], None]) -> None:
        """`wake` is called when somebody has asked."""
        self._chain, self._carrier, self._wake = chain, carrier, wake
        self._most_copied = max(1, _TURN_BYTES // max(1, carrier.num_bytes))
        self._asked: deque[_Gift] = deque()
        self._copied: SimpleQueue[_Gift | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-kv-giver", daemon=True)

    def ask(self, keys: ListLike[BlockKey], done: Given) -> None:
        """Has blocks given, for any thread; `done` is called once, from any thread."""
        if len(self._asked) >= _MOST_ASKED:
            done([])
            return
        self._asked.append(_Gift(keys, done))
        self._wake()

    def turn(self, memory: SequenceMemory) -> bool:
        """Copies the blocks of the first requests, for the step thread; returns whether there are more requests.

        What can be found is confirmed, and nobody writes it before the next step is launched. Blocks of private prompts
        are given to nobody.
        """
        num_copied = 0
        while self._asked and num_copied < self._most_copied:
            num_copied += self._copy(memory, self._asked.popleft())
        return bool(self._asked)

    def _copy(self, memory: SequenceMemory, gift: _Gift) -> int:
        """Copies what is on the device of one request; returns how many blocks that were."""
        blocks: list[int] = []
        for place, key in enumerate(gift.keys):
            block = memory.index.block_of(*key) if key.table < memory.num_tables else None
            if block is not None and block not in memory.private:
                gift.on_device[place] = len(blocks)
                blocks.append(block)
            elif not self._is_kept(key):
                gift.keys = gift.keys[:place]
                break
        try:
            if blocks:
                gift.staged = self._carrier.copy_out(blocks)
        except DeviceError:
            gift.done([])
            raise
        except Exception as error:
            log.warning("%d KV blocks could not be copied for another server: %s", len(blocks), error)
            gift.keys = []
        self._copied.put(gift)
        return len(blocks)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread when it has given what was copied; whoever asked and was not served is given nothing."""
        while self._asked:
            self._asked.popleft().done([])
        self._copied.put(None)

    def _run(self) -> None:
        while (gift := self._copied.get()) is not None:
            self.give(gift)

    def give(self, gift: _Gift) -> None:
        payloads: list[Payload] = []
        try:
            staged = [] if gift.staged is None else gift.staged.wait()
            for place, key in enumerate(gift.keys):
                at = gift.on_device.get(place)
                payload = self._chain.read(key) if at is None else staged[at]
                if payload is None:
                    break
                payloads.append(payload)
        except Exception:
            log.exception("KV blocks could not be given to another server")
        gift.done(payloads)

    def _is_kept(self, key: BlockKey) -> bool:
        return any(tier.keeps and tier.has(key) for tier in self._chain.tiers)
