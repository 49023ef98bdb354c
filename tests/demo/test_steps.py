"""Single steps of the training: how a batch is split, what a checkpoint keeps, and what a crash cannot spoil."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo.batches import batch
from demo.corpus import sample
from demo.network import Llama, Shape
from demo.optimiser import optimisers
from demo.train import (
    Plan,
    next_token_loss,
    restore,
    save,
    train_step,
)

TINY = Shape(320, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24)
PLAN = Plan(
    steps=20, batch_tokens=1024, micro_tokens=512, matrix_lr=0.02, embedding_lr=0.004, seed=1, device="cpu"
)

Training = tuple[Llama, list[torch.optim.Optimizer]]


def begin(plan: Plan) -> Training:
    torch.manual_seed(0)
    model = Llama(TINY)
    return model, optimisers(model, plan.matrix_lr, plan.embedding_lr)


def after_steps(tokenizer: Tokenizer, plan: Plan, count: int) -> tuple[Training, list[float]]:
    model, steppers = begin(plan)
    losses = [train_step(model, steppers, tokenizer, plan, next_token_loss, step)[0] for step in range(count)]
    return (model, steppers), losses


def assert_same(one: Llama, other: Llama) -> None:
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4, msg=name)


def rates(steppers: list[torch.optim.Optimizer]) -> list[float]:
    return [group["lr"] for stepper in steppers for group in stepper.param_groups]


def test_it_does_not_matter_in_how_many_passes_a_batch_is_worked_on(tokenizer: Tokenizer) -> None:
    (whole, _), whole_losses = after_steps(tokenizer, replace(PLAN, micro_tokens=1024), 2)
    (parts, _), part_losses = after_steps(tokenizer, replace(PLAN, micro_tokens=512), 2)
    assert part_losses == pytest.approx(whole_losses, rel=1e-4)
    assert_same(whole, parts)


def test_only_what_is_taught_counts(tokenizer: Tokenizer) -> None:
    model, _ = begin(PLAN)
    some = batch(tokenizer, sample, Random(1), 2, 512)
    with torch.no_grad():
        logits = model.logits(model(some.inputs, some.talks))
        wanted = F.cross_entropy(
            logits.flatten(0, 1), some.targets.flatten(), ignore_index=-100, reduction="sum"
        )
        assert float(next_token_loss(model, some)) == pytest.approx(float(wanted), rel=1e-4)


def test_rates_go_on_where_they_stopped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The plan scales the full rate at every step, not the rate that the last step left behind."""
    (model, steppers), _ = after_steps(tokenizer, PLAN, 2)
    save(tmp_path / "a.pt", model, steppers, 2)
    resumed, again = begin(PLAN)
    assert restore(tmp_path / "a.pt", resumed, again) == 2
    assert_same(model, resumed)
    for some in ((model, steppers), (resumed, again)):
        train_step(*some, tokenizer, PLAN, next_token_loss, 2)
    assert rates(again) == rates(steppers)
    assert rates(again) == pytest.approx([lr * PLAN.lr_scale(2) for lr in (0.02, 0.004, 0.0004)])
    assert_same(model, resumed)


def test_a_crash_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steppers = begin(PLAN)
    save(tmp_path / "a.pt", model, steppers, 7)

    def half(_: object, path: Path) -> None:
        path.write_bytes(b"half a checkpo")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path / "a.pt", model, steppers, 8)
    assert restore(tmp_path / "a.pt", model, steppers) == 7
