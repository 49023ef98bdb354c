"""The tensors that parts of a model compute with: linear maps, and norms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last dimension: RMSNorm, or LayerNorm without a bias."""

    name: str
    """"" is a norm without weights: all are 1."""
    size: int
    offset: float = 0.0
    """Is added to the weights as they are stored."""
    is_centered: bool = False
    """Whether the mean is subtracted, as in LayerNorm."""
    factor: float = 1.0
    """The weights as they are stored are multiplied by it."""
    suffix: str = ".weight"
    """The suffix of the name on disk."""

    @property
    def tensor(self) -> str:
        """The name of its weights."""
        return f"{self.name}{self.suffix}"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The dimensions of a head that a checkpoint rotates in pairs.

    Loading puts them in our order, in which every pair is half a head apart: queries and keys in another order have the
    same products.
    """

    head_dim: int
    rotated: int
    """The first dimensions, so many, are rotated, and the others pass."""
    is_interleaved: bool
    """Whether dimension 2i is rotated with 2i + 1; otherwise dimension i is rotated with i + rotated / 2."""
    has_gates: bool = False
    """Whether as many gates follow each head's rows; loading puts them before the rows of all heads, as they are."""
    rotates_last: bool = False
    """Whether the last dimensions are rotated, in pairs that are half of them apart; the first ones pass, and stay."""

    @property
    def is_ours(self) -> bool:
        is_whole = self.rotated == self.head_dim or self.rotates_last
        return is_whole and not self.is_interleaved and not self.has_gates

    @property
    def unless_ours(self) -> HeadOrder | None:
        """The order; None if it is ours."""
        return None if self.is_ours else self

    @property
    def dimensions(self) -> list[int]:
        """The checkpoint's dimension for each of ours."""
        first = range(0, self.rotated, 2) if self.is_interleaved else range(self.rotated // 2)
        second = range(1, self.rotated, 2) if self.is_interleaved else range(self.rotated // 2, self.rotated)
        if self.rotates_last:
            passing = self.head_dim - self.rotated
            return [*range(passing), *(passing + dimension for dimension in (*first, *second))]
        middle = (self.rotated + self.head_dim) // 2
        return [*first, *range(self.rotated, middle), *second, *range(middle, self.head_dim)]


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of a linear map of which a checkpoint has some of each kind in every group.

    Loading puts the rows of a kind together.
    """

    count: int
    sizes: tuple[int, ...]
    """The rows of each kind in one group."""

    @property
    def rows(self) -> list[int]:
        """The checkpoint's row for each of ours."""
        width, found, start = sum(self.sizes), list[int](), 0
        for size in self.sizes:
            first = (group * width + start for group in range(self.count))
            found += [row + i for row in first for i in range(size)]
            start += size
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a linear map that one tensor of the checkpoint has."""

    name: str
    sections: tuple[int, ...]
    """The numbers of rows of each kind, one kind after another; each is split among ranks by itself."""
    heads: HeadOrder | None = None
    """The order of the rows of each head, where that is another one than ours; of all sections but a third."""
    groups: Groups | None = None
    """The order of all rows, where kinds alternate; there is one section."""

    @property
    def count(self) -> int:
        return sum(self.sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMap:
    """A linear map of a layer, fused of one or more of the checkpoint's."""

    rows: tuple[Rows, ...]
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    """Whether the rows are gates, then as many ups."""
    sums: bool = False
    """Among ranks, each has some of its inputs, and the outputs are summed. Otherwise each has some of its outputs."""
    stays: bool = False
    """Whether it stays in floating point where others are quantized."""
    is_unpacked: bool = False
    """Whether it is loaded in floating point even where the checkpoint has it quantized."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor with one number for each of something, or a few, kept in float32."""

    name: str
    """The full one in its layer: nothing follows it."""
    size: int
    each: int = 1
    sections: tuple[int, ...] = ()
    """The parts of `size`, one kind after another; each is split among ranks by itself. Empty stands for one kind."""

    @property
    def shape(self) -> tuple[int, ...]:
        """But for axes of length 1, which a checkpoint may have."""
        return (self.size,) if self.each == 1 else (self.size, self.each)
