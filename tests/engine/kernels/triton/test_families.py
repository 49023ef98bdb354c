"""Every family by the kernels for CUDA, against transformers: what they are given beside Llama's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.select import triton_kernels
from penstock.engine.kernels.state_cache import StateCache, StateLayout
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import read_config
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.weights import load_weights
from penstock.engine.program.decoders import make_decoder
from tests.engine.configs import spread
from tests.engine.families import SPARSE, STATES, TINY, unlike
from tests.engine.model.test_transformer import make_batch, oracle_logits
from tests.engine.rounding_noise import largest

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
LATER = {"Qwen 3.5", "Granite 4 H", "Gemma 4 MoE", "GLM-4.5", "Qwen 2 MoE", "EXAONE 4", "Command R7B"}
"""Families whose parts are tried in others, too; they take longest."""
LAYERS = {"num_hidden_layers", "layer_types", "layers_block_type"}
FAMILIES = TINY | SPARSE | STATES


def make(family: str, folder: Path) -> Path:
    """The model, of two layers where all are alike: the interpreter would take longest for a third."""
    tiny = FAMILIES[family]
    return tiny.make(folder, **({} if LAYERS & tiny.entries.keys() else {"num_hidden_layers": 2}))


def tokens_of(family: str) -> list[int]:
    """More than a block; more than a window, where there is one: layers with a state take them row by row."""
    return [7 * i % 390 + 3 for i in range(18 if family in STATES else 34)]


@pytest.mark.parametrize("family", unlike("families by Triton's interpreter", without=LATER))
def test_logits_are_those_of_transformers(family: str, tmp_path: Path, device: torch.device) -> None:
    path, token_ids = make(family, tmp_path), tokens_of(family)
    config, dtype = read_config(path), torch.float32
    kernels = triton_kernels(config, device, dtype, LoadOptions(block_size=16, max_num_seqs=4))
    weights = load_weights(config, unstacked(open_files(path), config), kernels, lambda *_: None)
    kv = KVCache(KVLayout.of(config, 16), 48, dtype, device)
    states = StateCache(StateLayout.of(config), 2, device)
    decoder = make_decoder(config, weights, kernels, kv, 64, states)
    found = []
    last = len(token_ids) - 1
    for start, end in ((0, last), (last, last + 1)):
        batch = spread(make_batch([(token_ids[:end], start)]), kv.layout)
        batch.state_slots = torch.tensor([[1 if start else 0, 1, 0, end - start]], dtype=torch.int32)
        with torch.inference_mode():
            found.append(weights.lm_head(decoder(batch.to(device))).cpu())
    expected = oracle_logits(path, token_ids)
    assert largest(torch.cat(found) - expected) <= 1e-4 * max(1.0, float(expected.abs().max()))
