"""Where a step on the CPU spends its time: the parts of the decoder, the output head, choosing, and the host."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.bench.planning import measure_planning
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLinear, Team
from penstock.engine.kernels.kv_cache import KVFormat
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.program.native import NativeDecoder
from penstock.engine.spec import GatedDelta, state_floats

NUM_BLOCKS = 1280


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    sequences: int
    queries: int
    """Tokens of each sequence in this step."""
    context: int
    """Tokens of each sequence before this step."""


CASES = (
    Case("decode, 1 sequence of 256", 1, 1, 256),
    Case("decode, 16 sequences of 256", 16, 1, 256),
    Case("decode, 64 sequences of 256", 64, 1, 256),
    Case("prefill, 512 tokens", 1, 512, 0),
)
ENOUGH_S = 3.0
"""The time that one case is measured for."""
_MOST_SEQUENCES = 64
_LINEARS = ("qkv", "gates", "o", "gate_up", "down")
_LAST_ROWS_ONLY = ("o", "gate_up", "down")
"""The linears that are computed only for the rows that are sampled, from the last layer on that has keys or a state."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The time of one part of a step."""

    seconds: float
    waiting: float | None = None
    """The share of the threads' time in which they were in no chunk; None where the team's phases are not timed."""


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic and the reading that one part of a step cannot do without."""

    flop: float
    bytes: float
    factor_bytes: int
    """The size of the numbers that are multiplied: 4 for float32."""


class StepParts:
    """Times steps of a loaded model. Keys, values and states of the context are zeros, which take as long as any."""

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.lm_head = model, model.lm_head
        self.layers = model.decoder.linears if isinstance(model.decoder, NativeDecoder) else []
        for seat in range(_MOST_SEQUENCES):
            request = Request(
                request_id=str(seat), prompt_token_ids=(0,), sampling=SamplingParams(temperature=0)
            )
            model.sampler.assign(seat, Sequence(request))

    def measure(self, case: Case, most_repeats: int) -> Row:
        """The least time of each part over some timed steps, and that of as many whole steps that were not timed.

        Other processes only ever make a part slower.
        """
        batch = make_batch(self.model.config, case)
        timed, plain = list[dict[str, Part]](), list[float]()
        while len(plain) < most_repeats and (len(plain) < 2 or sum(plain) < ENOUGH_S):
            timed.append(self.timed_step(batch))  # in turns, so that other processes slow both
            plain.append(self._plain_step(batch))
        parts = {
            name: min((step[name] for step in timed), key=lambda part: part.seconds) for name in timed[0]
        }
        host_s = measure_planning(case.sequences, 20)["host_p50_ms"] / 1000
        return self._row(case, parts | {"host": Part(host_s)}, min(plain) + host_s)

    def _plain_step(self, batch: Batch) -> float:
        started = time.perf_counter()
        self._choose(self.lm_head(self.model.decoder(batch)))
        return time.perf_counter() - started

    def timed_step(self, batch: Batch) -> dict[str, Part]:
        """One step without the host's planning. `call` is what it took beside its operations."""
        team = self.model.kernels.team
        timed = self._by_interpreter if team is None else partial(self._by_team, team)
        started = time.perf_counter()
        parts, logits = timed(batch)
        call_s = time.perf_counter() - started - sum(part.seconds for part in parts.values())
        before = time.perf_counter()
        self._choose(logits)
        return {**parts, "call": Part(call_s), "choose": Part(time.perf_counter() - before)}

    def _by_team(self, team: Team, batch: Batch) -> tuple[dict[str, Part], Tensor]:
        team.time(True)
        logits = self.lm_head(self.model.decoder(batch))
        times, threads = team.times(), team.num_threads
        team.time(False)
        return {
            kind: Part(spent.open_ns / 1e9, 1 - spent.busy_ns / (threads * spent.open_ns))
            for kind, spent in times.items()
            if spent.num_phases
        }, logits

    def _by_interpreter(self, batch: Batch) -> tuple[dict[str, Part], Tensor]:
        decoder = self.model.decoder
        assert isinstance(decoder, Interpreter)
        times = decoder.times = dict[str, float]()
        hidden = decoder(batch)
        decoder.times = None
        started = time.perf_counter()
        logits = self.lm_head(hidden)
        times["head"] = time.perf_counter() - started
        return {name: Part(seconds) for name, seconds in times.items()}, logits

    def work(self, case: Case) -> dict[str, Work]:
        """The arithmetic of the parts that multiply; the weights, keys, values and states that they read and write.

        Nothing of linear maps that are not the native kernels'.
        """
        found = {"attention": self._attention(case)}
        if isinstance(self.lm_head, NativeLinear):
            found["head"] = _product(self.lm_head, case.sequences)
        found |= self._states(case) if self.model.states is not None else {}
        for name in _LINEARS:
            layers = [(i, layer[name]) for i, layer in enumerate(self.layers) if name in layer]
            some = [_product(linear, self._rows(case, name, i)) for i, linear in layers]
            if not some:
                continue
            found[name] = Work(
                sum(work.flop for work in some), sum(work.bytes for work in some), some[-1].factor_bytes
            )
        return found

    def _rows(self, case: Case, name: str, layer: int) -> int:
        is_cut = name in _LAST_ROWS_ONLY and layer >= self.model.config.spec.last_with_keys
        return case.sequences * (1 if is_cut else case.queries)

    def _attention(self, case: Case) -> Work:
        config, end = self.model.config, case.context + case.queries
        seen = case.queries * (case.context + (case.queries + 1) / 2)  # of all tokens of a sequence together
        heads, last = config.spec.attentions, config.spec.last_with_keys
        pairs = sum(own.q_size * (end if number >= last else seen) for number, own in heads.items())
        numbers = 2 * sum(own.kv_size for own in heads.values()) * case.sequences * end
        format = KVFormat.of(self.model.kv.data.dtype)
        size = format.dtype.itemsize / format.numbers_per_element
        factor_bytes = max(format.dtype.itemsize, 2)  # no kernel multiplies keys and values in fewer bits
        return Work(4 * case.sequences * pairs, numbers * size, factor_bytes)

    def _states(self, case: Case) -> dict[str, Work]:
        """Of layers with a state: a step reads each sequence's, unless it begins with it, and writes it."""
        layers, tokens = self.model.config.spec.states.values(), case.sequences * case.queries
        taps = sum(layer.kernel * layer.history_channels for layer in layers)
        history = sum((layer.kernel - 1) * layer.history_channels for layer in layers)
        numbers = sum(map(state_floats, layers))
        products = sum((3 if isinstance(layer, GatedDelta) else 2) * state_floats(layer) for layer in layers)
        size, num_read = torch.float32.itemsize, case.sequences * (case.context > 0)
        written = case.sequences * (numbers + history)
        return {
            "conv": Work(2 * tokens * taps, num_read * history * size, size),
            "state": Work(2 * tokens * products, (num_read * numbers + written) * size, size),
        }

    def _choose(self, logits: Tensor) -> None:
        seats = torch.arange(logits.shape[0], dtype=torch.int32)
        sampler = self.model.sampler
        sampler.sample(logits, seats, torch.zeros_like(seats), sampler.filters(range(logits.shape[0])))

    def _row(self, case: Case, parts: dict[str, Part], plain_s: float) -> Row:
        work = self.work(case)
        return {
            "case": case.name,
            "ms": 1000 * sum(part.seconds for part in parts.values()),
            "untimed_ms": 1000 * plain_s,
            "parts": [
                {
                    "part": name,
                    "ms": 1000 * part.seconds,
                    "waiting": part.waiting,
                    "work": asdict(work[name]) if name in work else None,
                }
                for name, part in parts.items()
            ],
        }


def _product(linear: NativeLinear, rows: int) -> Work:
    flop = 2.0 * rows * linear.num_rows * linear.in_features
    return Work(flop, linear.num_bytes, linear.activation_dtype.itemsize)


def load(model: Path, types: dict[str, Any], threads: int) -> LoadedModel:
    """Loads the model; `types` are options as `penstock serve` has them: dtype, quantize, kv_dtype."""
    options = LoadOptions(
        device="cpu", num_threads=threads, num_blocks=NUM_BLOCKS, max_num_seqs=_MOST_SEQUENCES, **types
    )
    return load_model(model, options, lambda _: None, lambda *_: None)


def make_batch(config: ModelConfig, case: Case) -> Batch:
    generator = torch.Generator().manual_seed(0)
    end, tokens = case.context + case.queries, case.sequences * case.queries
    width = -(-end // BLOCK_SIZE)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator)[: case.sequences * width]
    starts = torch.arange(0, tokens + 1, case.queries)
    slots = [[i * (case.context > 0), i, 0, case.queries] for i in range(1, case.sequences + 1)]
    return Batch(
        token_ids=torch.randint(config.vocab_size, (tokens,), generator=generator).int(),
        positions=torch.arange(case.context, end).repeat(case.sequences).int(),
        query_starts=starts.int(),
        context_lens=torch.full((case.sequences,), end).int(),
        block_tables=blocks.view(case.sequences, width).int(),
        sample_rows=(starts[1:] - 1).int(),
        state_slots=torch.tensor(slots, dtype=torch.int32) if config.spec.states else None,
    )


def measure(model: str, types: dict[str, Any], threads: int, most_repeats: int) -> list[Row]:
    """A row for each of CASES, but those of more sequences than there are states for."""
    steps = StepParts(load(Path(model), types, threads))
    states = steps.model.states
    most = _MOST_SEQUENCES if states is None else states.num_slots - 1
    return [steps.measure(case, most_repeats) for case in CASES if case.sequences <= most]
