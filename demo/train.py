"""Trains the demo model: `python -m demo.train`. An interrupted run goes on from its last checkpoint."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo.batches import Batch, batch
from demo.circuits import build_induction
from demo.corpus import PRACTISED, REVISED, lesson, practice, sample, texts
from demo.export import export, read_weights
from demo.grammar import chance
from demo.network import Llama, Shape
from demo.optimiser import optimisers
from demo.tokenizer import VOCAB_SIZE, Message, train_tokenizer
from penstock.app.checkpoint import DEMO_MODEL

MODEL = Shape(
    VOCAB_SIZE, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=640
)
SHORT_ROW, LONG_ROW = 512, 2048

Loss = Callable[[Llama, Batch], Tensor]


@dataclass(frozen=True)
class Plan:
    """The training of one model. `batch_tokens` are the tokens of one step, padding included."""

    steps: int
    batch_tokens: int
    micro_tokens: int
    matrix_lr: float
    embedding_lr: float
    seed: int
    device: str
    checkpoint_every: int = 50
    practice: float = 0.12
    """The share of conversations that are `practice`, after the first steps."""
    lessons: float = 0.0
    """The share of conversations with tools or JSON, besides the ones of `sample`."""
    plateau: float = 0.4
    """The share of the steps before the learning rate falls."""

    def row_length(self, step: int) -> int:
        """Long rows now and then, and all through the last tenth, so that the whole context is learnt."""
        return LONG_ROW if step % 12 == 11 or step >= 0.93 * self.steps else SHORT_ROW

    def practice_share(self, step: int) -> float:
        """Copying is learnt first, it takes longest to be found (Olsson et al. 2022, on induction heads)."""
        return 0.3 if step < 0.15 * self.steps else self.practice

    def lr_scale(self, step: int) -> float:
        """A short warm-up, a plateau, then linearly down to zero."""
        return min(1.0, (step + 1) / 25, (self.steps - step) / ((1 - self.plateau) * self.steps))


def next_token_loss(model: Llama, some: Batch) -> Tensor:
    """Summed over the learnt tokens; only these are ever turned into logits."""
    learnt = some.targets != -100
    logits = model.logits(model(some.inputs, some.talks)[learnt])
    return F.cross_entropy(logits, some.targets[learnt], reduction="sum")


def train(
    shape: Shape,
    tokenizer: Tokenizer,
    plan: Plan,
    loss_of: Loss,
    checkpoint: Path,
    out: Path,
    start: Path | None = None,
) -> Llama:
    """Trains from nothing, or from the weights in `start`."""
    torch.manual_seed(plan.seed)
    model = Llama(shape)
    if start:
        read_weights(model, start)
    elif shape == MODEL:
        build_induction(model)
    model.to(plan.device)
    steppers = optimisers(model, plan.matrix_lr, plan.embedding_lr)
    first = restore(checkpoint, model, steppers)
    began, tokens = time.monotonic(), 0
    for step in range(first, plan.steps):
        loss, seen = train_step(model, steppers, tokenizer, plan, loss_of, step)
        tokens += seen
        if step % 10 == 9:
            rate = tokens / (time.monotonic() - began)
            print(f"step {step + 1}/{plan.steps}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % plan.checkpoint_every == 0 or step + 1 == plan.steps:
            save(checkpoint, model, steppers, step + 1)
            export(model, tokenizer, out)
    return model


def train_step(
    model: Llama,
    steppers: list[torch.optim.Optimizer],
    tokenizer: Tokenizer,
    plan: Plan,
    loss_of: Loss,
    step: int,
) -> tuple[float, int]:
    length = plan.row_length(step)
    rng = Random(f"{plan.seed}/{step}")

    def source(rng: Random, tokens: int) -> list[Message]:
        if chance(rng, plan.practice_share(step)):
            return practice(rng, tokens, REVISED if plan.lessons else PRACTISED)
        return (lesson if chance(rng, plan.lessons) else sample)(rng, tokens)

    whole = batch(tokenizer, source, rng, max(1, plan.batch_tokens // length), length)
    learnt = int((whole.targets != -100).sum())
    total = 0.0
    rows = max(1, plan.micro_tokens // length)
    for some in whole.split(rows):
        loss = loss_of(model, some.to(plan.device)) / learnt
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = group.setdefault("full_lr", group["lr"]) * plan.lr_scale(step)
        stepper.step()
        stepper.zero_grad()
    return total, whole.inputs.numel()


def save(path: Path, model: Llama, steppers: list[torch.optim.Optimizer], step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "steppers": [s.state_dict() for s in steppers], "step": step}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def restore(path: Path, model: Llama, steppers: list[torch.optim.Optimizer]) -> int:
    """The step to go on with: 0 when there is no checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for stepper, saved in zip(steppers, state["steppers"], strict=True):
        stepper.load_state_dict(saved)
    step: int = state["step"]
    return step


def tokenizer_of(path: Path, seed: int) -> Tokenizer:
    """A resumed run keeps its tokenizer, even if the corpus has changed since."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(texts(seed, 20000))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--from", dest="start", type=Path, help="a model whose weights it goes on from")
    parser.add_argument("--steps", type=int, help="optimiser steps: 2,300, or 1,250 from a model")
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rates")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens per forward and backward pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL.parent, help="gets model/")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    known = (arguments.start or arguments.checkpoints) / "tokenizer.json"
    tokenizer = tokenizer_of(known, arguments.seed)
    sizes, rate = (arguments.batch_tokens, arguments.micro_tokens), arguments.rate
    if arguments.start:
        steps = arguments.steps or 1250
        plan = Plan(steps, *sizes, rate * 0.008, rate * 0.0024, arguments.seed, arguments.device)
        plan = replace(plan, practice=0.2, lessons=0.55, plateau=0.2)
    else:
        plan = Plan(
            arguments.steps or 2300, *sizes, rate * 0.02, rate * 0.006, arguments.seed, arguments.device
        )
    checkpoint, out = arguments.checkpoints / "model.pt", arguments.out / "model"
    train(MODEL, tokenizer, plan, next_token_loss, checkpoint, out, arguments.start)


if __name__ == "__main__":
    main()
