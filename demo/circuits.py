"""A circuit that copies, built by hand into the first two layers before training.

An induction head (Olsson et al. 2022) finds where the current token stood before and proposes what came after it
there; it is how a story keeps its hero. Training discovers it by itself, but only after tens of millions of tokens,
more than this model ever sees. So layer 0 gets a head that looks one position back and notes that token, and layer 1
heads that look for the current token among those notes. Training goes on from there and changes them freely.
"""

import torch
from torch import Tensor

from demo.network import Attention, Llama, rope_frequencies

CONSTANT = 1.2  # what every embedding holds in its first place, so that a head can ignore content
BACK_SHARPNESS = 6.0
NOTE_SIZE = 0.4
MATCH_SHARPNESS = 2.0
COPY_STRENGTH = 1.5


@torch.no_grad()
def build_induction(model: Llama) -> None:
    """For models whose head size is a quarter of the hidden size, with two KV heads of two heads each."""
    shape, size = model.shape, model.shape.head_dim
    assert shape.hidden_size == 4 * size
    assert (shape.num_heads, shape.num_kv_heads) == (4, 2)
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = CONSTANT
    basis = torch.zeros(shape.hidden_size - 1, shape.hidden_size)
    basis[:, 1:] = torch.linalg.qr(torch.randn(shape.hidden_size - 1, shape.hidden_size - 1))[0]
    spread = embedding[:, 1:].std()
    constant_seen = CONSTANT / (spread**2 + CONSTANT**2 / shape.hidden_size).sqrt()
    first, second = attention_of(model, 0), attention_of(model, 1)
    look_back(
        first,
        float(constant_seen),
        basis[:size],
        NOTE_SIZE * basis[size : 2 * size],
        rope_frequencies(model.shape),
    )
    look_up(second, basis[:size], basis[size : 2 * size], (basis[2 * size : 3 * size], basis[-size:]))


def attention_of(model: Llama, number: int) -> Attention:
    attention = model.model.layers[number].self_attn
    assert isinstance(attention, Attention)
    return attention


def look_back(
    attention: Attention, constant: float, read: Tensor, write: Tensor, frequencies: Tensor
) -> None:
    """Head 0: a fixed query and a fixed key that agree best one position apart; it copies `read` to `write`."""
    size, half = attention.head_dim, attention.head_dim // 2
    fast = torch.arange(half) < half // 2
    strength = BACK_SHARPNESS / constant * fast
    query, key = attention.q_proj.weight[:size], attention.k_proj.weight[:size]
    query.zero_()
    key.zero_()
    query[:half, 0] = strength
    key[:half, 0], key[half:, 0] = strength * frequencies.cos(), strength * frequencies.sin()
    attention.v_proj.weight[:size] = read
    attention.o_proj.weight[:, :size] = write.T


def look_up(attention: Attention, token: Tensor, note: Tensor, copied: tuple[Tensor, ...]) -> None:
    """Heads 0 and 2: the query is the token, the key the note; only slowly turning places carry content far."""
    size = attention.head_dim
    slow = torch.arange(size) % (size // 2) >= size // 4
    for group, subspace in enumerate(copied):
        head = slice(2 * group * size, (2 * group + 1) * size)
        kv_head = slice(group * size, (group + 1) * size)
        attention.q_proj.weight[head] = MATCH_SHARPNESS * token * slow[:, None]
        attention.k_proj.weight[kv_head] = MATCH_SHARPNESS * note * slow[:, None]
        attention.v_proj.weight[kv_head] = subspace
        attention.o_proj.weight[:, head] = COPY_STRENGTH * subspace.T
