"""An Ask: the work that a body gives the model, whichever API it came by.

The schemas of each API have functions beside them that translate a body into an Ask. They know no HTTP and no service,
so that a switch reads of a request what the replica will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.wire.completions import NO_EXTRAS, Extras
from penstock.gateway.wire.conversation import TemplateMessage
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.questions import Questions
from penstock.gateway.wire.sampling import NO_TOKENS, MaxTokens
from penstock.gateway.wire.schemas import Message, Sampled
from penstock.gateway.wire.structured import Form
from penstock.gateway.wire.tools.use import NO_TOOLS, ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which the chat template makes one prompt."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""
    documents: Sequence[Mapping[str, Any]] = ()
    opens_answer: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    continues: bool = False
    """Whether the answer continues the last message."""
    before: Sequence[int] = ()
    """The tokens of the conversation so far."""
    shortens: bool = False
    """Whether the oldest turns are left out where the context has no room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """New messages of a thread that the server keeps."""

    messages: Sequence[TemplateMessage]
    variables: Mapping[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    shortens: bool = False
    """Whether the oldest turns are left out where the context has no room for them."""

    @property
    def continues(self) -> bool:
        return (self.previous_response_id or self.conversation) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts, or else lists of token ids, each of which is a prompt."""

    field: str
    """Their place in the body."""
    texts: Sequence[str] = ()
    token_ids: Sequence[list[int]] = ()
    add_special: bool = True
    parse_special: bool = False
    """Whether special tokens are read from texts."""
    suffix: str = ""
    """The text after the answer, if the prompt is the text before it."""
    cuts_end: bool = False
    """Whether texts that are too long lose their end."""

    def __len__(self) -> int:
        return len(self.texts) + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """The texts around one that is to be filled in, with its beginning."""

    prefix: str
    suffix: str
    middle: str = ""
    files: Sequence[tuple[str, str]] = ()
    """The names and texts of other files of the project."""


Input = Conversation | Turn | Questions | Infill | tuple[Texts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The parts of a reply that are kept, and for how long its generation goes on."""

    resumable: bool = False
    """Whether the stream can be followed again, and goes on for a while without its client."""
    background: bool = False
    """Whether it goes on to its end without its client."""
    stored: dict[str, Any] | None = None
    """The request's part of the stored completion; None if the completion is not stored."""
    output: bool = False
    """Whether the end of the stream repeats the whole output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The parts of a reply that are shown beside its answers."""

    extras: Extras = NO_EXTRAS
    usage: bool = False
    usage_so_far: bool = False
    """Whether every chunk has the usage."""
    echo: bool = False
    """Whether each choice begins with its prompt."""


NOTHING_KEPT, NOTHING_SHOWN = Kept(), Shown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    field: str
    """The place of the input in the body."""
    input: Input
    """An empty tuple asks for nothing but that the model be loaded."""
    service_tier: str | None = None

    sampling: Sampled | None = None
    """The choice of tokens; None if none are generated: texts are embedded, the answers of questions are scored."""
    max_tokens: MaxTokens = NO_TOKENS
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    tools: ToolUse = NO_TOOLS
    form: Form | None = None
    """The form that each answer has to match."""
    reasoning: Reasoned | None = None
    """How much the model may reason."""
    shows_reasoning: bool = True
    truncate: int | None = None
    """The number of tokens to keep of the end of each prompt; -1 keeps those that the context has room for."""
    cuts_start: bool = False
    """Whether prompts that the context has no room for lose their beginning."""
    dimensions: int | None = None
    """The number of dimensions of each embedding; None for all."""

    kept: Kept = NOTHING_KEPT
    shown: Shown = NOTHING_SHOWN
    ignored: tuple[str, ...] = ()
    """The fields that were taken and change nothing."""

    @property
    def streams(self) -> bool:
        return self.sampling is not None and bool(self.sampling.stream)

    @property
    def is_cut(self) -> bool:
        """Whether prompts are cut to a length, so that they may be of any length."""
        return self.truncate is not None or self.cuts_start

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.input)) if isinstance(self.input, tuple) else 1

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together."""
        return self.num_prompts * (1 if self.sampling is None else self.sampling.num_generated)
