"""Contents of pages on their way between the device and the host; see `planning.device.PageCarrier`.

A block's content is the block as the kernels left it, in all planes, and after it the features of its tokens that the
model keeps for a head, if it does. A draft model's own KV is not part of it: what it lacks, it reads again. A slot's
content is all of the slot, pending rows included, though nobody finds these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.planning.device import OutOfMemory, Payload


class PageCopies:
    """The carrier of pages whose contents are in one tensor or in several.

    On a GPU, contents go through pinned memory and nothing waits for the device: the stream makes a copy happen after
    the steps before it and before those after it.
    """

    def __init__(self, parts: list[tuple[Tensor, int]], layout: str) -> None:
        """`parts` are the tensors, each with its dimension of pages."""
        self._parts, self._device = parts, parts[0][0].device
        self._sizes = [data.select(dim, 0).numel() * data.itemsize for data, dim in parts]
        # On the host, numpy copies a page in one call; torch takes several, and each lets go of the lock.
        self._host = [_host_bytes(data, dim) for data, dim in parts if data.device.type == "cpu"]
        self.num_bytes = sum(self._sizes)
        self.layout = layout

    @torch.inference_mode()
    def copy_out(self, pages: list[int]) -> HostCopies | DeviceCopies:
        try:
            if self._device.type == "cpu":
                return HostCopies([self._on_host(page) for page in pages])
            return self._from_device(pages)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None

    @torch.inference_mode()
    def copy_in(self, pages: list[int], payloads: list[Payload]) -> None:
        if not self.num_bytes:
            return
        if self._device.type == "cpu":
            for page, payload in zip(pages, payloads, strict=True):
                for own, part in self._beside(page, np.frombuffer(payload, np.uint8)):
                    np.copyto(own, part)
        else:
            self._to_device(pages, payloads)

    def _to_device(self, pages: list[int], payloads: list[Payload]) -> None:
        pinned = torch.empty((len(pages), self.num_bytes), dtype=torch.uint8, pin_memory=True)
        for row, payload in zip(pinned, payloads, strict=True):
            row.copy_(_bytes_of(payload))
        rows = pinned.to(self._device, non_blocking=True)
        for page, row in zip(pages, rows, strict=True):
            self._put(page, row)

    def _put(self, page: int, row: Tensor) -> None:
        """Overwrites a page with a content [bytes] on the same device."""
        for (data, dim), content in zip(self._parts, torch.split(row, self._sizes), strict=True):
            target = data.select(dim, page)
            target.copy_(content.view(data.dtype).view(target.shape))

    def _rows(self, pages: list[int]) -> Tensor:
        """[N, bytes], the contents of pages."""
        at = torch.tensor(pages, device=self._device)
        rows = [
            data.index_select(dim, at).movedim(dim, 0).reshape(len(pages), -1).view(torch.uint8)
            for data, dim in self._parts
        ]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0]

    def _on_host(self, page: int) -> memoryview:
        """The content of a page, in memory of its own."""
        content = np.empty(self.num_bytes, np.uint8)
        for own, part in self._beside(page, content):
            np.copyto(part, own)
        return content.data

    def _beside(
        self, page: int, content: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yields the parts of a page in the host's memory, each with the part of a content [bytes] that goes there."""
        begin = 0
        for pages in self._host:
            own = pages[page]
            yield own, content[begin : begin + own.size].reshape(own.shape)
            begin += own.size

    def _from_device(self, pages: list[int]) -> DeviceCopies:
        rows = self._rows(pages)
        pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return DeviceCopies(pinned, event)


class BlockCopies(PageCopies):
    """The carrier of a whole model's blocks."""

    def __init__(self, model: LoadedModel) -> None:
        features = [] if model.features is None else [(model.features, 0)]
        super().__init__([(model.kv.data, 2), *features], _layout(model))


class StateCopies(PageCopies):
    """The carrier of a whole model's state slots."""

    def __init__(self, model: LoadedModel) -> None:
        states = model.states
        assert states is not None
        super().__init__([(states.data, 0)], repr((_layout(model), states.layout)))


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
        # Copies, so that a page which is kept does not keep the pinned memory of all of them.
        return [bytearray(row) for row in self._rows]


def _host_bytes(data: Tensor, dim: int) -> NDArray[np.uint8]:
    """[pages, ..., bytes], the memory of a tensor on the host, of which `dim` has the pages."""
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
