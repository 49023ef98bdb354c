"""Attention over latents, from which the keys and values of all heads are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.engine.spec.maps import HeadOrder, LinearMap, Norm, Rows, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention over a paged cache of latents: multi-head latent attention.

    The cache holds for each token a latent c, which is normed, and one rotated key r, and no heads. The key of a head
    is [K c | r] and its value V c, with matrices K and V of its own. As (K c) q = c (q K), a query is mapped by K
    instead, and all heads attend to the same numbers [c | r], of which c is the value, too; V maps what comes out.

    DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model", 2024.
    """

    hidden_size: int
    num_heads: int
    query_rank: int
    """Queries are mapped from so many numbers, which are normed; 0 if they are mapped from the hidden state."""
    latent_size: int
    plain_size: int
    """The numbers of a head's query that no position rotates; they come first."""
    rotated_size: int
    """The numbers after them, and those of the one rotated key."""
    value_size: int
    scale: float
    rope: int | None = 0
    """See `Attention.rope`."""
    temperature: tuple[float, int, int] | None = None
    """See `Attention.temperature`."""
    is_interleaved: bool = True
    """See `HeadOrder`, of the rotated numbers."""
    has_bias: bool = False
    """Whether the first maps and the last one have biases."""
    is_split: bool = False
    """Whether K of all heads, transposed, and V are tensors of their own, as they are in GGUF files."""

    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[int] = 0
    reach: ClassVar[int] = 0
    is_chunked: ClassVar[bool] = False
    shares: ClassVar[int | None] = None

    @property
    def head_dim(self) -> int:
        """The numbers of a token in the cache."""
        return self.latent_size + self.rotated_size

    @property
    def query_size(self) -> int:
        """The numbers of a head's query before its part of W."""
        return self.plain_size + self.rotated_size

    @property
    def rotary_size(self) -> int:
        return self.rotated_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.query_size

    @property
    def kv_size(self) -> int:
        return self.head_dim

    def maps(self) -> dict[str, LinearMap]:
        hidden, rank, bias = self.hidden_size, self.query_rank, self.has_bias
        of_query = HeadOrder(self.query_size, self.rotated_size, self.is_interleaved, rotates_last=True)
        of_latent = HeadOrder(self.head_dim, self.rotated_size, self.is_interleaved, rotates_last=True)
        q = Rows("self_attn.q_b_proj" if rank else "self_attn.q_proj", (self.q_size,), of_query.unless_ours)
        q_a = Rows("self_attn.q_a_proj", (rank,))
        latent = Rows("self_attn.kv_a_proj_with_mqa", (self.head_dim,), of_latent.unless_ours)
        o = Rows("self_attn.o_proj", (hidden,))
        first = {"q_a": LinearMap(rows=(q_a,), in_features=hidden, has_bias=bias)} if rank else {}
        return first | {
            "q": LinearMap(rows=(q,), in_features=rank or hidden),
            "latent": LinearMap(rows=(latent,), in_features=hidden, has_bias=bias),
            **self._ups(),
            "o": LinearMap(rows=(o,), in_features=self.num_heads * self.value_size, has_bias=bias, sums=True),
        }

    def _ups(self) -> dict[str, LinearMap]:
        """The maps that become one matrix of each head, see `LatentWeights.up`."""
        heads, latent = self.num_heads, self.latent_size
        sizes = {"up": ("kv_b_proj", self.plain_size + self.value_size, latent)}
        if self.is_split:
            sizes = {
                "k_up": ("k_b_proj", latent, self.plain_size),
                "v_up": ("v_b_proj", self.value_size, latent),
            }
        return {
            field: LinearMap(
                rows=(Rows(f"self_attn.{name}", (heads * rows,)),),
                in_features=inputs,
                stays=True,
                is_unpacked=True,
            )
            for field, (name, rows, inputs) in sizes.items()
        }

    def vectors(self) -> dict[str, Vector]:
        return {}

    def norms(self) -> dict[str, Norm]:
        of_query = {"q_norm": Norm(name="self_attn.q_a_layernorm", size=self.query_rank)}
        of_latent = Norm(name="self_attn.kv_a_layernorm", size=self.latent_size)
        return (of_query if self.query_rank else {}) | {"latent_norm": of_latent}
