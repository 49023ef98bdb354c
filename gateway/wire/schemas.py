"""Request bodies of chat and text completions, in OpenAI's names and others'; and of what makes tokens of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.dialects import (
    BUDGET_NAMES,
    HINTS,
    NAMES,
    NEUTRAL_HINTS,
    OFF,
    SAMPLER_FIELDS,
    UNSET,
    Arguments,
    without_others,
)
from penstock.gateway.wire.efforts import NO_CHOICE, Reasoned, ReasoningChoice, agreed
from penstock.gateway.wire.strict import TOLERANT, Ignored, KnownKinds, Many, Most, StrictBody, TolerantBody

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

_INT64 = 2**63
MAX_TEMPERATURE = 100
"""vLLM and llama.cpp have no bound."""
Truncation = Annotated[int, Field(ge=1, lt=_INT64)] | Literal[-1]
"""The number of tokens to keep of the end of a prompt; -1 keeps those that the context has room for."""
Schema = dict[str, object] | bool
"""A JSON Schema."""
Choices = Annotated[Many[str], Field(min_length=1), Most("max_grammar_choices")]
Biases = dict[str, Annotated[float, Field(ge=-100, le=100)]]
NumChoices = Annotated[int, Field(ge=1), Most("max_choices")]
Dimensions = Annotated[int, Field(ge=1), Most(2**20)]
NumTop = Annotated[int, Field(ge=0), Most("max_top_logprobs")]
TokenIds = Many[Annotated[int, Field(ge=0)]]
Metadata = Annotated[dict[str, str], Most("max_metadata")]
_METADATA_CHARS = (64, 512)
"""The characters that a key and a value may have."""
Unread = Annotated[str | None, Ignored()]
"""A text that nothing comes of."""


class StructuredOutputs(StrictBody):
    """The form that the answer has to match, in one of vLLM's ways."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Ignored()] = None
    resumable: bool | None = None
    continuous_usage_stats: bool | None = None


class KvTransfer(TolerantBody):
    """The KV of a prompt that one server computes and another takes, as vLLM's proxies say it.

    The first request has `do_remote_decode`; its reply has the object that the second one is sent with.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: Annotated[str, Field(max_length=512)] | None = None
    remote_host: Annotated[str, Field(max_length=256)] | None = None
    remote_port: Annotated[int, Field(ge=0, le=65535)] | None = None


class ModelRequest(StrictBody):
    model: Annotated[str, Field(min_length=1)] = ""
    """The one that is served, if the body gives none."""


class TokenChoice(StrictBody):
    """The fields by which tokens are chosen that have the same names and ranges in Ollama's API."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[str | Many[str] | None, Most("max_stop")] = None


class SamplingFields(TokenChoice, ModelRequest):
    """The fields that chat and text completions share: how tokens are chosen, and some that change nothing here."""

    ALIASES: ClassVar[Mapping[str, str]] = NAMES
    UNSET: ClassVar[Mapping[str, tuple[object, ...]]] = UNSET
    OFF: ClassVar[Mapping[str, tuple[object, ...]]] = OFF
    NEUTRAL: ClassVar[Mapping[str, object]] = NEUTRAL_HINTS
    IGNORED = HINTS

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: Annotated[Biases, Most("max_logit_bias")] | None = None
    service_tier: ServiceTier | None = None

    # Not OpenAI's, but what clients of open models send.
    best_of: NumChoices | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    top_a: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Most("max_stop_token_ids")] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    grammar: str | None = None
    samplers: Many[str] | None = None
    prompt_logprobs: NumTop | None = None
    bad_words: Annotated[Many[Annotated[str, Field(min_length=1)]], Most("max_bad_words")] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1), Most("max_allowed_token_ids")] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    watermark: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_keep: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    kv_transfer_params: KvTransfer | None = None
    return_tokens_as_token_ids: bool | None = None

    # Accepted: they ask for nothing that could be seen in the answer.
    user: Unread = None
    metadata: Annotated[Metadata | None, Ignored()] = None
    store: Annotated[bool | None, Ignored()] = None
    safety_identifier: Unread = None
    prompt_cache_key: Unread = None
    prompt_cache_retention: Unread = None

    @classmethod
    def prepared(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        return without_others(values) if values.keys() & SAMPLER_FIELDS else values

    @property
    def num_generated(self) -> int:
        """The number of choices that are made of each prompt; those that are not among the best are not shown."""
        return self.best_of or self.n or 1


# There may be thousands of them: each is a plain dict.
@with_config(TOLERANT)
class ContentPart(TypedDict):
    type: Literal["text"]
    text: str


class FunctionCall(TolerantBody):
    name: Annotated[str, Field(min_length=1)]
    arguments: Arguments


class ToolCall(TolerantBody):
    """A call that an assistant made, as it was told to the client."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(TolerantBody):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | Many[ContentPart] | None, Most("max_content_parts")] = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[object] | None = None
    tool_calls: Annotated[Many[ToolCall], Most("max_tool_calls")] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of the same."""


Messages = Annotated[Many[Message], Field(min_length=1), Most("max_messages")]

# Tools go to the chat template as they are, with what else is said of them.
OPEN = ConfigDict(strict=True, extra="allow")

ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.:/-]{1,128}$")]


@with_config(OPEN)
class Function(TypedDict):
    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class Tool(TypedDict):
    type: Literal["function"]
    function: Function


ToolList = Annotated[Many[Annotated[Tool, KnownKinds(("function",))]], Most("max_tools")]
Variables = Annotated[dict[str, Any], Most("max_template_variables")]


class NamedFunction(StrictBody):
    name: str


class FunctionChoice(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(StrictBody):
    mode: Literal["auto", "required"]
    tools: Many[FunctionChoice]


class AllowedChoice(StrictBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


CHOICES = KnownKinds(("function", "allowed_tools"))
"""The kinds of `tool_choice` that are objects."""


class Chat(StrictBody):
    """A conversation, and the further inputs of its template."""

    messages: Messages
    tools: ToolList | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None


class JsonSchema(StrictBody):
    """A schema with a name. `strict` changes nothing: every answer is held to its schema."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class AnswerFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """llama.cpp's place for the schema."""


class ChatBody(Chat, Reasoned, SamplingFields):
    """`POST /v1/chat/completions`."""

    ALIASES: ClassVar[Mapping[str, str]] = {**NAMES, **BUDGET_NAMES, "n_predict": "max_tokens"}
    OFF: ClassVar[Mapping[str, tuple[object, ...]]] = {**OFF, "echo": (False,)}
    NOT_SUPPORTED = frozenset({"audio", "moderation", "web_search_options"})

    metadata: Metadata | None = None
    store: bool | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None, CHOICES
    ] = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[Many[dict[str, Any]], Most("max_inputs")] | None = None
    """Documents to answer from, in the form that the chat template expects."""
    functions: Annotated[Many[Function], Most("max_tools")] | None = None
    """An older form of `tools`, with `function_call` for `tool_choice`: at most one of them is called."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    include_reasoning: bool | None = None
    reasoning: ReasoningChoice | None = None
    reasoning_format: Literal["auto", "deepseek", "parsed", "hidden"] | None = None
    """llama.cpp's and Groq's: the reasoning is apart from the answer, or left out."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    response_format: AnswerFormat | None = None
    modalities: Many[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None

    @property
    def effort(self) -> str | None:
        in_reasoning = (self.reasoning or NO_CHOICE).effort
        return agreed({"reasoning_effort": self.reasoning_effort, "reasoning.effort": in_reasoning})

    def switches(self) -> dict[str, bool | None]:
        return super().switches() | {"reasoning.enabled": (self.reasoning or NO_CHOICE).enabled}

    def budgets(self) -> dict[str, int | None]:
        return super().budgets() | {"reasoning.max_tokens": (self.reasoning or NO_CHOICE).max_tokens}

    @property
    def shows_reasoning(self) -> bool:
        """Returns whether the reply has the reasoning."""
        is_excluded = (self.reasoning or NO_CHOICE).exclude
        return self.include_reasoning is not False and self.reasoning_format != "hidden" and not is_excluded


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    ALIASES: ClassVar[Mapping[str, str]] = {**NAMES, "n_predict": "max_tokens", "n_probs": "logprobs"}
    UNSET: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "seed": UNSET["seed"]
    }  # there is a default of tokens

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumTop | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    response_format: AnswerFormat | None = None


class TokenizeBody(StrictBody):
    """`POST /tokenize`: a prompt or messages or, as llama.cpp has it, a content."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(StrictBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class LocateBody(StrictBody):
    """`/v1/prefixes/locate`: the prompt, as tokens or as messages."""

    tokens: TokenIds | None = None
    messages: Messages | None = None


def check_counts(body: SamplingFields, limits: Limits) -> None:
    """Raises 400 for fields that are too long, or that exclude each other."""
    if body.stop is not None:
        if not all(stop := as_strings(body.stop)):
            raise invalid("'stop' must not contain an empty string.", "stop")
        _check_texts("stop", stop, "stop string", limits.max_stop_chars)
    if body.bad_words:
        _check_texts("bad_words", body.bad_words, "bad word", limits.max_bad_word_chars)
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("'prompt_logprobs' is not allowed when 'stream' is true.", "prompt_logprobs")
    if body.num_generated < (body.n or 1):
        raise invalid("'best_of' must be at least 'n'.", "best_of")
    if body.num_generated > (body.n or 1) and body.stream:
        raise invalid(
            "With 'best_of', 'stream' must be false: which are the best is known at the end.", "stream"
        )


def check_chat(body: ChatBody, limits: Limits) -> None:
    check_counts(body, limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise invalid(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                "continue_final_message",
            )
        if body.messages[-1].role != "assistant":
            raise invalid(
                "'continue_final_message' needs a last message of the assistant.", "continue_final_message"
            )
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise invalid("Give 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens")


def check_completion(body: CompletionBody, limits: Limits) -> None:
    check_counts(body, limits)
    if body.suffix and body.echo:
        raise invalid("'echo' cannot be used together with 'suffix'.", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("'max_tokens' may only be 0 when 'echo' is true.", "max_tokens")


def _check_texts(field: str, texts: Sequence[str], what: str, most: int) -> None:
    if any(len(text) > most for text in texts):
        raise invalid(f"A {what} may have at most {most} characters.", field)


def as_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises 400 for metadata beyond OpenAI's bounds."""
    for pair in (metadata or {}).items():
        for text, part, most in zip(pair, ("key", "value"), _METADATA_CHARS, strict=True):
            if len(text) > most:
                raise invalid(f"A {part} of 'metadata' may have at most {most} characters.", "metadata")
