"""Trains a layer of multi-token prediction for the demo model: `python -m lab.demo.prediction OUT`.

OUT becomes a checkpoint of GLM-4.5's architecture. With dense layers alone and heads that are rotated whole, that is
Llama's, so the model is the demo model to the bit, and what is behind its layers drafts for it. The layer is trained as
the head is, but from the hidden states behind the model's last norm, and to draft one token, as DeepSeek's is.
"""

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, nn

from lab.demo.batches import Batch, batch
from lab.demo.export import model_config, write
from lab.demo.head import ROW, Drafter, before, heard, hidden_states, read_target, train
from lab.demo.network import Layer, Llama, RMSNorm, Shape
from lab.demo.tokenizer import BOS, END, special_id
from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.model.families.common import names_behind


class Prediction(Drafter):
    """Embedding and output head are the model's."""

    unrolled = 1
    follows_norm = True

    def __init__(self, target: Llama) -> None:
        shape = target.shape
        super().__init__(shape)
        hidden, rows = shape.hidden_size, target.model.embed_tokens.weight.detach()
        self.shape, self.drafted, self._rows = shape, torch.arange(shape.vocab_size), rows
        self.token_norm, self.features_norm = RMSNorm(hidden, shape.norm_eps), RMSNorm(hidden, shape.norm_eps)
        self.norm = RMSNorm(hidden, shape.norm_eps)
        self.map = nn.Linear(2 * hidden, hidden, bias=False)
        self.own = Layer(shape)

    @torch.no_grad()
    def begin_with(self, target: Llama, some: Iterable[Batch]) -> None:
        """The layer is the model's last one, and the map the best guess of what that one reads, by least squares."""
        read, wanted = list[Tensor](), list[Tensor]()
        for one in some:
            taps, last = hidden_states(target, one)
            follows = one.talks[:, 1:] == one.talks[:, :-1]  # tokens that begin a talk have none before them
            embedded, features = self.start(one.inputs, before(last, 1))
            rows = torch.cat((embedded, self.features_norm(features)), -1)
            read.append(rows[:, 1:][follows])
            wanted.append(taps[..., -last.shape[-1] :][:, 1:][follows])
        self.map.weight.copy_(torch.linalg.lstsq(torch.cat(read), torch.cat(wanted)).solution.T)
        self.own.load_state_dict(target.model.layers[-1].state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())

    @property
    def layer(self) -> Layer:
        return self.own

    def features(self, taps: Tensor, last: Tensor) -> Tensor:  # noqa: ARG002
        return last

    def start(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.token_norm(F.embedding(ids, self._rows)), features

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.map(torch.cat((embedded, self.features_norm(hidden)), -1))
        return stream, self.own.input_layernorm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._rows)


def config_of(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    """The config of the demo model in the words of GLM-4.5, with one layer that drafts."""
    return {
        **model_config(shape, special_id(tokenizer, BOS), special_id(tokenizer, END)),
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": shape.num_layers + 1,
        "moe_intermediate_size": shape.intermediate_size,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "partial_rotary_factor": 1.0,
        "num_nextn_predict_layers": 1,
    }


def export(found: Prediction, tokenizer: Tokenizer, model: Path, folder: Path) -> None:
    shutil.copytree(model, folder, dirs_exist_ok=True)
    names = names_behind(found.shape.num_layers)
    own = {f"{names['prefix']}{name}": weight for name, weight in found.own.state_dict().items()}
    for field in ("token_norm", "features_norm", "map"):
        own[f"{names[field]}.weight"] = getattr(found, field).weight
    own[f"{names['final_norm']}.weight"] = found.norm.weight
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: weight.detach().to(torch.float16).contiguous() for name, weight in own.items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    write(folder / "config.json", config_of(found.shape, tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.demo.prediction", description=__doc__)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps; default: 200")
    parser.add_argument("--rows", type=int, default=2, help="rows of 512 tokens in a step; default: 2")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    target = read_target(DEMO_MODEL)
    found = Prediction(target)
    some = (batch(tokenizer, heard, Random(f"{arguments.seed}/begin/{i}"), 2, ROW) for i in range(8))
    found.begin_with(target, some)
    train(found, target, tokenizer, arguments.steps, arguments.rows, arguments.seed, lr=0.01)
    export(found, tokenizer, DEMO_MODEL, arguments.out)


if __name__ == "__main__":
    main()
