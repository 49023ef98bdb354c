"""The Llama architecture in plain torch, as small as training needs it.

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so `state_dict()` is the checkpoint.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of one model. The output layer shares its weights with the embedding."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape, width: int | None = None) -> None:
        """`width` is that of the inputs, if it is not the hidden size."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = width or shape.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, heads, S, d]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        shared = self.heads // self.kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return rotate(q, cos, sin), k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """ids [B, S] -> hidden states [B, S, H]; `logits` turns any selection of those into scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.rope = rope_tables(shape)
        initialise(self)

    def forward(self, ids: Tensor, talks: Tensor | None = None) -> Tensor:
        mask = None if talks is None else within_talks(talks)
        cos, sin = (table[: ids.shape[1]].to(ids.device) for table in self.rope)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def initialise(model: Llama) -> None:
    """Layers start out silent, so that the residual stream is the embedding; else attention finds nothing in it."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    nn.init.constant_(model.model.norm.weight, 0.2)  # the embedding is the output layer, too


def within_talks(talks: Tensor) -> Tensor:
    """[B, S] -> [B, 1, S, S], added to the scores: a token sees what came before it in its own conversation."""
    length = talks.shape[1]
    seen = (talks[:, :, None] == talks[:, None, :]) & torch.ones(
        length, length, device=talks.device
    ).tril().bool()
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -torch.inf)[:, None]


def rope_frequencies(shape: Shape) -> Tensor:
    return shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, [max_positions, head_dim], in the half-split layout of Hugging Face's Llama."""
    angles = torch.outer(torch.arange(shape.max_positions), rope_frequencies(shape)).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
