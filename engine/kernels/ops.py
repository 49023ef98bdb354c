"""The kernel table: the operations that a decoder and a step are made of, and their plain implementation.

The decoder and the sampler call nothing but the table's operations. `select` chooses the table for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.kernels import experts, latents, recurrent, reference, sequence_table
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.experts import ExpertLinear, ExpertPacker, ListedExperts, Route, RunExperts
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.linear import DenseLinear, IntegerLinear, Linear, LinearPacker, chained
from penstock.engine.kernels.packed import PACKED_FORMATS, UnpackedLinear, pack
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.kernels.recurrent import RunGatedDelta, RunMamba2, RunShortConv
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.sequence_table import Gather
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.quant.integers import Integers
from penstock.engine.sampling.reference import choose, most_likely
from penstock.engine.sampling.tables import Choose, MostLikely

Say = Callable[[str], None]
"""Is called with lines for the operator."""


class Attend(Protocol):
    """One step's attention; see `reference.PagedAttention`."""

    def __call__(
        self,
        queries: Tensor,
        layer_kv: Tensor,
        window: int,
        scale: float | None = None,
        softcap: float = 0.0,
        block_tables: Tensor | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
    ) -> Tensor: ...


class RotateAndWrite(Protocol):
    """See `reference.rotate_and_write`."""

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        places: TokenPlaces,
        layer_kv: Tensor | None,
        shape: KVShape,
        *,
        norms_last: bool = False,
        norms_values: bool = False,
        spreads: bool = False,
    ) -> Tensor: ...


RotateAndWriteLatents = Callable[[Tensor, Tensor, Tensor, float, TokenPlaces, Tensor, KVShape], Tensor]
"""See `latents.rotate_and_write_latents`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one device.

    Each is specified by the function or class of the same name in `kernels/reference.py`, `route` and `run_experts`
    in `kernels/experts.py`, `rotate_and_write_latents` in `kernels/latents.py`, `gated_delta`, `mamba2` and
    `short_conv` in `kernels/recurrent.py`, `gather` in `kernels/sequence_table.py`, `choose` and `most_likely` in
    `sampling/reference.py`. The types of linear maps, of the embedding, of the KV cache and of activations are
    independent; each linear map has its own.
    """

    name: str
    device: torch.device
    embedding_dtype: torch.dtype
    activation_dtype: torch.dtype
    kv_dtype: torch.dtype
    linear: LinearPacker
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    kv_places: Callable[[Batch, int], Tensor]
    rotate_and_write: RotateAndWrite
    rotate_and_write_latents: RotateAndWriteLatents
    glu: Callable[[Tensor, str], Tensor]
    activated: Callable[[Tensor, str], Tensor]
    route: Route
    run_experts: RunExperts
    gated_delta: RunGatedDelta
    mamba2: RunMamba2
    short_conv: RunShortConv
    attention: Callable[[Batch, KVShape], Attend]
    """Prepares one step's attention, which every layer then calls."""
    gather: Gather
    choose: Choose
    most_likely: MostLikely
    expert_linear: ExpertPacker | None = None
    """Packs the linear maps of experts as `run_experts` reads them; None stands for a list packed by `linear`."""
    packs: tuple[type[Format], ...] = (Integers,)
    """The formats, besides weights in floating point, that linear maps keep as they are; others are unpacked."""
    keeps_narrow: bool = False
    """Whether integers take no more memory than `Integers.num_bytes` says, and the embedding may be a linear map
    of them, whose rows are read as tokens need them."""
    is_static: bool = False
    """No operation looks at a batch on the host, so that a graph can hold a whole step."""
    ranks: Ranks | None = None
    """The ranks that have parts of the linear maps and of the vocabulary; None if this process has all of them."""
    expert_ranks: Ranks | None = None
    """The ranks that share out the experts, and each run sequences of their own through all other layers; None if they
    are shared as the rest of the model is. Then `ranks` is None."""
    team: native.Team | None = None
    """If there is one, it runs whole passes of a decoder in place of the operations from `rms_norm` to `attention`."""

    def pack_experts(
        self,
        experts: Iterable[tuple[NamedTensors, Tensor | None]],
        format: Format,
        num_experts: int,
        out_features: int,
        *,
        gated: bool = False,
    ) -> ExpertLinear:
        """See `ExpertPacker`."""
        if self.expert_linear is not None:
            return self.expert_linear(experts, format, num_experts, out_features, gated=gated)
        return ListedExperts([self.linear(own, format, bias) for own, bias in experts], out_features)

    def pack_latent_maps(self, up: Tensor, plain_size: int) -> Tensor | native.NativeLatentMaps:
        """The matrices [num_heads, plain + value, latent] of a layer's latent attention, as they are run."""
        if self.team is None:
            return up
        return native.NativeLatentMaps(self.team, up, plain_size, self.embedding_dtype)

    def whole(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Rows of logits as an output head makes them -> [R, vocab]: of ranks, each makes those of its own tokens.

        All ranks call it at the same place; what is beyond the last rank's tokens is padding.
        """
        return logits if self.ranks is None else self.ranks.gather(logits)[:, :vocab_size].contiguous()

    def cap(self, head: Linear, scale: float, softcap: float) -> Linear:
        """An output head whose logits are multiplied by `scale` and, with a softcap, bent by tanh."""
        if not isinstance(head, native.NativeLinear):
            return chained(head, partial(reference.cap, scale=scale, softcap=softcap))
        head.cap(scale, softcap)
        return head


def reference_kernels(
    device: torch.device, dtype: torch.dtype, cpu_dtype: torch.dtype = torch.float32
) -> Kernels:
    """Plain torch.

    Args:
        cpu_dtype: the type of everything on a CPU, even if another was asked for: half precision there is 50 times
            slower.
    """
    dtype = cpu_dtype if device.type == "cpu" else dtype

    def linear(
        tensors: NamedTensors,
        format: Format,
        bias: Tensor | None,
        *,
        gated: bool = False,  # noqa: ARG001
    ) -> Linear:
        moved = None if bias is None else bias.to(device, dtype)
        if device.type == "cuda" and isinstance(format, PACKED_FORMATS):
            return UnpackedLinear(pack(tensors, format, device), moved)
        if isinstance(format, Integers):
            return IntegerLinear(tensors, format, moved)
        return DenseLinear(format.unpack(tensors).to(device, dtype), moved)

    return Kernels(
        name="torch",
        device=device,
        embedding_dtype=dtype,
        activation_dtype=dtype,
        kv_dtype=dtype,
        linear=linear,
        rms_norm=reference.rms_norm,
        layer_norm=reference.layer_norm,
        add_rms_norm=reference.add_rms_norm,
        kv_places=reference.kv_places,
        rotate_and_write=reference.rotate_and_write,
        rotate_and_write_latents=latents.rotate_and_write_latents,
        glu=reference.glu,
        activated=reference.activated,
        route=experts.route,
        run_experts=experts.run_experts,
        gated_delta=recurrent.gated_delta,
        mamba2=recurrent.mamba2,
        short_conv=recurrent.short_conv,
        attention=latents.attention,
        gather=sequence_table.gather,
        choose=choose,
        most_likely=most_likely,
        packs=PACKED_FORMATS if device.type == "cuda" else (Integers,),
    )
