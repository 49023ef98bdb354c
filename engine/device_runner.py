"""DeviceSteps: a model's steps on a device that runs beside the host, one in flight while the next is launched.

A launch puts a step on the device's queue and returns: inputs from the device's own table, the model, the sampler, and
the way of the tokens back to the host. Nothing in it waits for the device. Decode steps replay graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from engine.device_state import DeviceState, Placed
from engine.graphs import Device, Graph, Ladder, Rung
from engine.model.loader import LoadedModel
from engine.request import Request, SamplingParams, Sequence, TokenLogprobs
from engine.sampling.device import Choose, DeviceSampler, Needs, SampledOnDevice
from engine.step import Chunk, DeviceError, OutOfMemory, Plan, Sampled, StepInFlight, StepResult

log = logging.getLogger("penstock.engine")

_NOT_FINITE = "the model's output was not finite"
_WARM_UP_TOKENS = 32
"""More than attention takes for a decode, few enough to be a short prompt to it: each has a kernel of its own."""


class Progress(Protocol):
    def __call__(self, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int | None = None
    """None: as many as the model has positions."""


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
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


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
        self.model = model
        self.sampler = DeviceSampler(
            num_slots,
            config.vocab_size,
            config.eos_token_ids,
            model.device,
            choose=_fast_choose(model, num_slots),
        )
        self.state = DeviceState(
            num_slots,
            -(-max_len // kv.block_size),
            limits.max_batch_tokens,
            model.device,
            seat=self._seat,
            vacate=self.sampler.release,
        )
        self.ladder = Ladder(min(num_slots, limits.max_batch_tokens))
        self._refused: dict[Sequence, str] = {}
        """Sequences that the sampler cannot serve."""
        # What graphs read and write; every rung uses the beginning.
        self._slots = torch.full((num_slots,), -1, dtype=torch.int32, device=model.device)
        self._context_lens = torch.zeros(num_slots, dtype=torch.int32, device=model.device)
        self._logits = torch.empty(0, config.vocab_size, device=model.device)
        self._shown: Tensor | None = None
        """The slots that `_slots` shows at present."""
        room = self.state.max_blocks * kv.block_size - 1
        self._warm_up(min(_WARM_UP_TOKENS, limits.max_batch_tokens, room))
        if device is not None and self._can_be_recorded:
            self.ladder.record(device, self._decode_recorded, progress)
            say(f"{len(self.ladder.recorded)} CUDA graphs, {self.ladder.num_bytes / 2**20:.0f} MiB")

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

    @property
    def _can_be_recorded(self) -> bool:
        """The plain torch operations look at the batch on the host."""
        return self.model.kernels.name == "triton"

    def _launch(self, plan: Plan) -> StepInFlight:
        placed = self.state.place(plan, self.ladder.padded)
        if placed.copies is not None:
            sources, targets = (blocks.long() for blocks in placed.copies)
            self.model.kv.data[:, :, targets] = self.model.kv.data[:, :, sources]
        landing = self._decode(plan, placed) if placed.is_decode else self._mixed(plan, placed)
        self.state.note_launched(plan, placed.slots)
        return landing

    def _warm_up(self, num: int) -> None:
        """What is made on first use is made now: steps in block 0, which belongs to nobody, and samples of padding.

        Args:
            num: tokens of a prompt.
        """
        sampling = SamplingParams(max_tokens=2)
        sequence = Sequence(Request(request_id="", prompt_token_ids=(0,) * (num + 1), sampling=sampling))
        sequence.block_table = [0] * (num // self.model.kv.block_size + 1)
        for chunk in (Chunk(sequence, 0, num, samples=False), Chunk(sequence, num, 1, samples=True)):
            self.launch(Plan([chunk], num_tokens=chunk.num_tokens)).wait()
        sequence.block_table = []  # it gives up its slot
        for num_rows in {min(n, self.state.num_slots) for n in (1, 2, 16)}:
            slots = torch.full((num_rows,), -1, dtype=torch.int32, device=self.model.device)
            logits = torch.zeros(num_rows, self.model.config.vocab_size, device=self.model.device)
            for top_k, top_p in product((False, True), repeat=2):
                self.sampler.sample(logits, slots, torch.zeros_like(slots), Needs(top_k, top_p))

    def _decode_recorded(self, rung: Rung) -> None:
        """The part of a decode step that is in its graph: from `_slots` to `_logits`."""
        num = rung.num_sequences
        if self._logits.shape[0] < num:
            self._logits = self._logits.new_empty(num, self._logits.shape[1])
        batch = self.state.decode_batch(self._slots[:num])
        self._logits[:num].copy_(self.model.decoder(batch))
        self._context_lens[:num].copy_(batch.context_lens)

    def _decode(self, plan: Plan, placed: Placed) -> StepInFlight:
        slots, num = placed.slot_tensor, placed.slot_tensor.numel()
        graph = self.ladder.find(num)
        if graph is None:
            batch = self.state.decode_batch(slots)
            logits, context_lens = self.model.decoder(batch), batch.context_lens
        else:
            if self._shown is not slots:
                self._slots[:num].copy_(slots)
                self._shown = slots
            graph.replay()
            logits, context_lens = self._logits[:num], self._context_lens[:num]
        landing = self._sample(plan, logits, slots, context_lens, placed)
        self.state.advance(slots, context_lens)
        return landing

    def _mixed(self, plan: Plan, placed: Placed) -> StepInFlight:
        batch, slots, chunks = placed.batch, placed.sampled_slots, placed.sampled_chunks
        assert batch is not None
        assert slots is not None
        assert chunks is not None
        logits = self.model.decoder(batch)
        landing = self._sample(plan, logits, slots, batch.context_lens[chunks.long()], placed)
        self.state.advance(placed.slot_tensor, batch.context_lens)
        return landing

    def _sample(
        self, plan: Plan, logits: Tensor, slots: Tensor, context_lens: Tensor, placed: Placed
    ) -> StepInFlight:
        rows = [(c.sequence, slot) for c, slot in zip(plan.chunks, placed.slots, strict=True) if c.samples]
        if not rows:
            return _Landing(logits.device, [])
        needs = self.sampler.needs(slot for sequence, slot in rows if sequence not in self._refused)
        sampled = self.sampler.sample(logits, slots, self.state.numbers(slots, context_lens), needs)
        landing = _Landing(logits.device, [self._wish(sequence) for sequence, _ in rows], sampled)
        self.state.keep_tokens(slots, sampled.token_ids)
        return landing

    def _wish(self, sequence: Sequence) -> _Wish:
        return _Wish(sequence.request.sampling.num_logprobs, self._refused.get(sequence))

    def _seat(self, slot: int, sequence: Sequence) -> None:
        self._refused = {s: said for s, said in self._refused.items() if s.finish_reason is None}
        try:
            self.sampler.assign(slot, sequence)
        except ValueError as error:
            self._refused[sequence] = str(error)


def _fast_choose(model: LoadedModel, max_rows: int) -> Choose | None:
    if model.kernels.name != "triton" or model.device.type != "cuda":
        return None
    # Not above: the package is there without triton, too.
    from engine.kernels.triton.sampling import TritonChoose

    return TritonChoose(max_rows, model.config.vocab_size, model.device)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a sampled row is to bring."""

    num_logprobs: int | None
    refusal: str | None


class _Landing:
    """What a step sampled, on its way to the host behind the step."""

    def __init__(
        self, device: torch.device, wishes: list[_Wish], sampled: SampledOnDevice | None = None
    ) -> None:
        self._wishes = wishes
        self._tensors: list[Tensor] = []
        if sampled is not None:
            brought = (sampled.token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            self._tensors = [_to_host(tensor) for tensor in brought if tensor is not None]
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            try:
                self._event.synchronize()
            except torch.AcceleratorError as error:
                raise DeviceError(str(error)) from error
        if not self._wishes:
            return StepResult([])
        token_ids, logprobs, *top = (tensor.tolist() for tensor in self._tensors)
        result = []
        for row, wish in enumerate(self._wishes):
            if wish.refusal is not None or token_ids[row] < 0:
                result.append(Sampled([], error=wish.refusal or _NOT_FINITE))
                continue
            sampled = Sampled([token_ids[row]])
            if wish.num_logprobs is not None:
                num = wish.num_logprobs
                pairs = tuple(zip(top[0][row][:num], top[1][row][:num], strict=True)) if top else ()
                sampled.logprobs = [TokenLogprobs(logprobs[row], pairs)]
            result.append(sampled)
        return StepResult(result)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when what is on the device's queue now is done."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _give_back_cached(device: torch.device) -> None:
    """Memory that torch keeps for itself, in pieces that nothing fitted into."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
