"""Models of random weights as real checkpoints, with a tokenizer whose tokens are plain text."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NUM_BYTES = 256
MOST_TOKENS = 16_384
"""The size of the largest tokenizer; further rows of a vocabulary have no token."""
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
    return ensure_folder(shape.name, lambda folder: write_checkpoint(config_of(shape), folder), root)


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


def write_checkpoint(config: Mapping[str, object], folder: Path) -> None:
    """Writes a model of this config.json, as `write_weights` does, and its tokenizer."""
    from penstock.app.bench.weights import write_weights  # only it needs torch

    write_all_but_weights(config, folder)
    write_weights(folder, text_token_ids(config))


def write_all_but_weights(config: Mapping[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": NUM_BYTES, "eos_token_id": NUM_BYTES + 1})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    _write_tokenizer(text_token_ids(config).stop, folder / "tokenizer.json")


def text_token_ids(config: Mapping[str, object]) -> range:
    """Tokens that are text of their own; the ones before are bytes and special tokens."""
    return range(NUM_BYTES + len(_SPECIAL), min(MOST_TOKENS, int(str(config["vocab_size"]))))


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


def _tokenizer_config(config: Mapping[str, object]) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _TEMPLATE,
    }


def _write_tokenizer(num_tokens: int, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL]
    merges = list(itertools.islice(_merges(), num_tokens - len(tokens)))
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(path))


def _merges() -> Iterator[tuple[str, str]]:
    """Every pair of letters, then pairs with a third letter: 18,252 merges of plain text."""
    pairs = [(left, right) for left in _LETTERS for right in _LETTERS]
    yield from pairs
    yield from ((left + right, third) for left, right in pairs for third in _LETTERS)
