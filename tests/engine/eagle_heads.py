"""Random heads in EAGLE-3's checkpoint format, and what such a head says, in plain torch from the paper's description.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up inference acceleration of large language models via training-time test",
2025. Nothing of the engine is used here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.checkpoints import VOCAB_SIZE

Tensors = dict[str, Tensor]

TAPS = (1, 0, 2)
"""The layers of the target that are done where the heads read it; not in order, for the format does not ask for it."""
NUM_DRAFTED = 200


def make_eagle(
    path: Path,
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    num_drafted: int = NUM_DRAFTED,
    prefix: str = "midlayer",
    has_embedding: bool = False,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Writes a head for the models of `make_checkpoint`; `overrides` are entries of config.json, None leaves it out."""
    heads, kv_heads, head_dim, inner = 4, 2, 16, 96
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": num_drafted,
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        **overrides,
    }
    shapes = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    named = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"fc.weight": (hidden, 3 * target_hidden), "norm.weight": (hidden,)}
    named |= {"lm_head.weight": (num_drafted, hidden)}
    if has_embedding:
        named["embed_tokens.weight"] = (VOCAB_SIZE, hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(shape, generator) for name, shape in named.items()}
    if num_drafted < VOCAB_SIZE:
        drafted = torch.randperm(VOCAB_SIZE, generator=generator)[:num_drafted].sort().values
        tensors["d2t"] = drafted - torch.arange(num_drafted)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, drafted, True)
    path.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.2 * noise if len(shape) == 1 else noise * 1.5 / math.sqrt(shape[1])


@dataclass(frozen=True)
class ReferenceHead:
    """A head in float32.

    Args:
        embedding: [vocab, hidden]
        layer: the tensors of its layer, by their names behind the prefix.
    """

    tensors: Tensors
    layer: Tensors
    embedding: Tensor
    residual_is_normed: bool = False
    theta: float = 10_000.0
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    @classmethod
    def of(cls, folder: Path, target_embedding: Tensor) -> ReferenceHead:
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layer = {
            name.partition("layers.0." if name.startswith("layers") else "midlayer.")[2]: tensor
            for name, tensor in tensors.items()
        }
        embedding = tensors.get("embed_tokens.weight", target_embedding)
        return cls(tensors, layer, embedding, bool(config.get("norm_before_residual")))

    def drafted(self) -> Tensor:
        """The token of each row of logits."""
        rows = torch.arange(len(self.tensors["lm_head.weight"]))
        return rows + self.tensors["d2t"] if "d2t" in self.tensors else rows

    def features(self, hidden: list[Tensor]) -> Tensor:
        """[T, hidden] of tokens from the target's hidden states, as they are kept: bfloat16."""
        return (torch.cat(hidden, -1) @ self.tensors["fc.weight"].T).bfloat16().float()

    def logits(self, token_ids: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """[len(drafts) + 1, vocab]: of what follows the known tokens, and of what follows each draft.

        Args:
            features: of the known tokens but the last.
        """
        inputs = features
        known = len(token_ids)
        found = []
        for number in range(len(drafts) + 1):
            hidden = self._layer([*token_ids, *drafts[:number]][1:], inputs)
            inputs = torch.cat((inputs, hidden[-1:]))
            logits = _norm(hidden[-1], self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T
            found.append(
                torch.full((len(self.embedding),), -torch.inf).index_copy_(0, self.drafted(), logits)
            )
        assert len(inputs) == known + len(drafts)
        return torch.stack(found)

    def _layer(self, token_ids: list[int], features: Tensor) -> Tensor:
        """[T, hidden] before the last norm; row i reads token i and the features of the token before it."""
        embedded = _norm(self.embedding[token_ids], self._weight("input_layernorm"))
        normed = _norm(features, self._weight("hidden_norm"))
        x = torch.cat((embedded, normed), -1)
        residual = normed if self.residual_is_normed else features
        hidden = residual + self._attention(x)
        x = _norm(hidden, self._weight("post_attention_layernorm"))
        gate, up = x @ self._weight("mlp.gate_proj").T, x @ self._weight("mlp.up_proj").T
        return hidden + (F.silu(gate) * up) @ self._weight("mlp.down_proj").T

    def _attention(self, x: Tensor) -> Tensor:
        num = len(x)
        q = self._rotated((x @ self._weight("self_attn.q_proj").T).view(num, self.num_heads, -1))
        k = self._rotated((x @ self._weight("self_attn.k_proj").T).view(num, self.num_kv_heads, -1))
        v = (x @ self._weight("self_attn.v_proj").T).view(num, self.num_kv_heads, -1)
        shared = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return seen.reshape(num, -1) @ self._weight("self_attn.o_proj").T

    def _rotated(self, x: Tensor) -> Tensor:
        frequencies = self.theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        left, right = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def _weight(self, name: str) -> Tensor:
        return self.layer[f"{name}.weight"]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)
