"""Bodies of OpenAI's `/v1/decisions` and of TypeSafe's `/v1/systemone`, and their translation.

Each question becomes a text after the input, and each of its answers a label.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.conversation import as_call
from penstock.gateway.wire.questions import Option, Question, Questions
from penstock.gateway.wire.schemas import ModelRequest, ServiceTier
from penstock.gateway.wire.strict import TOLERANT, KnownKinds, Many, Most, StrictBody, TolerantBody

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
_YES, _NO = "Yes", "No"


# Bodies


def _kind(item: object) -> str:
    """The type of an item, capitalised: then the path of a field does not show it."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind or "message").capitalize()


BY_TYPE = Discriminator(
    _kind,
    custom_error_type="unknown_type",
    custom_error_message="Input should have a type that is known here",
)


@with_config(TOLERANT)
class DecisionText(TypedDict):
    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: NotRequired[dict[str, Any] | None]


@with_config(TOLERANT)
class DecisionRefusal(TypedDict):
    type: Literal["refusal"]
    refusal: str


@with_config(TOLERANT)
class DecisionJson(TypedDict):
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


DecisionPart = Annotated[
    Annotated[DecisionText, Tag("Input_text")]
    | Annotated[DecisionText, Tag("Output_text")]
    | Annotated[DecisionRefusal, Tag("Refusal")]
    | Annotated[DecisionJson, Tag("Input_json")],
    BY_TYPE,
    KnownKinds(("input_text", "input_json", "output_text", "refusal")),
]
Parts = Annotated[Many[DecisionPart], Most("max_content_parts")]
Content = str | Annotated[Parts, Field(min_length=1)]


class DecisionMessage(TolerantBody):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class _CallFields(TolerantBody):
    call_id: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class DecisionCall(_CallFields):
    """A call of a function."""

    type: Literal["function_call"]
    name: str
    arguments: str
    namespace: str | None = None


class DecisionCustomCall(_CallFields):
    """A call of a tool whose input is any text."""

    type: Literal["custom_tool_call"]
    name: str
    input: str
    namespace: str | None = None


class DecisionOutput(_CallFields):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | Parts


DecisionItem = Annotated[
    Annotated[DecisionMessage, Tag("Message")]
    | Annotated[DecisionCall, Tag("Function_call")]
    | Annotated[DecisionCustomCall, Tag("Custom_tool_call")]
    | Annotated[DecisionOutput, Tag("Function_call_output")]
    | Annotated[DecisionOutput, Tag("Custom_tool_call_output")],
    BY_TYPE,
    KnownKinds(
        ("message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output")
    ),
]


class _AskedQuestion(StrictBody):
    instructions: Content
    name: str | None = None


class PredicateQuestion(_AskedQuestion):
    type: Literal["predicate"]


class ChoiceOption(StrictBody):
    value: Annotated[str, Field(min_length=1)] | bool
    description: str | None = None


class ChoiceQuestion(_AskedQuestion):
    type: Literal["choice"]
    choices: Annotated[Many[ChoiceOption], Field(min_length=2), Most(MAX_OPTIONS)]


class ScoreLevel(StrictBody):
    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class ScoreQuestion(_AskedQuestion):
    type: Literal["score"]
    levels: Annotated[Many[ScoreLevel], Field(min_length=2), Most(MAX_OPTIONS)]


DecisionQuestion = Annotated[
    Annotated[PredicateQuestion, Tag("Predicate")]
    | Annotated[ChoiceQuestion, Tag("Choice")]
    | Annotated[ScoreQuestion, Tag("Score")],
    BY_TYPE,
    KnownKinds(("predicate", "choice", "score")),
]


class DecidedBody(ModelRequest):
    """The fields that both APIs share."""

    user: str | None = None
    service_tier: ServiceTier | None = None


class DecisionsBody(DecidedBody):
    """`POST /v1/decisions`."""

    input: str | Annotated[Many[DecisionItem], Field(min_length=1), Most("max_messages")]
    questions: Annotated[Many[DecisionQuestion], Field(min_length=1), Most(MAX_QUESTIONS)]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


TextOrJson = str | dict[str, Any] | list[Any]
"""A text, or JSON that is shown as one."""


class NoulCriteria(StrictBody):
    true: TextOrJson | None = None
    false: TextOrJson | None = None


class NoulSystemQuestion(StrictBody):
    type: Literal["noul"]
    instructions: TextOrJson
    criteria: NoulCriteria | None = None


class ChoiceSystemQuestion(StrictBody):
    type: Literal["choice"]
    instructions: TextOrJson
    criteria: Annotated[
        dict[Annotated[str, Field(min_length=1)], TextOrJson | None],
        Field(min_length=2, max_length=MAX_OPTIONS),
    ]


class ScoreSystemQuestion(StrictBody):
    type: Literal["score"]
    instructions: TextOrJson
    criteria: Annotated[list[TextOrJson], Field(min_length=2, max_length=MAX_OPTIONS)]


SystemQuestion = Annotated[
    Annotated[NoulSystemQuestion, Tag("Noul")]
    | Annotated[ChoiceSystemQuestion, Tag("Choice")]
    | Annotated[ScoreSystemQuestion, Tag("Score")],
    BY_TYPE,
]


class SystemOneBody(DecidedBody):
    """`POST /v1/systemone`."""

    NOT_SUPPORTED = frozenset({"assets"})
    IGNORED = frozenset({"keep_alive"})

    state: TextOrJson
    questions: Annotated[dict[str, SystemQuestion], Field(min_length=1), Most(MAX_QUESTIONS)]


# Their translation


def decisions_ask(body: DecisionsBody, _: Limits) -> Ask:
    """Raises 400 if two choices of a question are the same, or an output comes of no call."""
    questions = [_question(f"questions[{i}]", question) for i, question in enumerate(body.questions)]
    messages = _messages(body)
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": ""})
    return _ask(body, "input", Questions(messages, questions))


def system_ask(body: SystemOneBody, _: Limits) -> Ask:
    questions = [_system_question(name, question) for name, question in body.questions.items()]
    return _ask(body, "state", Questions([{"role": "user", "content": _text(body.state)}], questions))


def _ask(body: DecidedBody, field: str, questions: Questions) -> Ask:
    return Ask(model=body.model, field=field, input=questions, service_tier=body.service_tier)


def _question(field: str, question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> Question:
    text = _content_text(question.instructions)
    if isinstance(question, PredicateQuestion):
        return Question(field, "predicate", question.name, text, (Option(_YES, True), Option(_NO, False)))
    if isinstance(question, ScoreQuestion):
        levels = tuple(Option(level.label, level.label, level.description or "") for level in question.levels)
        return _distinct(Question(field, "score", question.name, text, levels, "levels[{}].label"))
    # A string and a boolean may have the same text: then quotes tell them apart.
    spellings = Counter(_spelt(choice.value) for choice in question.choices)
    spell = _spelt if max(spellings.values()) == 1 else json.dumps
    choices = tuple(Option(spell(c.value), c.value, c.description or "") for c in question.choices)
    return _distinct(Question(field, "choice", question.name, text, choices, "choices[{}].value"))


def _spelt(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _distinct(question: Question) -> Question:
    seen: set[str] = set()
    for i, option in enumerate(question.options):
        if option.label in seen:
            raise invalid("Two answers of a question are the same.", question.option_field(i))
        seen.add(option.label)
    return question


def _system_question(name: str, question: Any) -> Question:
    field, text = f"questions.{name}", _text(question.instructions)
    if isinstance(question, NoulSystemQuestion):
        criteria = question.criteria or NoulCriteria()
        options = Option(_YES, True, _text(criteria.true)), Option(_NO, False, _text(criteria.false))
        return Question(field, "predicate", name, text, options)
    if isinstance(question, ScoreSystemQuestion):
        levels = enumerate(map(_text, question.criteria))
        return Question(
            field, "score", name, text, tuple(Option(str(i), level, level) for i, level in levels)
        )
    choices = tuple(Option(choice, choice, _text(meaning)) for choice, meaning in question.criteria.items())
    return Question(field, "choice", name, text, choices)


def _text(content: TextOrJson | None) -> str:
    return content if isinstance(content, str) else "" if content is None else _json(content)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _content_text(content: Content | Sequence[DecisionPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(map(_part_text, content))


def _part_text(part: DecisionPart) -> str:
    if part["type"] == "input_json":
        return _json(part["data"])
    return part["refusal"] if part["type"] == "refusal" else part["text"]


def _messages(body: DecisionsBody) -> list[dict[str, Any]]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    for i, item in enumerate(body.input):
        if isinstance(item, DecisionMessage):
            messages.append({"role": item.role, "content": _content_text(item.content)})
        elif isinstance(item, DecisionOutput):
            if item.call_id not in calls:
                raise invalid(f"There is no call '{item.call_id}' before this output.", f"input[{i}].call_id")
            text = _content_text(item.output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
        else:
            calls.add(item.call_id)
            arguments = item.arguments if isinstance(item, DecisionCall) else _json({"input": item.input})
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = as_call(item.call_id, item.name, arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages
