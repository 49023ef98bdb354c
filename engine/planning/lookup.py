"""Guessing what comes next by looking up where the last tokens stood before: no model is needed.

Text repeats itself: a document that is edited or quoted, code, the words of earlier answers. Where the last few tokens
were seen before, what followed them then is likely to follow again (Saxena, "Prompt lookup decoding", 2023; Oliaro et
al., "SuffixDecoding", NeurIPS 2025).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.engine.planning.request import Request, Sequence

SHORTEST = 3
"""So many tokens have to be the same; fewer are mostly so by chance."""
LONGEST = 16
"""More than so many equal tokens say nothing more."""
_ENOUGH = 6
"""Tokens of a run in the sequence's own text that are enough not to look into earlier answers."""
_MOST_PLACES = 4
"""So many earlier places are compared, the latest first."""
_MEMORY_TOKENS = 1 << 15
"""Tokens of earlier answers that are remembered of one tenant, twice."""
_MOST_REMEMBERED = 1 << 19
"""Tokens of earlier answers that are remembered of all tenants: with 150 bytes each, some 80 MB."""
_MOST_TENANTS = 256
_MOST_INDEXED = 1 << 20
"""Tokens of running sequences that are indexed: with 110 bytes each, some 115 MB. No more are until a sequence ends."""
_STEP_TOKENS = 4096
"""Tokens that are indexed in one step, 1 to 4 ms of the step thread: more wait for the next steps."""


class TokenIndex:
    """A list of tokens that grows at its end, and where in it every run of SHORTEST tokens stands.

    The places take about 110 bytes a token, and 36 more those tokens that nobody else keeps.
    """

    __slots__ = ("_earlier", "_last", "num_indexed", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` may grow, but not change, behind the index's back."""
        self.tokens = tokens
        self.num_indexed = SHORTEST
        """The places before this one are indexed; a place is that of the token after a run."""
        self._last: dict[int, int] = {}
        """The last place after each run, by the run's hash: where two share one, a guess is wrong, and that is all."""
        self._earlier: list[int] = []
        """By place, from SHORTEST on: the place before it after the same run; 0 if there is none."""

    def find(self, recent: list[int]) -> tuple[int, int]:
        """The place after the longest run of tokens that `recent` ends with: (place, length of the run).

        (0, 0) if there is none of SHORTEST tokens. Of several, the latest. Only places that are indexed are found.
        """
        place = self._last.get(hash(tuple(recent[-SHORTEST:])), 0)
        best, longest = 0, 0
        for _ in range(_MOST_PLACES):
            if not place:
                break
            length = self._length(place, recent)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place - SHORTEST]
        return best, longest

    def _length(self, place: int, recent: list[int]) -> int:
        tokens, length = self.tokens, SHORTEST
        most = min(LONGEST, place, len(recent))
        while length < most and tokens[place - length - 1] == recent[-length - 1]:
            length += 1
        return length

    def update(self, most: int) -> int:
        """Indexes the next places that have a token by now, `most` of them at the most; returns how many."""
        last, earlier, start = self._last, self._earlier, self.num_indexed
        end = min(len(self.tokens), start + most)
        if end <= start:
            return 0
        recent = self.tokens[start - SHORTEST : end - 1]
        runs = zip(*(recent[i:] for i in range(SHORTEST)), strict=False)
        for place, run in enumerate(map(hash, runs), start):
            earlier.append(last.get(run, 0))
            last[run] = place
        self.num_indexed = end
        return end - start

    def following(self, place: int, num: int) -> list[int]:
        """The `num` tokens from a place on; where they end, the run is supposed to go round."""
        tokens = self.tokens
        found = tokens[place : place + num]
        period = len(tokens) - place
        while len(found) < num:
            found.append(found[-period])
        return found


@dataclass(slots=True)
class _Memory:
    """The latest answers of one tenant in two halves; when the newer one is full, the older one is given up."""

    newer: TokenIndex = field(default_factory=lambda: TokenIndex([]))
    older: TokenIndex = field(default_factory=lambda: TokenIndex([]))

    def __len__(self) -> int:
        return len(self.newer.tokens) + len(self.older.tokens)

    def add(self, token_ids: list[int]) -> None:
        if len(self.newer.tokens) + len(token_ids) > _MEMORY_TOKENS:
            self.older, self.newer = self.newer, TokenIndex([])
        self.newer.tokens.extend(token_ids[-_MEMORY_TOKENS:])


class Lookup:
    """Looks up the prompt and the answer so far, and the tenant's latest answers. It is a Proposer."""

    name = "lookup"

    def __init__(self) -> None:
        self.is_behind = False
        self._indexes: dict[Sequence, TokenIndex] = {}
        self._memories: OrderedDict[tuple[str, bytes], _Memory] = OrderedDict()
        self._room = 0
        """Tokens that may still be indexed in this step."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """The tokens that may follow those of each sequence, at most `lengths` of them; none if nothing is known."""
        num_indexed = sum(index.num_indexed for index in self._indexes.values())
        self._room = most = max(0, min(_STEP_TOKENS, _MOST_INDEXED - num_indexed))
        found = [self._propose(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]
        self.is_behind = most == _STEP_TOKENS and not self._room
        return found

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended; its answer is remembered."""
        self._indexes.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if len(answer) <= SHORTEST:
            return
        owner = _owner(sequence.request)
        memory = self._memories.get(owner)
        if memory is None:
            memory = self._memories[owner] = _Memory()
        self._memories.move_to_end(owner)
        memory.add(answer)
        memories = self._memories
        while len(memories) > _MOST_TENANTS or sum(map(len, memories.values())) > _MOST_REMEMBERED:
            memories.popitem(last=False)

    def _propose(self, sequence: Sequence, length: int) -> list[int]:
        tokens = sequence.token_ids
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = TokenIndex(tokens)
        place, run = self._find(index, tokens)
        memory = self._memories.get(_owner(sequence.request))
        if memory is not None and run < _ENOUGH:
            for other in (memory.newer, memory.older):
                there, longer = self._find(other, tokens)
                if longer > run:
                    index, place, run = other, there, longer
        return index.following(place, length) if run else []

    def _find(self, index: TokenIndex, recent: list[int]) -> tuple[int, int]:
        self._room -= index.update(self._room)
        return index.find(recent)


def _owner(request: Request) -> tuple[str, bytes]:
    return request.tenant, request.salt
