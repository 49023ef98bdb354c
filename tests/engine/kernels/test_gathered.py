"""Long prefills by torch's attention in the table of kernels, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.memory import largest_batches
from engine.kernels import gathered, prefill_choice
from engine.kernels import select as selecting
from engine.kernels.gathered import FLASH, LongPrefillBackends
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.reference import PagedAttention
from engine.model.config import LoadOptions, ModelConfig
from engine.model.fields import Fields
from engine.model.parse import parse_config, read_config
from engine.model.safetensors import TensorFiles
from engine.model.transformer import Decoder
from engine.model.weights import load_weights
from tests.engine.checkpoints import make_checkpoint, make_config
from tests.engine.kernels.test_prefill_choice import CPU, MODEL, Stopwatch, lower_right

CUDA = torch.device("cuda", 0)


LLAMA = parse_config(Fields("config.json", make_config("llama")))
MISTRAL = parse_config(Fields("config.json", make_config("mistral")))


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *times_s: float,
    config: ModelConfig = LLAMA,
    max_batch_tokens: int = 64,
    is_static: bool = True,
) -> tuple[Kernels, Kernels, list[str]]:
    """The table that is chosen, the one that it was made of, and what was said."""
    plain = replace(reference_kernels(CPU, torch.float32), name="triton", is_static=is_static)
    said: list[str] = []
    monkeypatch.setattr(selecting, "triton_kernels", lambda *_: plain)
    monkeypatch.setattr(selecting, "only_what_runs", lambda kernels, *_: kernels)
    monkeypatch.setattr(selecting, "LONG_CHUNK", 32)
    monkeypatch.setattr(prefill_choice, "seconds_on_card", Stopwatch(*times_s))
    options = LoadOptions(max_batch_tokens=max_batch_tokens)
    kernels = selecting.select(config, CUDA, torch.float32, options, said.append)
    return kernels, plain, said


def test_the_table_has_what_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch, 0.002, 0.001, 0.002, 0.001)
    assert len(said) == 1
    assert replace(kernels, attention=plain.attention) == plain
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=16, block_size=16)
    long, short = (
        prefill_choice._batch(replace(MODEL, shape=shape), num_tokens, 40) for num_tokens in (32, 31)
    )
    assert isinstance(kernels.attention(long, shape), gathered.GatheredAttention)
    assert isinstance(kernels.attention(short, shape), PagedAttention)


def test_the_table_stays_as_it_is_where_triton_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain, said = on_a_gpu(monkeypatch, 0.001, 0.002, 0.001, 0.002)
    assert kernels == plain
    assert len(said) == 1


@pytest.mark.parametrize(
    "changes",
    [{"config": MISTRAL}, {"max_batch_tokens": 31}, {"is_static": False}],
    ids=["windows", "short steps", "plain torch"],
)
def test_what_has_no_use_for_it_is_not_asked(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_choice, "choose", None)
    kernels, plain, said = on_a_gpu(monkeypatch, **changes)
    assert kernels == plain
    assert said == []


# Memory


class Gathered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the sizes of what is gathered, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ == "index_select" and args[0].shape[1:] == (16 * 24,):
            self.sizes.append(result.numel())
        return result


def test_the_steps_that_are_measured_gather_the_longest_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(make_checkpoint("qwen3", tmp_path))
    plain = reference_kernels(CPU, torch.float32)
    backends = LongPrefillBackends(min_queries=32, first_chunk=FLASH, later_chunk=FLASH)
    kernels = replace(
        plain,
        attention=partial(gathered.prepare_attention, prepare_paged=plain.attention, backends=backends),
    )
    weights = load_weights(config, TensorFiles(tmp_path), kernels, lambda *_: None)
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=24, block_size=16)
    decoder = Decoder(config, weights, kernels, KVCache(shape, 1, torch.float32, CPU), 100)
    monkeypatch.setattr(gathered, "causal_lower_right", lower_right)
    with Gathered() as found:
        for batch in largest_batches(LoadOptions(max_batch_tokens=50, max_num_seqs=7), 100, 16):
            decoder(batch)
    keys_or_values = 2 * 7 * 16 * 24
    assert found.sizes == [keys_or_values] * 6  # of 3 layers
