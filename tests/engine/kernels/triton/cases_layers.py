"""The small kernels of a layer, as models of common sizes launch them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.sequence_table import SequenceTable, StepTokens
from penstock.engine.kernels.triton import activation, inputs, norms, rotary
from tests.engine.kernels.triton.compiling import META, Case, empty, recorded

ROWS, BLOCKS = 5, 1 << 22
"""With so many blocks, places in the cache have more than 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model's layers."""

    name: str
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    dtype: torch.dtype = torch.bfloat16


SIZES = [
    Size(name="llama-8b", hidden=4096, inner=14336, num_heads=32, num_kv_heads=8, head_dim=128),
    Size(
        name="qwen3-0.6b", hidden=1024, inner=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True
    ),
    Size(
        name="qwen2-0.5b, fp16", hidden=896, inner=4864, num_heads=14, num_kv_heads=2, head_dim=64,
        dtype=torch.float16,
    ),
    Size(
        name="odd, fp32", hidden=2560, inner=6911, num_heads=20, num_kv_heads=20, head_dim=80, qk_norm=True,
        dtype=torch.float32,
    ),
    Size(
        name="wide", hidden=16384, inner=53248, num_heads=128, num_kv_heads=8, head_dim=256, qk_norm=True
    ),
]  # fmt: skip


def norm(size: Size, dtype: torch.dtype | None = None) -> list[Case]:
    """With a weight of its own type, or of another."""
    x = empty(ROWS, size.hidden, dtype=size.dtype)
    weight = empty(size.hidden, dtype=dtype or size.dtype)
    return recorded(
        f"{size.name}, {weight.dtype} weight",
        lambda: (norms.rms_norm(x, weight, 1e-6), norms.add_rms_norm(x, x, weight, 1e-6)),
    )


def layer_norm(size: Size) -> list[Case]:
    x, weight = empty(ROWS, size.hidden, dtype=size.dtype), empty(size.hidden, dtype=size.dtype)
    return recorded(f"layer norm, {size.name}", lambda: norms.layer_norm(x, weight, 1e-6))


def rotate_and_write(
    size: Size, kv_dtype: torch.dtype | None = None, *, norms_last: bool = False, norms_values: bool = False
) -> list[Case]:
    """Where norms are last, queries are scaled by their position, too."""
    shape = KVShape(num_kv_heads=size.num_kv_heads, head_dim=size.head_dim, block_size=16)
    stored = kv_dtype or size.dtype
    angles = empty(99, size.head_dim // 2, dtype=torch.float32)
    places = TokenPlaces(
        positions=empty(ROWS),
        in_cache=empty(ROWS, dtype=torch.int64),
        cos=angles,
        sin=angles,
        q_scales=empty(99, dtype=torch.float32) if norms_last else None,
    )
    weight = empty(size.head_dim, dtype=size.dtype) if size.qk_norm else None
    more = f"{f', to {kv_dtype}' if kv_dtype else ''}{', then norms' * norms_last}{', norms of values' * norms_values}"
    return recorded(
        f"{size.name}{more}",
        lambda: rotary.rotate_and_write(
            empty(ROWS, (size.num_heads + 2 * size.num_kv_heads) * size.head_dim, dtype=size.dtype),
            weight,
            weight,
            1e-6,
            places,
            empty(2, BLOCKS, shape.stored_elements(stored), dtype=stored, device=META),
            shape,
            norms_last=norms_last,
            norms_values=norms_values,
            spreads=kv_dtype is not None,
        ),
    )


def activated(size: Size, kind: str) -> list[Case]:
    run, num_parts = (activation.activated, 1) if kind == "relu2" else (activation.glu, 2)
    x = empty(ROWS, num_parts * size.inner, dtype=size.dtype)
    return recorded(f"{kind}, {size.name}", lambda: run(x, kind))


def gather(entries: int) -> list[Case]:
    table = SequenceTable(256, 2560, 16, torch.device("cpu"), num_tables=3)
    step = StepTokens(empty(ROWS), empty(ROWS + 1), empty(9), num_blocks=30, max_query_len=entries)
    return recorded(f"{entries} at a time", lambda: inputs.gather(table, step))


_BATCH = blank_batch([3, 2], [3, 2], empty(2, 9))
CASES = [
    *recorded("blocks of 16", lambda: rotary.kv_places(_BATCH, 16)),
    *gather(inputs.FEW),
    *gather(inputs.MANY),
    *(case for size in SIZES for case in norm(size)),
    *(case for size in SIZES[:2] for case in (*norm(size, torch.float32), *layer_norm(size))),
    *(case for size in SIZES for case in rotate_and_write(size)),
    *(case for size in SIZES if size.qk_norm for case in rotate_and_write(size, norms_last=True)),
    *(case for size in SIZES if size.qk_norm for case in rotate_and_write(size, norms_values=True)),
    *(case for size in SIZES[:2] for case in rotate_and_write(size, torch.int8)),
    *(case for size in SIZES[:2] for case in rotate_and_write(size, torch.uint8)),
    *(case for size in SIZES for case in activated(size, "silu")),
    *(case for size in SIZES[:2] for kind in ("gelu_tanh", "gelu") for case in activated(size, kind)),
    *(case for size in SIZES[1:4] for case in activated(size, "relu2")),
]
