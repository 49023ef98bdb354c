"""The way of a step's tokens back to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.planning.request import TokenLogprobs
from engine.planning.step import DeviceError, Sampled, StepResult
from engine.sampling.device import SampledOnDevice

NOT_FINITE = "the model's output was not finite"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a sampled row is to bring."""

    num_logprobs: int | None
    refusal: str | None


TOKEN_ALONE = Wish(None, None)


class Landing:
    """What a step sampled, on its way to the host behind the step."""

    def __init__(
        self, device: torch.device, wishes: list[Wish], sampled: SampledOnDevice | None = None
    ) -> None:
        self._wishes = wishes
        self._tensors: list[Tensor] = []
        if sampled is not None:
            wanted: list[Tensor | None] = [sampled.token_ids]
            if any(wish.num_logprobs is not None for wish in wishes):
                wanted += [sampled.logprobs, sampled.top_ids, sampled.top_logprobs]
            self._tensors = [_to_host(tensor[: len(wishes)]) for tensor in wanted if tensor is not None]
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
        token_ids, *told = (tensor.tolist() for tensor in self._tensors)
        result = []
        for row, wish in enumerate(self._wishes):
            if wish.refusal is not None or token_ids[row] < 0:
                result.append(Sampled([], error=wish.refusal or NOT_FINITE))
                continue
            sampled = Sampled([token_ids[row]])
            if wish.num_logprobs is not None:
                num, (logprobs, *top) = wish.num_logprobs, told
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
