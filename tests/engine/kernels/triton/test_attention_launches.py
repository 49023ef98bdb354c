"""The launches of attention: their grids follow from shapes alone, and its workspace is for so many sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.triton import attention
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from tests.engine.kernels.triton.test_attention import DECODE, AttentionInput
from tests.engine.kernels.triton.test_attention_segments import workspace_bytes


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the kernels' place; notes their grids, and what torch does besides."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.grids: list[tuple[str, tuple[int, ...]]] = []
        self.operations: list[str] = []
        for name in ("plan_segments", "decode_attention", "prefill_attention"):
            patch.setattr(attention, f"{name}_kernel", _Recorder(name, self.grids))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **kwargs or {})


@dataclass
class _Recorder:
    name: str
    grids: list[tuple[str, tuple[int, ...]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.grids.append((self.name, grid))


def test_grids_follow_from_shapes_and_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without contents, which raise whenever someone looks; the result is all that is allocated."""
    meta = torch.device("meta")
    shape = KVShape(num_kv_heads=8, head_dim=128, block_size=16)
    workspace = Workspace(shape, torch.bfloat16, 32, 64, meta, chip=Chip(132, TensorCores.WGMMA, 227 << 10))
    lens = torch.empty(64, dtype=torch.int32, device=meta)
    starts, tables = torch.empty(65, dtype=torch.int32, device=meta), lens.expand(9, 64).T.contiguous()
    queries = torch.empty(64, 32, 128, dtype=torch.bfloat16, device=meta)
    layer_kv = torch.empty(2, 99, 8 * 16 * 128, dtype=torch.bfloat16, device=meta)
    with Launches(monkeypatch) as launches:
        attend = TritonAttention(
            Batch(lens, lens, starts, lens, tables, lens, max_query_len=1), shape, workspace
        )
        attended = attend(queries, layer_kv, 0)
    assert attended.shape == (64, 32 * 128)
    assert launches.operations == ["aten.empty.memory_format"]
    assert launches.grids == [("plan_segments", (7,)), ("decode_attention", (97, 8))]
    lens = torch.empty(1000, dtype=torch.int32, device=meta)
    with Launches(monkeypatch) as launches:
        attend = TritonAttention(Batch(lens, lens, starts, starts[1:], tables, lens), shape, workspace)
        attend(torch.empty(1000, 32, 128, dtype=torch.bfloat16, device=meta), layer_kv, 0)
    assert launches.grids[-1][0] == "prefill_attention"
    for shortest, names in ((17, ["prefill_attention"]), (1, [name for name, _ in launches.grids])):
        batch = Batch(lens, lens, starts, starts[1:], tables, lens, min_query_len=shortest)
        with Launches(monkeypatch) as launches:
            attend = TritonAttention(batch, shape, workspace)
            attend(torch.empty(1000, 32, 128, dtype=torch.bfloat16, device=meta), layer_kv, 0)
        assert [name for name, _ in launches.grids] == names


def test_a_step_beyond_the_workspace_is_refused(device: torch.device) -> None:
    case = AttentionInput(lengths=DECODE, device=device)
    workspace = Workspace(case.shape, case.dtype, 4, 2, device)
    with pytest.raises(ValueError, match="3 sequences"):
        case.attend(workspace)


def test_a_workspace_knows_its_size(device: torch.device) -> None:
    shape = KVShape(num_kv_heads=2, head_dim=80, block_size=16)
    workspace = Workspace(shape, torch.float16, 8, 5, device, windows=(0, 7), chip=Chip(9))
    items = 5 + 9  # 9 SMs run 18 programs, of 2 heads each
    rows = items * 2 * 16
    assert workspace_bytes(workspace) == 4 * (rows * (80 + 2) + 5 * 2 + 2 * (items + 6 + 5))
