"""The layer of multi-token prediction that is trained for the demo model is the one that Penstock serves."""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lab.demo.head import before, read_target
from lab.demo.prediction import Prediction, export
from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.model.checkpoint import read_config
from tests.engine.model.test_prediction import drafting
from tests.engine.test_prediction import TOKEN_IDS, hidden_of


@torch.no_grad()
def test_what_was_trained_is_what_drafts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = read_target(DEMO_MODEL)
    trained = Prediction(target)
    for parameter in trained.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    export(trained, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), DEMO_MODEL, tmp_path)
    own, demo = read_config(tmp_path).spec, read_config(DEMO_MODEL).spec
    assert own.prediction is not None
    whole = tuple(layer.with_attention(rotated=0) for layer in own.layers)  # 64 of 64 is all
    assert replace(own, layers=whole, prediction=None) == demo, "the model is the same"
    ids = torch.tensor([TOKEN_IDS])
    talks, first = torch.zeros_like(ids), torch.arange(len(TOKEN_IDS))[None] == 0
    (expected,) = trained.unroll(ids, before(target(ids), 1), talks, first)
    found = hidden_of(drafting(tmp_path, max_batch_tokens=64), 64)
    assert (found - expected[0])[1:].abs().max() < 0.03 * expected.abs().max()
