"""A Llama of random weights as a real checkpoint: speed does not depend on what the weights say."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_BYTES = 256
_SPECIAL = ("<s>", "</s>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; heads are hidden / num_heads wide, embeddings are tied."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocabulary: int
    max_length: int = 2048


LLAMA_135M = Shape("llama-135m", 576, 30, 9, 3, 1536, 16384)
HALF_B = Shape("half-b", 896, 24, 14, 2, 4864, 32768)
LLAMA_TINY = Shape("llama-tiny", 64, 2, 4, 2, 128, 1024)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "bench"


def ensure_checkpoint(shape: Shape, root: Path | None = None) -> Path:
    """The folder of the checkpoint, written on first use."""
    return ensure_folder(shape.name, lambda folder: write_checkpoint(shape, folder), root)


def ensure_folder(name: str, write: Callable[[Path], None], root: Path | None = None) -> Path:
    """A folder of the cache, written on first use; a half-written one is never seen."""
    folder = (root or cache_folder()) / name
    if not folder.exists():
        partial = folder.with_name(f"{name}.{os.getpid()}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            write(partial)
            shutil.rmtree(folder, ignore_errors=True)  # another process may have been faster
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_checkpoint(shape: Shape, folder: Path) -> None:
    write_all_but_weights(shape, config_of(shape), folder)
    _write_weights(shape, folder / "model.safetensors")


def write_all_but_weights(shape: Shape, config: dict[str, object], folder: Path) -> None:
    """Writes the config that is given, and a tokenizer with as many tokens as the shape has."""
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES + 1})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    _write_tokenizer(shape, folder / "tokenizer.json")


def letter_token_ids(shape: Shape) -> range:
    """Tokens that are text of their own; the ones before are bytes and special tokens."""
    return range(NUM_BYTES + len(_SPECIAL), shape.vocabulary)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def config_of(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden // shape.num_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": NUM_BYTES,
        "eos_token_id": NUM_BYTES + 1,
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": shape.max_length,
        "chat_template": _TEMPLATE,
    }


def _write_tokenizer(shape: Shape, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    merges = list(itertools.islice(_merges(), shape.vocabulary - len(tokens)))
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(path))


def _merges() -> Iterator[tuple[str, str]]:
    """Every pair of letters, then pairs with a third letter, then pairs of pairs: 475,228 merges of plain text."""
    pairs = [(left, right) for left in _LETTERS for right in _LETTERS]
    yield from pairs
    yield from ((left + right, third) for left, right in pairs for third in _LETTERS)
    yield from itertools.product(map("".join, pairs), repeat=2)


def _write_weights(shape: Shape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator).mul_(0.02)
        for name, size in _weight_sizes(shape).items()
    }
    # A zero row is never the most likely token: no answer gets stuck on half a character or ends early.
    weights["model.embed_tokens.weight"][: NUM_BYTES + len(_SPECIAL)] = 0
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()}, path, metadata={"format": "pt"}
    )


def _weight_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, kv = shape.hidden, shape.hidden // shape.num_heads * shape.num_kv_heads
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        sizes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (shape.intermediate, hidden),
            prefix + "mlp.up_proj.weight": (shape.intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, shape.intermediate),
        }
    return sizes | {"model.norm.weight": (hidden,)}
