"""tekken.json, the tokenizers of Mistral's own checkpoints: BPE over bytes, given by the rank of each piece."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

FILE = "tekken.json"
_OLDEST = [
    *(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
    ),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]
"""The first special tokens of files that do not list them."""
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Json = dict[str, Any]


def special_tokens(tekken: Json) -> list[str]:
    """The special tokens by their ids: ordinary pieces follow them."""
    listed = tekken.get("special_tokens") or []
    texts = [token["token_str"] for token in sorted(listed, key=lambda token: token["rank"])] or _OLDEST
    count = tekken["config"]["default_num_special_tokens"]
    return [*texts, *(f"<SPECIAL_{i}>" for i in range(len(texts), count))]


def content_of(tekken: Json, spelt: Mapping[int, str]) -> Json:
    """The content that a tokenizer.json of the same tokenizer would have.

    Pieces have no merges: any two that make a third are one, in the order of the third's rank.

    Args:
        spelt: the characters that bytes are spelt with.
    """
    special, config = special_tokens(tekken), tekken["config"]
    pieces = tekken["vocab"][: config["default_vocab_size"] - len(special)]
    texts = ["".join(map(spelt.__getitem__, base64.b64decode(piece["token_bytes"]))) for piece in pieces]
    ranks = {text: rank for rank, text in enumerate(texts)}
    vocabulary = {text: rank + len(special) for text, rank in ranks.items()}
    bytes_of_a_piece = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    cut = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, "special": True} for i, text in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, bytes_of_a_piece]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [special.index("<s>")], "tokens": ["<s>"]}},
        },
        "decoder": bytes_of_a_piece,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": vocabulary | {text: i for i, text in enumerate(special)},
            "merges": list(chain.from_iterable(_merges(text, ranks) for text in texts)),
        },
    }


def config_of(tekken: Json) -> Json:
    """The tokens that have names, as tokenizer_config.json has them."""
    known = special_tokens(tekken)
    return {name: text for name, text in _NAMED.items() if text in known}


def _merges(text: str, ranks: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
    pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
