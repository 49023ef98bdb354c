"""The training: packing, schedule, optimiser, and that an interrupted run ends where an undisturbed one does."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from demo.batches import Batch, batch
from demo.circuits import build_induction
from demo.corpus import sample, texts
from demo.network import Llama, Shape
from demo.tokenizer import train_tokenizer
from demo.train import MODEL, Loss, Plan, next_token_loss, train

TINY = Shape(512, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
PLAN = Plan(
    steps=3, batch_tokens=512, micro_tokens=512, matrix_lr=0.02, embedding_lr=0.004, seed=1, device="cpu"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(texts(1, 150), vocab_size=512)


def test_packed_conversations_are_computed_as_if_alone(tokenizer: Tokenizer) -> None:
    model = Llama(TINY)
    randomise(model)
    whole = batch(tokenizer, sample, Random(3), 1, 512)
    start = int((whole.talks[0] == 1).sum())
    assert start < 512, "the row holds more than one conversation"
    alone, packed = model(whole.inputs[:, :start]), model(whole.inputs, whole.talks)
    torch.testing.assert_close(packed[:, :start], alone, rtol=1e-3, atol=1e-4)
    other = whole.inputs.clone()
    other[:, 1:start] = 7
    changed = model(other, whole.talks)
    torch.testing.assert_close(packed[:, start:], changed[:, start:], rtol=1e-3, atol=1e-4)


def randomise(model: Llama) -> None:
    """A fresh model's layers are silent; here they all speak."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))


def test_the_learning_rate_warms_up_and_ends_near_zero() -> None:
    plan = replace(PLAN, steps=1000)
    scales = [plan.lr_scale(step) for step in range(1000)]
    assert scales[0] < 0.05 < scales[1]
    assert max(scales) == scales[200] == 1.0
    assert scales[400:] == sorted(scales[400:], reverse=True)
    assert 0 < scales[-1] < 0.005


def interrupted_after(steps: int) -> Loss:
    calls = iter(range(steps))

    def loss(model: Llama, some: Batch) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return next_token_loss(model, some)

    return loss


def test_an_interrupted_run_ends_like_an_undisturbed_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = train(TINY, tokenizer, PLAN, next_token_loss, tmp_path / "a.pt", tmp_path / "a")
    often = replace(PLAN, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, tokenizer, often, interrupted_after(2), tmp_path / "b.pt", tmp_path / "b")
    resumed = train(TINY, tokenizer, often, next_token_loss, tmp_path / "b.pt", tmp_path / "b")
    for first, second in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_training_learns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    some = batch(tokenizer, sample, Random("x"), 2, 512)
    model = train(
        TINY, tokenizer, replace(PLAN, steps=40), next_token_loss, tmp_path / "a.pt", tmp_path / "a"
    )
    fresh = Llama(TINY)
    assert next_token_loss(model, some) < 0.97 * next_token_loss(fresh, some)


def test_a_model_with_the_circuit_copies_before_any_training() -> None:
    torch.manual_seed(0)
    model = Llama(MODEL)
    build_induction(model)
    words = torch.randperm(MODEL.vocab_size)[:120]
    with torch.no_grad():
        scores = model.logits(model(torch.cat([words, words])[None]))[0]
    right = scores[120:-1].argmax(-1) == words[1:]
    assert right.float().mean() > 0.5
