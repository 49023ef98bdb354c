"""The decoder against transformers, the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from engine.model.batch import Batch
from engine.model.config import LoadOptions
from engine.model.loader import LoadedModel, load_model
from tests.engine.checkpoints import FAMILIES, make_checkpoint


def load(path: Path, **options: object) -> LoadedModel:
    return load_model(
        path,
        LoadOptions(dtype="float32", block_size=8, num_blocks=64, **options),
        lambda _: None,
        lambda *_: None,
    )


def oracle_logits(path: Path, token_ids: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    token_ids = torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    model = load(path)
    batch = Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=torch.arange(70, dtype=torch.int32),
        query_starts=torch.tensor([0, 70], dtype=torch.int32),
        context_lens=torch.tensor([70], dtype=torch.int32),
        block_tables=torch.arange(1, 10, dtype=torch.int32)[None],
        sample_rows=torch.arange(70, dtype=torch.int32),
    )
    logits = model.decoder(batch)
    expected = oracle_logits(path, token_ids)
    assert (logits - expected).abs().max() < 1e-4
