"""Text to token ids and back: a checkpoint's own tokenizer.json, run by the tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from penstock.engine.errors import CheckpointError
from penstock.engine.text import tekken

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_COUNTED_AT_ONCE = 64 * 1024


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): visible bytes stand for themselves, the others for U+0100 and on."""
    hidden = [byte for byte in range(256) if byte not in _VISIBLE]
    return {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class Tokenizer:
    """One checkpoint's tokenizer; safe to use from several threads.

    Attributes:
        chat_template: Jinja source, or None if the checkpoint has none.
        special_tokens: text of the special tokens that templates refer to, by name (bos_token, eos_token, ...).
        special_ids: ids whose text is never shown.
        added_ids: other ids that stand for a text of their own, whatever the vocabulary makes of its letters.
    """

    def __init__(
        self,
        source: str | dict[str, Any],
        config: dict[str, Any] | None = None,
        chat_template: str | None = None,
        *,
        repeated: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            source: the text of tokenizer.json; or the content that it would have, see `_made`.
            config: the content of tokenizer_config.json.
            repeated: more ids of tokens, and the ids that `source` has them under.
        """
        config = config or {}
        content = json.loads(source) if isinstance(source, str) else source
        # The second does not look for special tokens in a text.
        self._parsing, self._plain = _parsed(source) if isinstance(source, str) else _made(source)
        self._plain.encode_special_tokens = True
        for twin in (self._parsing, self._plain):
            twin.no_truncation()
            twin.no_padding()
        decoder = content.get("decoder") or {}
        self.is_byte_level: bool = any(
            part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ()))
        )
        self.chat_template = chat_template or _template(config.get("chat_template"))
        self.special_tokens = _named_tokens(config)
        self._repeated = repeated or {}
        added = self._parsing.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        self.special_ids = frozenset(special.union(i for i, as_ in self._repeated.items() if as_ in special))
        self.added_ids = frozenset(added.keys() - special)
        self.cutting_ids = frozenset(
            i
            for i, token in added.items()
            if token.special and not token.normalized and not token.single_word
        )
        """The special tokens that cut a text before anything else is done with it, wherever they stand."""
        self._control_ids = self.special_ids - {_unknown_id(self._parsing, content.get("model") or {})}
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | None] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads a checkpoint's directory.

        Raises:
            CheckpointError: naming the file that is missing or broken.
        """
        path, config = folder / "tokenizer.json", _read_config(folder)
        if not path.is_file() and (folder / tekken.FILE).is_file():
            path = folder / tekken.FILE
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            text, template = path.read_text(encoding="utf-8"), _template_files(folder)
            if path.name != tekken.FILE:
                return cls(text, config, template)
            content = json.loads(text)
            return cls(tekken.content_of(content, _SPELT), tekken.config_of(content) | config, template)
        except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        """The last id + 1. Between ids there may be holes: they stand for no text."""
        return max(self.vocabulary, default=-1) + 1

    @property
    def vocabulary(self) -> dict[int, str]:
        """The tokens by their ids, as the tokenizer spells them."""
        found = {i: token for token, i in self._parsing.get_vocab(with_added_tokens=True).items()}
        return found | {i: found[as_] for i, as_ in self._repeated.items()}

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text.

        Unless asked for, what a text spells never becomes a special token: the text is spelled with other tokens.

        Args:
            parse_special: special tokens written out in the text become those tokens; for rendered templates only.
            add_special: adds what the tokenizer puts around a text of its own accord (a leading BOS, say).
        """
        if parse_special:
            return _encode(self._parsing, text, add_special).ids
        encoding = _encode(self._plain, text, add_special)
        ids: list[int] = encoding.ids  # each access makes a new list
        if _count(ids, self._control_ids) == self._num_around[add_special]:
            return ids
        mask = encoding.special_tokens_mask
        around = [token_id for token_id, is_added in zip(ids, mask, strict=True) if is_added]
        num_before = mask.index(0)
        return [*around[:num_before], *self.spell_out(text), *around[num_before:]]

    @cached_property
    def _num_around(self) -> tuple[int, int]:
        """The number of special tokens added around a text, without and with `add_special`."""
        return 0, _count(self._plain.encode("", add_special_tokens=True).ids, self._control_ids)

    def spell_out(self, text: str, others: frozenset[int] = frozenset()) -> list[int]:
        """Token ids of a text, none of them of a special token or one of `others`.

        A vocabulary that has the special tokens among its pieces (Unigram, BPE with `ignore_merges`) finds them in
        a text even where nobody looks for them. The text is cut within each one, and its pieces are encoded alone.
        Some tokenizers put a space before every text, and then before such a piece, too.
        """
        without = self._control_ids | others
        encoding = self._plain.encode(text, add_special_tokens=False)
        found = [
            offsets
            for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in without
        ]
        cuts = [start + 1 for start, end in found if end - start > 1]
        if not cuts:  # a token of one character has no other spelling, and is left out
            return [token_id for token_id in encoding.ids if token_id not in without]
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [token_id for piece in pieces for token_id in self.spell_out(piece, others)]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        if self._repeated:
            token_ids = [self._repeated.get(i, i) for i in token_ids]
        # Of a batch: unlike `decode`, that leaves the interpreter to other threads.
        (text,) = self._parsing.decode_batch([token_ids], skip_special_tokens=skip_special)
        return str(text)

    def id_of(self, token: str) -> int | None:
        found = self._parsing.token_to_id(token)
        return None if found is None else int(found)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; alone they need not be a whole character. Empty for unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def is_byte(self, token_id: int) -> bool:
        """True if the token is one byte of a character that its neighbours complete (byte fallback)."""
        token = self._parsing.id_to_token(self._repeated.get(token_id, token_id))
        return not self.is_byte_level and _is_byte(token or "")

    def piece(self, token_id: int) -> str | None:
        """The `continuation` of this one token, which is not special; None if the token is a byte (see `is_byte`).

        A token is decoded once: this is asked for every token of every sequence.
        """
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = None if self.is_byte(token_id) else self.continuation([token_id])
            self._pieces[token_id] = piece
            return piece

    def continuation(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens, none of them special, add to a text that ends in a whole character."""
        before, length = self._continued
        return self.decode([*before, *token_ids], skip_special=False)[length:]

    @cached_property
    def _continued(self) -> tuple[list[int], int]:
        """An ordinary token for others to follow, and the length of its text; no token if none has a text."""
        for token_id in range(self.vocab_size):
            if token_id not in self.special_ids and not self.is_byte(token_id):
                text = self.decode([token_id], skip_special=False)
                if text:
                    return [token_id], len(text)
        return [], 0

    def _spell(self, token_id: int) -> bytes:
        token = self._parsing.id_to_token(self._repeated.get(token_id, token_id))
        if token is None:
            return b""
        if not self.is_byte_level:
            return bytes([int(token[3:5], 16)]) if _is_byte(token) else token.replace("▁", " ").encode()
        try:
            return bytes([_ALPHABET[character] for character in token])
        except KeyError:  # an added token is its own text
            return str(token).encode()


def eos_token_id(folder: Path) -> int | None:
    """The id of the token that ends a sequence, as the tokenizer's files have it; None if they have none.

    Raises:
        CheckpointError: naming the file that is broken.
    """
    token, path = _named_tokens(_read_config(folder)).get("eos_token"), folder / "tokenizer.json"
    if token is None and not path.is_file() and (folder / tekken.FILE).is_file():
        return tekken.special_tokens(_read_json(folder / tekken.FILE)).index("</s>")
    if token is None:
        return None
    added = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    listed = {_text(entry): number for number, entry in added.items()} if isinstance(added, dict) else {}
    if token in listed and listed[token].isdecimal():
        return int(listed[token])
    return Tokenizer.load(folder).id_of(token) if path.is_file() else None


def _parsed(text: str) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Two tokenizers of the text of a tokenizer.json."""
    return tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(text)


def _made(content: dict[str, Any]) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Two tokenizers of what a tokenizer.json would say of a BPE whose vocabulary has all added tokens.

    They have one model, and nothing that is large is written as JSON and parsed again.
    """
    own = content["model"]
    model = models.BPE(**{name: value for name, value in own.items() if name != "type" and value is not None})
    empty = {**own, "vocab": {}, "merges": [], "unk_token": None}
    frame = json.dumps({**content, "added_tokens": [], "model": empty})
    twins = _parsed(frame)
    for twin in twins:
        twin.model = model
        twin.add_tokens(
            [
                tokenizers.AddedToken(**{name: value for name, value in token.items() if name != "id"})
                for token in content["added_tokens"]
            ]
        )
    return twins


_ALPHABET = _byte_of_character()
_SPELT = {byte: character for character, byte in _ALPHABET.items()}
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _is_byte(token: str) -> bool:
    return token.startswith("<0x") and _BYTE_TOKEN.fullmatch(token) is not None


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special: bool) -> tokenizers.Encoding:
    """Encodes a batch of one, without offsets: unlike `encode`, that leaves the interpreter to other threads."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
    return encoding


def _count(token_ids: Sequence[int], kind: frozenset[int]) -> int:
    # In pieces, for one call would hold the interpreter until it is over.
    starts = range(0, len(token_ids), _COUNTED_AT_ONCE)
    return sum(sum(map(kind.__contains__, token_ids[i : i + _COUNTED_AT_ONCE])) for i in starts)


def _unknown_id(tokenizer: tokenizers.Tokenizer, model: dict[str, Any]) -> int | None:
    """The id of what the vocabulary cannot spell, by the name or the number that the kinds of models give it."""
    name = model.get("unk_token")
    found = model.get("unk_id") if name is None else tokenizer.token_to_id(name)
    return None if found is None else int(found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json merged with the separate files of older checkpoints, in transformers' order."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    if config.get("chat_template") is None:
        config |= _read_json(folder / "chat_template.json")
    return config


def template_of(named: Mapping[str, object]) -> str | None:
    """Joins named templates into one: `rag` for documents, `tool_use` for tools, else `default`."""
    kinds = {"rag": "documents", "tool_use": "tools", "default": "true"}
    found = [(asked, source) for name, asked in kinds.items() if isinstance(source := named.get(name), str)]
    if not found or found[-1][0] == "documents":  # what is written for documents is for nothing else
        return None
    text = found[-1][1]
    for asked, source in found[-2::-1]:
        text = f"{{% if {asked} %}}{_block(source)}{{% else %}}{_block(text)}{{% endif %}}"
    return text


def _block(source: str) -> str:
    """A template within a block, where the newline behind a tag is trimmed, and space before one in its line."""
    return "\n" + source.removesuffix("\n") + "{{ '' }}"


def _template(value: object) -> str | None:
    """tokenizer_config.json has one template, or a list of named ones."""
    if isinstance(value, list):
        return template_of(
            {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        )
    return value if isinstance(value, str) else None


def _template_files(folder: Path) -> str | None:
    """The templates that newer checkpoints have in files of their own."""
    paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    paths["default"] = folder / "chat_template.jinja"
    return template_of({n: path.read_text(encoding="utf-8") for n, path in paths.items() if path.is_file()})


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the name they have in tokenizer_config.json, written as text or as an object."""
    found = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in found.items() if text is not None}


def _text(token: object) -> str | None:
    """The text of a token, which files have as it is or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
