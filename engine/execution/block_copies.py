"""Contents of KV blocks on their way between the device and the host; see `planning.device.BlockCarrier`.

A block's content is the block as the kernels left it, in all planes, and after it the features of its tokens that the
model keeps for a head, if it does. A draft model's own KV is not part of it: what it lacks, it reads again.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.planning.device import OutOfMemory, Payload


class BlockCopies:
    """The carrier of a whole model's blocks.

    On a GPU, contents go through pinned memory and nothing waits for the device: the stream makes a copy happen after
    the steps before it and before those after it.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._kv, self._features, self._device = model.kv.data, model.features, model.device
        self._kv_bytes = self._kv[:, :, 0].numel() * self._kv.itemsize
        # On the host, numpy copies a block in one call; torch takes several, and each lets go of the lock.
        self._host = [] if self._device.type != "cpu" else [_host_bytes(self._kv, 2)]
        if self._host and self._features is not None:
            self._host.append(_host_bytes(self._features, 0))
        self.num_bytes = self._kv_bytes + (0 if self._features is None else self._features[0].nbytes)
        self.layout = _layout(model)

    @torch.inference_mode()
    def copy_out(self, blocks: list[int]) -> HostCopies | DeviceCopies:
        try:
            if self._device.type == "cpu":
                return HostCopies([self._on_host(block) for block in blocks])
            return self._from_device(blocks)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None

    @torch.inference_mode()
    def copy_in(self, blocks: list[int], payloads: list[Payload]) -> None:
        if self._device.type == "cpu":
            for block, payload in zip(blocks, payloads, strict=True):
                self._exchange(block, np.frombuffer(payload, np.uint8), is_in=True)
        else:
            self._to_device(blocks, payloads)

    def _to_device(self, blocks: list[int], payloads: list[Payload]) -> None:
        pinned = torch.empty((len(blocks), self.num_bytes), dtype=torch.uint8, pin_memory=True)
        for row, payload in zip(pinned, payloads, strict=True):
            row.copy_(_bytes_of(payload))
        rows = pinned.to(self._device, non_blocking=True)
        for block, row in zip(blocks, rows, strict=True):
            self._put(block, row)

    def _put(self, block: int, row: Tensor) -> None:
        """Overwrites a block with a content [bytes] on the same device."""
        target = self._kv[:, :, block]
        target.copy_(row[: self._kv_bytes].view(self._kv.dtype).view(target.shape))
        if self._features is not None:
            features = self._features[block]
            features.copy_(row[self._kv_bytes :].view(self._features.dtype).view(features.shape))

    def _rows(self, blocks: list[int]) -> Tensor:
        """[N, bytes], the contents of blocks."""
        at = torch.tensor(blocks, device=self._device)
        parts = [self._kv.index_select(2, at).movedim(2, 0).reshape(len(blocks), -1).view(torch.uint8)]
        if self._features is not None:
            parts.append(self._features.index_select(0, at).reshape(len(blocks), -1).view(torch.uint8))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _on_host(self, block: int) -> memoryview:
        """The content of a block, in memory of its own."""
        content = np.empty(self.num_bytes, np.uint8)
        self._exchange(block, content, is_in=False)
        return content.data

    def _exchange(self, block: int, content: NDArray[np.uint8], *, is_in: bool) -> None:
        """Copies a content [bytes] to its block in the host's memory, or from there."""
        begin = 0
        for planes in self._host:
            own = planes[block]
            part = content[begin : begin + own.size].reshape(own.shape)
            np.copyto(own, part) if is_in else np.copyto(part, own)
            begin += own.size

    def _from_device(self, blocks: list[int]) -> DeviceCopies:
        rows = self._rows(blocks)
        pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return DeviceCopies(pinned, event)


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Contents that are on the host already."""

    payloads: list[Payload]

    def wait(self) -> list[Payload]:
        return self.payloads


class DeviceCopies:
    """Contents [N, bytes] that a GPU is writing into pinned memory."""

    def __init__(self, pinned: Tensor, event: torch.cuda.Event) -> None:
        self._rows, self._event = list(pinned.numpy()), event

    def wait(self) -> list[Payload]:
        self._event.synchronize()
        # Copies, so that a block which is kept does not keep the pinned memory of all of them.
        return [bytearray(row) for row in self._rows]


def _host_bytes(data: Tensor, dim: int) -> NDArray[np.uint8]:
    """[blocks, ..., bytes], the memory of a tensor on the host, of which `dim` has the blocks."""
    found: NDArray[np.uint8] = data.view(torch.uint8).numpy()
    return np.moveaxis(found, dim, 0)


def _bytes_of(payload: Payload) -> Tensor:
    """[bytes] uint8, in the payload's own memory if torch takes it: that has to be writable, though nobody writes."""
    view = memoryview(payload)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _layout(model: LoadedModel) -> str:
    """The kernels whose layout it is, the types, and the places of all layers."""
    kernels, kv, features = model.kernels, model.kv, model.features
    team = kernels.team
    depends_on_length = any(rope.short_factors for rope in model.config.spec.ropes)
    parts = (
        *(version("penstock"), kernels.name, "" if team is None else team.library.level),
        *(str(kernels.embedding_dtype), str(kv.data.dtype), tuple(kv.data.shape[:2]), kv.data.shape[3]),
        *(kv.layout, None if features is None else (features.dtype, tuple(features.shape[1:]))),
        model.max_model_len if depends_on_length else 0,
    )
    return repr(parts)
