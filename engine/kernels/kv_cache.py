"""The tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.quant import rotation
from penstock.engine.spec import LatentAttention

_PAGE = 4096

QUANTIZED = {"int8": torch.int8, "fp8": torch.int8, "int4": torch.uint8}
"""The types of the elements of a quantized cache by name; `KVFormat` says what they hold.

int8 and fp8 both mean int8. With such scales, e4m3's 3 bits of significand cost several times as much accuracy as
rounding to int8, for the same memory and the same speed: kernels make 16 bits of either.
"""
LARGEST_NUMBER = 127.0
"""The number that stands for the largest magnitude of a head in a cache of 8 bits."""
MAX_TABLES = 16
"""The most block tables of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """How a cache stores numbers: as they are, or as integers with scales, which a block ends with.

    Keys are spread (see `reference.rotate_and_write`) before they become integers; values are, too, if they become
    integers of 4 bits.
    """

    dtype: torch.dtype
    """The type of the cache's elements, which tells formats apart."""
    numbers_per_element: int = 1
    scale_dtype: torch.dtype | None = None
    """None if numbers are stored as they are."""
    group: int = 0
    """The most neighbours in a head that share a scale; 0 if all of a head do."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> KVFormat:
        """The format of a cache whose elements have this type."""
        return _FORMATS.get(dtype) or cls(dtype=dtype)

    @property
    def is_quantized(self) -> bool:
        return self.scale_dtype is not None

    @property
    def is_packed(self) -> bool:
        """Whether an element has several numbers."""
        return self.numbers_per_element > 1

    def group_of(self, head_dim: int) -> int:
        """The neighbours in a head of this size that share a scale: within one half of it, as they are spread."""
        return min(self.group, rotation.block_size(head_dim // 2)) if self.group else head_dim

    def takes(self, head_dim: int) -> bool:
        """Returns whether a head of this size can be stored: groups of fewer than 16 are all scales."""
        return not self.is_packed or self.group_of(head_dim) >= _LEAST_GROUP


_LEAST_GROUP = 16
_FORMATS = {
    torch.int8: KVFormat(dtype=torch.int8, scale_dtype=torch.float32),
    torch.uint8: KVFormat(dtype=torch.uint8, numbers_per_element=2, scale_dtype=torch.float16, group=32),
}


def is_quantized(dtype: torch.dtype) -> bool:
    """Returns whether a cache whose elements have this type has scales."""
    return KVFormat.of(dtype).is_quantized


def numbers_and_scales(layer_kv: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns one layer's cache as kernels take it: its elements, and if it is quantized, the same memory as scales.

    Blocks have multiples of 4 bytes.
    """
    scale_dtype = KVFormat.of(layer_kv.dtype).scale_dtype
    return layer_kv, None if scale_dtype is None else layer_kv.view(scale_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The keys (or values) of one layer in one block."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    latent_size: int = 0
    """The first numbers of a key, so many, are its value, too; 0 if values are kept beside keys."""

    @property
    def halves(self) -> int:
        """2 if values are kept beside keys, else 1."""
        return 1 if self.latent_size else 2

    def group(self, format: KVFormat) -> int:
        """The neighbours that share a scale in a quantized cache: of a latent, as many as are rotated."""
        return self.head_dim - self.latent_size if self.latent_size else format.group_of(self.head_dim)

    def num_scales(self, format: KVFormat) -> int:
        """The scales of a head of a token in a quantized cache."""
        return self.head_dim // self.group(format)

    @property
    def block_elements(self) -> int:
        return self.num_kv_heads * self.block_size * self.head_dim

    def number_elements(self, format: KVFormat) -> int:
        """Elements of a cache that they take, without scales."""
        return self.block_elements // format.numbers_per_element

    def stored_elements(self, dtype: torch.dtype) -> int:
        """Elements of a cache of type `dtype` that they take.

        If it is quantized, the block ends with a scale, or several, for each head of each token.
        """
        format = KVFormat.of(dtype)
        if format.scale_dtype is None:
            return self.block_elements
        scales = self.num_kv_heads * self.block_size * self.num_scales(format)
        return self.number_elements(format) + scales * format.scale_dtype.itemsize // dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlace:
    """Where the keys and values of a layer are: in which part of which plane of the blocks of which block table."""

    shape: KVShape
    plane: int
    part: int
    table: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of a model's cache.

    A block has a number of planes, each of which holds the keys and values of one layer, or of several narrow ones. If
    all layers see equally many tokens, a block has them all. Otherwise the layers of each window, and the layers
    without one, fill the blocks of block tables of their own; the rarest kind fills one, and so few planes are left
    empty. The blocks of a model without attention are empty.

    A stage has the block tables of the whole model, and its layers are shared out among those of their window.
    """

    places: Mapping[int, KVPlace]
    """By layer, of the layers that have attention."""
    windows: tuple[int, ...]
    """By block table, the tokens that its layers see; 0 if they see all. Tables of layers that see all come first."""
    num_planes: int
    block_size: int

    @classmethod
    def of(cls, model: ModelConfig, block_size: int, *, beside: KVLayout | None = None) -> KVLayout:
        """Returns the layout of a model; with another's, `beside`, all layers lie in the first of its tables."""
        heads = model.spec.attentions
        shapes = {
            number: KVShape(
                num_kv_heads=h.num_kv_heads,
                head_dim=h.head_dim,
                block_size=block_size,
                latent_size=h.latent_size if isinstance(h, LatentAttention) else 0,
            )
            for number, h in heads.items()
        }
        stage = model.spec.stage
        given = (0,) if stage is None else stage.windows
        if not heads:
            return cls(places={}, windows=given, num_planes=0, block_size=block_size)
        widest = max(shape.block_elements for shape in shapes.values())
        filled: dict[int, list[list[int]]] = {}
        """By window, the layers in each plane."""
        for number, own in heads.items():
            if own.shares is not None:
                continue
            shape = shapes[number]
            planes = filled.setdefault(own.window if beside is None else 0, [])
            room = (s for s in planes if shapes[s[0]] == shape and len(s) < widest // shape.block_elements)
            found = next(room, None)
            if found is None:
                planes.append([number])
            else:
                found.append(number)
        if stage is None:
            num_planes, windows = _shared_out({window: len(planes) for window, planes in filled.items()})
        else:
            num_planes = max(-(-len(planes) // given.count(window)) for window, planes in filled.items())
            windows = given
        places: dict[int, KVPlace] = {}
        for window, planes in filled.items():
            for at, layers in enumerate(planes):
                table = windows.index(window) + at // num_planes
                for part, number in enumerate(layers):
                    places[number] = KVPlace(
                        shape=shapes[number], plane=at % num_planes, part=part, table=table
                    )
        return cls(
            places={
                number: places[number if own.shares is None else own.shares] for number, own in heads.items()
            },
            windows=windows if beside is None else beside.windows,
            num_planes=num_planes,
            block_size=block_size,
        )

    @classmethod
    def even(cls, shape: KVShape, num_layers: int) -> KVLayout:
        """The layout of layers which are all alike and see all tokens."""
        places = {plane: KVPlace(shape=shape, plane=plane, part=0, table=0) for plane in range(num_layers)}
        return cls(places=places, windows=(0,), num_planes=num_layers, block_size=shape.block_size)

    @property
    def shapes(self) -> set[KVShape]:
        return {place.shape for place in self.places.values()}

    @property
    def halves(self) -> int:
        """2 if layers keep keys and values, 1 if they keep latents: all keep the same."""
        return max((shape.halves for shape in self.shapes), default=2)

    def plane_elements(self, dtype: torch.dtype) -> int:
        """Elements of a cache of type `dtype` that the keys (or values) of a plane take in one block."""
        places = self.places.values()
        return max(((place.part + 1) * place.shape.stored_elements(dtype) for place in places), default=0)

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of all its planes."""
        return self.num_planes * self.halves * self.plane_elements(dtype) * dtype.itemsize


def _shared_out(num_layers: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """The planes of a block, and the windows of the block tables, for so many planes of layers by window."""
    num_planes = min(num_layers.values())
    while sum(-(-num // num_planes) for num in num_layers.values()) > MAX_TABLES:
        num_planes += 1
    tables = ([window] * -(-num // num_planes) for window, num in sorted(num_layers.items()))
    return num_planes, tuple(chain.from_iterable(tables))


class KVCache:
    """Keys and values of `num_blocks` blocks, all layers.

    `data` is [num_planes, 2, num_blocks, elements of a plane], or [num_planes, 1, ...] of latents. The layout inside a
    layer's part of a block is left to the kernels that write and read it; the reference has [num_kv_heads, block_size,
    head_dim]. No sequence owns block 0: unused entries of block tables point to it, and what lies there is never read.

    If the type is int8, the numbers of a layer are followed by the bytes of float32 scales
    [num_kv_heads, block_size], of latents [block_size, `KVShape.num_scales`]: an element is its number times the scale
    of its token and head, and of its group of a latent.

    If it is uint8, an element is two numbers of 4 bits, the first of them in its lower bits, and float16 scales
    [num_kv_heads, block_size, `KVShape.num_scales`] follow: a number stands for itself less 8, times the scale of its
    group.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.data = zeros(
            (layout.num_planes, layout.halves, num_blocks, layout.plane_elements(dtype)), dtype, device
        )

    def layer(self, index: int) -> Tensor:
        """[2 or 1, num_blocks, stored elements of a block], keys first; from block to block there may be a stride."""
        place = self.layout.places[index]
        stored = place.shape.stored_elements(self.data.dtype)
        return self.data[place.plane, :, :, place.part * stored : (place.part + 1) * stored]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks [N] in all layers, as if all at once; the targets are distinct."""
        self.data[:, :, targets.long()] = self.data[:, :, sources.long()]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they start at a page, and take memory and time only where they are touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(num_bytes + _PAGE, np.uint8))
    start = -pages.data_ptr() % _PAGE
    return pages[start : start + num_bytes].view(dtype).view(shape)
