"""DeviceSteps: a model's steps on a device that runs beside the host, one in flight while the next is launched.

A launch puts a step on the device's queue and returns: inputs from the device's own table, the model, the sampler, and
the way of the tokens back to the host. Nothing in it waits for the device. Decode steps replay graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.execution.device_state import DeviceState, Placed, Seat
from engine.execution.graphs import Device, Graph, Ladder, Rung, record_all
from engine.execution.landing import TOKEN_ALONE, Landing, Wish
from engine.execution.loader import LoadedModel
from engine.execution.memory import read_card
from engine.execution.slot_table import SlotTable, StepBuffers
from engine.model.weights import Progress
from engine.planning.request import Request, SamplingParams, Sequence
from engine.planning.step import Chunk, DeviceError, OutOfMemory, Plan, StepInFlight
from engine.sampling.device import FILTERS, DeviceSampler, Needs, SampledOnDevice, most_likely

log = logging.getLogger("penstock.engine")

_LARGEST_WARM_UP = 512
"""Tokens; larger steps have no kernels of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int | None = None
    """None: as many as the model has positions."""
    max_query_len: int = 1
    """Tokens of each sequence in a step that comes out of the table; more than 1 is for drafts that are verified."""


class CudaDevice:
    """What graphs and steps need of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except Exception:
            # Of a recording that the driver gave up, torch keeps the stream, and never opens the pool again.
            torch.cuda.set_stream(stream)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def num_bytes_in_use(self) -> int:
        torch.cuda.empty_cache()  # what eager steps used and graphs do not
        return read_card(self._device).used


class DeviceSteps:
    """The steps of a model, and all that they keep on its device.

    Args:
        device: None: without graphs.
        say: is told what graphs took.
        progress: is told graphs done and graphs in all.
    """

    num_ahead = 1

    @torch.inference_mode()
    def __init__(
        self,
        model: LoadedModel,
        limits: DeviceLimits,
        device: Device | None,
        *,
        say: Callable[[str], None] = log.info,
        progress: Progress = lambda *_: None,
    ) -> None:
        config, kv = model.config, model.kv
        num_slots = limits.max_num_seqs
        max_len = min(limits.max_model_len or config.max_position, kv.num_blocks * kv.block_size)
        query_lens = tuple(sorted({1, limits.max_query_len}))
        self.model = model
        self.sampler = DeviceSampler(
            num_slots,
            config.vocab_size,
            config.eos_token_ids,
            model.device,
            choose=model.kernels.make_choose(num_slots, config.vocab_size, model.device),
        )
        self.table = SlotTable(num_slots, -(-max_len // kv.block_size), limits.max_query_len, model.device)
        self.state = DeviceState(
            self.table,
            limits.max_batch_tokens,
            query_lens=query_lens,
            seat=self._seat,
            vacate=self.sampler.release,
        )
        self._refused: dict[Sequence, str] = {}
        """Sequences that the sampler cannot serve."""
        self._buffers = StepBuffers.empty(
            num_slots, config.vocab_size, model.kernels.activation_dtype, model.device
        )
        self._parts: dict[int, StepBuffers] = {}
        """Their first so many rows."""
        self._shown: Tensor | None = None
        """The slots that are in the buffer at present."""
        self._shown_needs: Needs | None = None
        """Theirs, unless one has a new sequence since."""
        most = min(num_slots, limits.max_batch_tokens)
        self.passes = Ladder(self._pass, most, query_lens)
        self.choices = {filters: Ladder(partial(self._choose, filters), most) for filters in FILTERS}
        self._warm_up(min(limits.max_batch_tokens, max_len - 1))
        if device is not None and model.kernels.is_static:
            self._record(device, say, progress)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepInFlight:
        """See `step.Runner`."""
        try:
            return self._launch(plan)
        except torch.OutOfMemoryError as error:
            self.state.distrust(plan)
            _give_back_cached(self.model.device)
            raise OutOfMemory(str(error)) from error
        except torch.AcceleratorError as error:
            raise DeviceError(str(error)) from error
        except Exception:
            self.state.distrust(plan)
            raise

    def _launch(self, plan: Plan) -> StepInFlight:
        placed = self.state.place(plan, self.passes.padded)
        if placed.copies is not None:
            sources, targets = (blocks.long() for blocks in placed.copies)
            self.model.kv.data[:, :, targets] = self.model.kv.data[:, :, sources]
        landing = self._mixed(plan, placed) if placed.query_len is None else self._short(plan, placed)
        self.state.note_launched(plan, placed.seats)
        return landing

    def _warm_up(self, longest: int) -> None:
        """What is made on first use is made now: steps in block 0, which belongs to nobody, and samples of padding."""
        lengths = [1 << i for i in range(1, min(longest, _LARGEST_WARM_UP).bit_length())]
        prompt = (0,) * (max(lengths, default=0) + 1)
        sequence = Sequence(
            Request(request_id="", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2))
        )
        sequence.block_table = [0] * -(-len(prompt) // self.model.kv.block_size)
        chunks = [Chunk(sequence, 0, length, samples=False) for length in lengths]
        for chunk in (*chunks, Chunk(sequence, len(prompt) - 1, 1, samples=True)):
            self.launch(Plan([chunk], num_tokens=chunk.num_tokens)).wait()
        sequence.block_table = []  # it gives up its slot
        self._buffers.slots.fill_(-1)
        self._shown = None
        for filters in self.choices:  # by any number of rows alike
            self._choose(filters, Rung(1, 1))

    def _record(self, device: Device, say: Callable[[str], None], progress: Progress) -> None:
        ladders = [self.passes, *self.choices.values()]
        record_all(ladders, device, progress)
        num_graphs = sum(len(ladder.recorded) for ladder in ladders)
        num_bytes = sum(ladder.num_bytes for ladder in ladders)
        say(self.model.memory.graphs_text(num_graphs, num_bytes, device.num_bytes_in_use()))

    def _pass(self, rung: Rung) -> None:
        """From the slots to the logits of each one's last token."""
        own = self._part(rung.num_sequences)
        step = self.model.kernels.gather(self.table, own.slots, rung.query_len)
        own.numbers.copy_(step.numbers)
        own.logits.copy_(self.model.decoder(step.batch))

    def _choose(self, filters: Needs, rung: Rung) -> None:
        """From the logits to tokens."""
        own = self._part(rung.num_sequences)
        sampled = self.sampler.sample(own.logits, own.slots, own.numbers, filters)
        own.token_ids.copy_(sampled.token_ids)
        own.logprobs.copy_(sampled.logprobs)
        self.table.keep_tokens(own.slots, sampled.token_ids)

    def _short(self, plan: Plan, placed: Placed) -> StepInFlight:
        """What the device does is all in graphs, but for what was not to be expected."""
        assert placed.query_len is not None
        num = placed.slot_tensor.numel()
        own = self._part(num)
        if self._shown is not placed.slot_tensor:
            own.slots.copy_(placed.slot_tensor)
            self._shown, self._shown_needs = placed.slot_tensor, None
        self.passes.run(Rung(num, placed.query_len))
        needs = self._shown_needs = self._shown_needs or self._needs(plan, placed.seats)
        # First: it may find no memory, and what is chosen is counted once.
        top = most_likely(own.logits, needs.num_top_logprobs) if needs.num_top_logprobs else ()
        self.choices[needs.filters].run(Rung(num, 1))
        return self._landing(plan, SampledOnDevice(own.token_ids, own.logprobs, *top))

    def _mixed(self, plan: Plan, placed: Placed) -> StepInFlight:
        batch, slots, chunks = placed.batch, placed.sampled_slots, placed.sampled_chunks
        assert batch is not None
        assert slots is not None
        assert chunks is not None
        logits = self.model.decoder(batch)
        self.table.keep_lengths(placed.slot_tensor, batch.context_lens)
        if not slots.numel():
            return self._landing(plan, None)
        numbers = self.table.numbers(slots, batch.context_lens[chunks.long()])
        sampled = self.sampler.sample(logits, slots, numbers, self._needs(plan, placed.seats))
        self.table.keep_tokens(slots, sampled.token_ids)
        return self._landing(plan, sampled)

    def _part(self, num: int) -> StepBuffers:
        if num not in self._parts:
            self._parts[num] = self._buffers.part(num)
        return self._parts[num]

    def _needs(self, plan: Plan, seats: ListLike[Seat]) -> Needs:
        """Of the sequences that sample; one that the sampler refused has none."""
        return self.sampler.needs(
            s.slot for s, chunk in zip(seats, plan.chunks, strict=True) if chunk.samples
        )

    def _landing(self, plan: Plan, sampled: SampledOnDevice | None) -> StepInFlight:
        wishes = [self._wish(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        return Landing(self.model.device, wishes, sampled)

    def _wish(self, sequence: Sequence) -> Wish:
        num_logprobs = sequence.request.sampling.num_logprobs
        if num_logprobs is None and not self._refused:
            return TOKEN_ALONE
        return Wish(num_logprobs, self._refused.get(sequence))

    def _seat(self, slot: int, sequence: Sequence) -> None:
        self._shown_needs = None
        self._refused = {s: said for s, said in self._refused.items() if s.finish_reason is None}
        try:
            self.sampler.assign(slot, sequence)
        except ValueError as error:
            self._refused[sequence] = str(error)


def _give_back_cached(device: torch.device) -> None:
    """Memory that torch keeps for itself, in pieces that nothing fitted into."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # and pinned buffers, however often the step is launched again
        torch.cuda.empty_cache()
