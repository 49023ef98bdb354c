"""The prefix index: which full block holds which tokens in which context.

A block's hash covers its parent's hash and its own tokens, so equal hashes mean equal tokens from the start on
(BLAKE2b, 128 bits). The chain of a request starts with its salt: other tenants' chains never meet it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from hashlib import blake2b
from itertools import islice

from penstock.engine.planning.request import Request, Sequence

PRIVATE = b"\0private"
"""The end of the salts of private prompts: their tokens, and what is computed of them, never leave the process."""

_REMEMBERED = 4096
"""The blocks that were dropped last, by which what was looked up before is brought up to date."""


def chain_start(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=16, person=b"penstock.kv").digest()


def block_hash(parent: bytes, token_ids: TokenIds[int]) -> bytes:
    """Returns the hash of a full block that follows `parent`: the hash before it, or `chain_start` for the first."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: TokenIds[int], num_blocks: int, block_size: int, salt: bytes
) -> None:
    """Grows `hashes` to the hashes of the first `num_blocks` full blocks of `token_ids`."""
    first = len(hashes)
    if first >= num_blocks:
        return
    parent = hashes[-1] if hashes else chain_start(salt)
    missing = memoryview(array("q", token_ids[first * block_size : num_blocks * block_size]))
    for start in range(0, len(missing), block_size):
        parent = blake2b(missing[start : start + block_size], digest_size=16, key=parent).digest()
        hashes.append(parent)


def extend_chain(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """Makes the hashes of a sequence's first full blocks known, and returns all that are."""
    hashes, request = sequence.block_hashes, sequence.request
    if len(hashes) < num_blocks:
        hashes += request.block_hashes[len(hashes) : num_blocks]
        extend_hashes(hashes, sequence.token_ids, num_blocks, block_size, request.salt)
    return hashes


def prompt_hashes(token_ids: TokenIds[int], block_size: int, salt: bytes) -> tuple[bytes, ...]:
    """Returns the hashes of the blocks that a prompt may find, which never are those of its last token."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, max(0, len(token_ids) - 1) // block_size, block_size, salt)
    return tuple(hashes)


def with_hashes(request: Request, block_size: int) -> Request:
    """Returns the request with the hashes of its prompt, or of the part that may be found."""
    token_ids, keeping = request.prompt_token_ids, request.keeping
    findable = token_ids if keeping is None else token_ids[: keeping.most + 1]
    return replace(request, block_hashes=prompt_hashes(findable, block_size, request.salt))


class PrefixIndex:
    """Maps hashes to blocks and back, and knows which sequence is computing the blocks of a hash right now.

    A hash stands for some tokens and all before them; each block table of a sequence has a block of its own for them.
    """

    def __init__(self, num_seen: TokenIds[int] = (0,)) -> None:
        """`num_seen` says by table how many of a prefix's last blocks have to be known, since nobody sees those before
        them; 0 if all have to be."""
        self._num_seen = num_seen
        self._block_of: list[dict[bytes, int]] = [{} for _ in num_seen]
        self._place_of: dict[int, tuple[bytes, int, int]] = {}
        """The hash that finds a block, its table, and the number of blocks before it in its chain."""
        self._pending: dict[bytes, tuple[object, int]] = {}
        """The sequence that computes the blocks of a hash, and its lane, by hash."""
        self.generation = 0
        """Another number whenever something else can be found: what was looked up holds until then."""
        self.num_drops = 0
        self._drops: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """The places and blocks that were dropped last."""

    def __len__(self) -> int:
        return len(self._place_of)

    @property
    def num_tables(self) -> int:
        return len(self._num_seen)

    def update(self, entries: list[int], num_drops: int, hashes: list[bytes], most: int) -> int:
        """Brings the longest known prefix of a chain up to date, where there is one table that sees all tokens.

        The work is that of the blocks that came and went since, not that of the whole chain.

        Args:
            entries: the table entries that were found before.
            num_drops: the number of drops at that time.
            hashes: the chain, of which the first `most` blocks may be found.

        Returns:
            How many of the entries are what they were.
        """
        num_kept, num_since = min(len(entries), most), self.num_drops - num_drops
        if num_since > len(self._drops):
            num_kept = 0
        else:
            for place, dropped in islice(reversed(self._drops), num_since):
                if place < num_kept and entries[place] == dropped:
                    num_kept = place
        del entries[num_kept:]
        known = self._block_of[0]
        for depth in range(num_kept, min(most, len(hashes))):
            block = known.get(hashes[depth])
            if block is None:
                break
            entries.append(block)
        return num_kept

    def match(self, hashes: list[bytes]) -> list[int]:
        """Returns the table entries of the longest known prefix of the chain, those of the same tokens side by side.

        Entries that nobody sees are 0.
        """
        num_seen, length = self._num_seen, len(hashes)
        columns: list[list[int]] = [[] for _ in num_seen]
        for blocks, known, seen in zip(columns, self._block_of, num_seen, strict=True):
            if seen:
                continue
            for block_hash_ in hashes[:length]:
                block = known.get(block_hash_)
                if block is None:
                    break
                blocks.append(block)
            length = len(blocks)
        while (gap := self._last_gap(hashes, length)) is not None:
            length = gap
        if len(columns) == 1 and not num_seen[0]:
            return columns[0]
        for number, seen in enumerate(num_seen):
            if seen:
                first = max(0, length - seen)
                known = self._block_of[number]
                columns[number] = [0] * first + [known[hash_] for hash_ in hashes[first:length]]
        return [block for entries in zip(*columns, strict=False) for block in entries]

    def _last_gap(self, hashes: list[bytes], length: int) -> int | None:
        """A place before `length` that some table sees from there and has no block of; None if there is none."""
        for known, seen in zip(self._block_of, self._num_seen, strict=True):
            for i in reversed(range(max(0, length - seen), length)):
                if hashes[i] not in known:
                    while i and hashes[i - 1] not in known:  # the window before it would end in this gap, too
                        i -= 1
                    return i
        return None

    def add(self, block_hash_: bytes, block: int, table: int = 0, depth: int = 0) -> bool:
        """Records a full block of a table whose tokens are confirmed.

        Args:
            depth: the blocks before it in its chain.

        Returns:
            False if another block of the table is found by this hash already; it stays the one that is found.
        """
        known = self._block_of[table]
        if block_hash_ in known:
            return False
        known[block_hash_] = block
        self._place_of[block] = block_hash_, table, depth
        self.generation += 1
        return True

    def drop(self, block: int) -> tuple[bytes, int] | None:
        """Forgets a block whose content is gone; returns the hash that found it, and its table."""
        place = self._place_of.pop(block, None)
        if place is None:
            return None
        block_hash_, table, depth = place
        del self._block_of[table][block_hash_]
        self.generation += 1
        self.num_drops += 1
        self._drops.append((depth * self.num_tables + table, block))
        return block_hash_, table

    def key_of(self, block: int) -> tuple[bytes, int] | None:
        """Returns the hash that finds a block, and its table; None if nobody finds it."""
        place = self._place_of.get(block)
        return None if place is None else place[:2]

    def has(self, block_hash_: bytes, table: int) -> bool:
        """Returns whether a block of the table is found by this hash; for any thread."""
        return block_hash_ in self._block_of[table]

    @property
    def num_seen(self) -> TokenIds[int]:
        """By table, how many of a prefix's last blocks have to be known; 0 if all have to be."""
        return self._num_seen

    def place_of(self, block: int) -> int:
        """Returns the place of a block that is found in the table of whoever finds it; -1 if it is not."""
        place = self._place_of.get(block)
        return -1 if place is None else place[2] * self.num_tables + place[1]

    def knows_block(self, block: int) -> bool:
        return block in self._place_of

    def block_of(self, block_hash_: bytes, table: int = 0) -> int | None:
        """Returns a table's block of this hash, if there is one."""
        return self._block_of[table].get(block_hash_)

    def blocks_of(self, hashes: TokenIds[bytes]) -> list[int]:
        """Returns the first table's blocks of a chain, up to the first that is not known; for any thread."""
        blocks = list(map(self._block_of[0].get, hashes))
        known = blocks[: blocks.index(None)] if None in blocks else blocks
        return [block for block in known if block is not None]

    def begin(self, block_hash_: bytes, owner: object, lane: int = 0) -> None:
        """Notes that `owner` computes the block of this hash.

        The first owner stays, unless the new one is of a more urgent lane.
        """
        pending = self._pending.get(block_hash_)
        if pending is None or lane < pending[1]:
            self._pending[block_hash_] = owner, lane

    def end(self, block_hash_: bytes, owner: object) -> None:
        """Notes that `owner` has computed the block, or never will."""
        pending = self._pending.get(block_hash_)
        if pending is not None and pending[0] == owner:
            del self._pending[block_hash_]

    def is_pending(self, block_hash_: bytes, lane: int = 0) -> bool:
        """Returns whether a sequence at least as urgent as `lane` is computing the block of this hash."""
        return self.owner_of(block_hash_, lane) is not None

    def owner_of(self, block_hash_: bytes, lane: int) -> object | None:
        """Returns the sequence that is computing the block of this hash, if one is that is at least as urgent."""
        pending = self._pending.get(block_hash_)
        return pending[0] if pending is not None and pending[1] <= lane else None

    def num_shared(self, hashes: list[bytes], num_known: int, lane: int) -> int:
        """Returns how many first blocks of a chain are known, or computed by sequences at least as urgent."""
        number = num_known
        while number < len(hashes) and self.is_pending(hashes[number], lane):
            number += 1
        return number

    @property
    def num_pending(self) -> int:
        return len(self._pending)
