"""Trains a head that drafts for the demo model from its hidden states: `python -m demo.head`.

It is made as EAGLE-3 heads are ("training-time test"): the head is unrolled over a few drafts, each of which reads
what the one before it made, and every one learns the model's own distribution of the next token. The checkpoint is in
their format, with a vocabulary of the tokens that the corpus uses most.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.batches import Batch, batch
from demo.corpus import lesson, sample
from demo.export import model_config, read_weights, write
from demo.grammar import chance
from demo.network import MLP, Attention, Layer, Llama, RMSNorm, Shape, rope_tables, within_talks
from demo.optimiser import optimisers
from demo.tokenizer import BOS, END, VOCAB_SIZE, Message, special_id
from demo.train import MODEL
from penstock.app.checkpoint import DEMO_DRAFT, DEMO_MODEL

HEAD = Shape(
    VOCAB_SIZE, hidden_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256
)
TAPS = (1, 2, 3)
"""The layers of the model that are done where the head reads hidden states."""
UNROLLED = 3
ROW = 512
LESSONS = 0.3
"""The share of conversations with tools or JSON."""


class Drafter(nn.Module):
    """A module that drafts from hidden states of the model, a token after the other."""

    shape: Shape
    drafted: Tensor
    """The tokens that it can draft, in ascending order."""
    norm: RMSNorm
    """The last one."""
    unrolled = UNROLLED
    """The drafts of a chain that are learnt together."""
    follows_norm = False
    """Whether a chain goes on from the output of the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rope = rope_tables(shape)

    def features(self, taps: Tensor, last: Tensor) -> Tensor:
        """Returns the features, which it reads of the model's `hidden_states`."""
        raise NotImplementedError

    def start(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens as its layer reads them, and the hidden states that the features make."""
        raise NotImplementedError

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream of its layer, and what attention reads."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the drafted tokens."""
        raise NotImplementedError

    @property
    def layer(self) -> HeadLayer | Layer:
        raise NotImplementedError

    def unroll(self, ids: Tensor, features: Tensor, talks: Tensor, first: Tensor) -> list[Tensor]:
        """[B, S, hidden] after the last norm, for each draft of the chains that end at each token.

        Args:
            features: [B, S, width], of the token before each.
            first: [B, S], whether a token is the first of its conversation: only it sees itself.
        """
        length, layer, found = ids.shape[1], self.layer, list[Tensor]()
        cos, sin = (table[:length] for table in self.rope)
        embedded, hidden = self.start(ids, features)
        seen = within_talks(talks).masked_fill(first[:, None, None, :], -torch.inf)
        seen = torch.where(torch.eye(length, dtype=torch.bool), 0.0, seen)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number in range(self.unrolled):
            stream, x = self.read(embedded, hidden)
            q, k, v = layer.self_attn.project(x, cos, sin)
            keys.append(k)
            values.append(v)
            attended = _attend(q, keys, values, seen, number)
            stream = stream + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            found.append(self.norm(stream))
            hidden = before(found[-1] if self.follows_norm else stream, 1)
        return found


class HeadLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.mlp = MLP(shape)


class Head(Drafter):
    """Parameter names are those of EAGLE-3's checkpoints."""

    def __init__(self, shape: Shape, target: Llama, drafted: Tensor) -> None:
        super().__init__(shape)
        self.shape, self.drafted = shape, drafted
        hidden = shape.hidden_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.fc = nn.Linear(3 * target.shape.hidden_size, hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(hidden, shape.norm_eps)
        self.lm_head = nn.Linear(hidden, len(drafted), bias=False)
        self._begin_with(target)

    @torch.no_grad()
    def _begin_with(self, target: Llama) -> None:
        """The model's embedding and its last hidden state in fewer dimensions, those that most of it lies in."""
        rows = target.model.embed_tokens.weight
        axes = torch.linalg.svd(rows, full_matrices=False)[2][: self.shape.hidden_size]
        self.embed_tokens.weight.copy_(rows @ axes.T)
        self.lm_head.weight.copy_(rows[self.drafted] @ axes.T)
        self.fc.weight.zero_()
        self.fc.weight[:, -axes.shape[1] :] = axes
        self.norm.weight.fill_(0.3)
        for name, parameter in self.midlayer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    @property
    def layer(self) -> HeadLayer:
        return self.midlayer

    def features(self, taps: Tensor, last: Tensor) -> Tensor:  # noqa: ARG002
        return taps

    def start(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.input_layernorm(self.embed_tokens(ids)), self.fc(features)

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat((embedded, self.midlayer.hidden_norm(hidden)), -1)

    def logits(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.lm_head(hidden)
        return result


def before(x: Tensor, number: int) -> Tensor:
    """Returns [..., S, d], the rows of so many tokens before; zeros at the start."""
    return F.pad(x, (0, 0, number, 0))[..., : x.shape[-2], :]


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor, number: int) -> Tensor:
    """Attends draft `number` of each chain to the tokens known when the chain began, and to the drafts before it."""
    scale, length = q.shape[-1] ** -0.5, q.shape[-2]
    mask = F.pad(seen, (0, 0, number, 0), value=-torch.inf)[..., :length, :] if number else seen
    mask = mask.clone()
    mask[..., :number, 0] = 0.0  # of chains that began before the row: they are not learnt from
    scores = [scale * q @ keys[0].transpose(-2, -1) + mask]
    drafts = [before(k, number - i) for i, k in enumerate(keys) if i]
    scores += [scale * (q * k).sum(-1, keepdim=True) for k in drafts]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :length] @ values[0]
    for i, v in enumerate(values[1:], 1):
        out = out + weights[..., length + i - 1, None] * before(v, number - i)
    return out


@torch.no_grad()
def hidden_states(target: Llama, some: Batch) -> tuple[Tensor, Tensor]:
    """The model's hidden states after TAPS layers, [B, S, 3 * width], and after the last norm."""
    mask = within_talks(some.talks)
    cos, sin = (table[: some.inputs.shape[1]] for table in target.rope)
    x, taps = target.model.embed_tokens(some.inputs), []
    for number, layer in enumerate(target.model.layers):
        if number in TAPS:
            taps.append(x)
        x = layer(x, cos, sin, mask)
    return torch.cat(taps, -1), target.model.norm(x)


def loss_of(head: Drafter, target: Llama, some: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and by draft of a chain how often it is the token that the model thinks likeliest, [unrolled]."""
    taps, last = hidden_states(target, some)
    rows = torch.arange(some.inputs.shape[1])
    first = F.pad(some.talks[:, 1:] != some.talks[:, :-1], (1, 0), value=True)
    start = torch.where(first, rows, 0).cummax(1).values
    found = head.unroll(some.inputs, before(head.features(taps, last), 1), some.talks, first)
    learnt = (some.targets != -100) & (rows - start > head.unrolled)
    with torch.no_grad():
        logits = target.logits(last[learnt])
        likeliest, wanted = logits.argmax(-1), logits[:, head.drafted].softmax(-1)
    drafts = [head.logits(hidden[learnt]) for hidden in found]
    right = [(head.drafted[draft.argmax(-1)] == likeliest).float().mean() for draft in drafts]
    loss = torch.stack([F.cross_entropy(draft, wanted) for draft in drafts]).mean()
    return loss, torch.stack(right)


def heard(rng: Random, tokens: int) -> list[Message]:
    """The head reads all that the model was taught."""
    return (lesson if chance(rng, LESSONS) else sample)(rng, tokens)


def drafted_tokens(tokenizer: Tokenizer, num: int, seed: int) -> Tensor:
    """The tokens that answers use most, in ascending order."""
    counts: Counter[int] = Counter()
    rng = Random(f"{seed}/drafted")
    for _ in range(40):
        some = batch(tokenizer, heard, rng, 8, ROW)
        counts.update(some.targets[some.targets >= 0].tolist())
    kept = [token for token, _ in counts.most_common(num)]
    share = sum(counts[token] for token in kept) / counts.total()
    print(f"{len(kept)} tokens are {share:.1%} of what is said", flush=True)
    return torch.tensor(sorted(kept))


def read_target(folder: Path) -> Llama:
    target = Llama(MODEL)
    read_weights(target, folder)
    return target.eval()


def read_head(folder: Path, target: Llama) -> Head:
    tensors = load_file(folder / "model.safetensors")
    offsets = tensors.pop("d2t")
    head = Head(HEAD, target, offsets + torch.arange(len(offsets)))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head


@torch.no_grad()
def redrafted(head: Head, target: Llama, drafted: Tensor) -> Head:
    """Returns the head for other tokens; what it knows of new ones is guessed from their embeddings."""
    embedded = target.model.embed_tokens.weight
    rows = embedded @ torch.linalg.lstsq(embedded[head.drafted], head.lm_head.weight).solution
    rows[head.drafted] = head.lm_head.weight
    other = Head(head.shape, target, drafted)
    other.load_state_dict(head.state_dict() | {"lm_head.weight": rows[drafted]})
    return other


def export_head(head: Head, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.float16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = head.drafted - torch.arange(len(head.drafted))
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = model_config(head.shape, special_id(tokenizer, BOS), special_id(tokenizer, END))
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "draft_vocab_size": len(head.drafted),
        "target_hidden_size": MODEL.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
    }
    write(folder / "config.json", config)


def train(
    head: Drafter, target: Llama, tokenizer: Tokenizer, steps: int, rows: int, seed: int, lr: float = 0.02
) -> None:
    steppers, began = optimisers(head, lr, 0.3 * lr), time.monotonic()
    share = torch.zeros(head.unrolled)
    for step in range(steps):
        loss, right = loss_of(head, target, batch(tokenizer, heard, Random(f"{seed}/{step}"), rows, ROW))
        loss.backward()  # type: ignore[no-untyped-call]
        for stepper in steppers:
            for group in stepper.param_groups:
                scale = min(1.0, (step + 1) / 10, (steps - step) / (0.6 * steps))
                group["lr"] = group.setdefault("full_lr", group["lr"]) * scale
            stepper.step()
            stepper.zero_grad()
        share += right / 10
        if step % 10 == 9:
            shares = " ".join(f"{one:.3f}" for one in share.tolist())
            print(
                f"step {step + 1}/{steps}  loss {loss:.4f}  right {shares}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
            share.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.head", description=__doc__)
    parser.add_argument("--from", dest="start", type=Path, help="a head whose weights it goes on from")
    parser.add_argument("--steps", type=int, help="optimiser steps: 1,000, or 400 from a head")
    parser.add_argument("--rows", type=int, default=4, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--vocabulary", type=int, default=1536, help="tokens that it can draft")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--out", type=Path, default=DEMO_DRAFT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    target = read_target(arguments.model)
    drafted = drafted_tokens(tokenizer, arguments.vocabulary, arguments.seed)
    if arguments.start:
        head = redrafted(read_head(arguments.start, target), target, drafted)
        steps, lr = arguments.steps or 400, 0.01
    else:
        head, steps, lr = Head(HEAD, target, drafted), arguments.steps or 1000, 0.02
    train(head, target, tokenizer, steps, arguments.rows, arguments.seed, lr)
    export_head(head, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
