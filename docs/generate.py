"""Writes docs/reference from the code: `python -m docs.generate`. Nothing on the pages depends on the machine."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

from pydantic import ByteSize
from pydantic.fields import FieldInfo
from starlette.routing import Route

import penstock.cluster.metrics
import penstock.gateway.metrics
from penstock.app.cli import main
from penstock.app.settings import ENV_PREFIX, Settings, default_text, flag
from penstock.engine.kernels.cpu import levels, prebuilt
from penstock.engine.model.families import FAMILIES, NOT_YET
from penstock.engine.model.gguf.kinds import KINDS
from penstock.gateway.endpoints.openapi import OpenApi
from penstock.gateway.endpoints.operation import ALWAYS
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.limits import Limits
from penstock.priority.lanes import LanePolicy

FOLDER = Path(__file__).parent / "reference"
_PUBLISHED = Path(__file__).parent / "published.json"
"""By architecture, the published models whose configs were read, and whether their shrunk logits match transformers."""
_NOTE = "<!-- Written by `python -m docs.generate`: change the code, not this page. -->"


def pages() -> dict[str, str]:
    """Makes the pages, by their names."""
    return {
        "settings.md": _page("Settings", _settings()),
        "commands.md": _page("Commands", _command([])),
        "http.md": _page("The HTTP API", _http()),
        "metrics.md": _page("Metrics", _metrics()),
        "families.md": _page("Families of models", _families()),
    }


def _page(title: str, blocks: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *blocks]) + "\n"


def _table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join("---" for _ in heads.split("|"))
    return "\n".join(f"| {line} |" for line in [heads, rule, *lines])


def _codes(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


# Families


def _families() -> Iterator[str]:
    yield f"""\
{len(FAMILIES)} architectures are served, by their name in a model's config.json. Each is a short function in
`engine/model/families`. Tests compare the logits of tiny random models of each architecture with those of
transformers: in plain torch, with the native CPU kernels, and with the CUDA kernels in Triton's interpreter; in 8 and 4
bits, and on two ranks where ranks can run them. Architectures with a `general.architecture` are also served from GGUF
files, whose logits are compared in the same way; files of Granite 4 name it `granite` or `granitehybrid`, those of
Mistral Small 3.1 `llama`, those of Small 4 `mistral4`, and those of GLM-4.7 Flash `deepseek2`.
[Models](../guide/models.md) describes how to serve one."""
    yield _table(
        "architecture | models | as GGUF",
        ((f"`{name}`", family.models, _kinds_of(name)) for name, family in FAMILIES.items()),
    )
    read = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    num_read, num_same = (
        sum(map(count, read.values())) for count in (len, lambda names: sum(names.values()))
    )
    yield "## Published sizes"
    yield f"""\
The config.json files of {num_read} published models were read, and every number was compared with what transformers
reads. Shrunk and with random weights, {num_same} of them have the logits of transformers (within 1e-4 of the largest).
The others are marked with a star: transformers lacks the model, cannot build it from these entries, or computes
something else (it bounds the steps of Nemotron H from below, which its makers' code does not, and leaves the logits of
Aya Vision unscaled, unlike those of its text model)."""
    yield _table(
        "architecture | read from their own files",
        (
            (f"`{name}`", ", ".join(n if s else f"{n}*" for n, s in read[name].items()))
            for name in FAMILIES
            if name in read
        ),
    )
    yield "## Not served yet"
    yield _table("architecture | unsupported part", ((f"`{k}`", v) for k, v in NOT_YET.items()))


def _kinds_of(architecture: str) -> str:
    """Returns the kinds of GGUF files that models of the architecture are converted to."""
    known = [(kind, row) for kind, one in KINDS.items() for row in (one, one.unbiased) if row is not None]
    rows = [
        (kind, name) for kind, row in known for name in (row.architecture, row.windowed, row.sparse) if name
    ]
    own = [kind for kind, name in rows if name == architecture]
    describe = FAMILIES[architecture].describe
    return _codes(dict.fromkeys(own or [kind for kind, name in rows if FAMILIES[name].describe is describe]))


# Settings


def _settings() -> Iterator[str]:
    yield """\
Every setting is a flag of `penstock serve`, an environment variable, and a key of the TOML file that `--config` names.
A flag overrides a variable, and a variable overrides the file. A flag that is on or off takes no value."""
    rows = ((_names(name), _about(field)) for name, field in Settings.model_fields.items())
    yield _table("flag, variable, key | what it does", rows)
    yield f"""\
Two more variables control the [CPU kernels](../internals/kernels.md), for all commands:

- `{levels.VARIABLE}` names the level of instruction sets to use instead of the best one.
- `{prebuilt.VARIABLE}` names the folder of prebuilt kernels."""


def _names(name: str) -> str:
    names = [flag(name), (ENV_PREFIX + name).upper(), *([] if name == "config" else [name])]
    return "<br>".join(f"`{each}`" for each in names)


def _about(field: FieldInfo) -> str:
    default = _default(field)
    return f"{_sentence(field)}<br>Value: {_value(field)}.{f' Default: {default}.' if default else ''}"


def _sentence(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return "" if default in (None, (), False) else _codes(default_text(default).split(","))


_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "at least"}
_KINDS = {
    **{bool: "on or off", int: "whole number", float: "number", str: "text", Path: "path", ByteSize: "size"},
    **{tuple: "comma-separated", LanePolicy: "`KEY=N,...`"},
}


def _value(field: FieldInfo) -> str:
    """Describes the values that a setting takes."""
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and isinstance(metavar := extra.get("metavar"), str):
        return _codes(metavar.split("|"))
    bounds = ((text, getattr(bound, key, None)) for bound in field.metadata for key, text in _BOUNDS.items())
    values = (f"{text} {value}" for text, value in bounds if value is not None)
    return ", ".join([_kind(field.annotation), *values])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return next(_kind(one) for one in get_args(annotation) if one is not NoneType)
    if get_origin(annotation) is Literal:
        return _codes(get_args(annotation))
    return _KINDS[get_origin(annotation) or annotation]


# Commands


def _command(words: list[str]) -> Iterator[str]:
    """Describes a command, followed by the commands that its help lists."""
    parser = parser_of(words)
    if words:
        yield f"#{'#' * len(words)} {' '.join(words)}"
    yield str(parser.description)
    own = [action for action in parser._actions if action.dest != "help"]
    shared = [action for action in own if _is_setting(action)]
    if rows := [(_usage(action), _help(action)) for action in own if action not in shared]:
        yield _table("argument | what it does", rows)
    if len(shared) == len(Settings.model_fields):
        yield "It takes all [settings](settings.md)."
    elif shared:
        names = _codes(flag(action.dest) for action in shared)
        yield f"It takes these [settings](settings.md): {names}."
    for name in re.findall(r"^  (\w+) ", parser.epilog or "", re.MULTILINE):
        yield from _command([*words, name])


def parser_of(words: list[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command, which has all its arguments once it prints its help."""
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", autospec=True) as shown,
        suppress(SystemExit),
    ):
        main([*words, "--help"])
    parser: argparse.ArgumentParser = shown.call_args.args[0]
    return parser


def _is_setting(action: argparse.Action) -> bool:
    field = Settings.model_fields.get(action.dest)
    return field is not None and _help(action).startswith(_sentence(field))


def _usage(action: argparse.Action) -> str:
    metavar = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    if action.nargs == 0:
        return f"`{action.option_strings[0]}`"
    return f"`{' '.join([*action.option_strings[-1:], str(metavar)])}`"


def _help(action: argparse.Action) -> str:
    return " ".join((action.help or "").replace("%%", "%").split())


# HTTP


def _http() -> Iterator[str]:
    async def nowhere(_: object) -> None: ...

    routes = [
        Route(path, nowhere, methods=list(of)) for path, of in OPERATIONS.items() if path != "/openapi.json"
    ]
    document = OpenApi(routes, Limits(), with_keys=False).document()
    schemas = document["components"]["schemas"]
    yield f"""\
A server describes its API at `/openapi.json`. [Clients](../guide/clients.md) lists which programs use which routes, and
how each of their fields is handled. Replies have the types of OpenAI's, Anthropic's and Ollama's packages;
`tests/gateway/test_reply_types.py` lists the additions.

Any request may get an error object with {_codes(ALWAYS)}; a request with a body may get `415`, and one without a key
`401` where keys are configured. Other errors are listed with the endpoints."""
    bodies: dict[str, list[str]] = {}
    rows = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            endpoint = f"`{method.upper()} {path}`"
            about = [operation["summary"]]
            if parameters := [one for one in operation["parameters"] if one["in"] != "path"]:
                about.append(f"Parameters: {_codes(map(_parameter, parameters))}")
            if body := _body(operation):
                bodies.setdefault(body, []).append(endpoint)
                about.append(f"Body: [{body}](#{body.lower()})")
            if errors := _errors(operation):
                about.append(f"Errors: {_codes(errors)}")
            rows.append((endpoint, "<br>".join(about)))
    yield _table("endpoint | what it does", rows)
    for body, endpoints in bodies.items():
        yield f"## {body}"
        yield f"The body of {', '.join(endpoints)}. Fields in bold are required."
        required = schemas[body].get("required", ())
        fields = schemas[body]["properties"].items()
        names = ((f"**`{name}`**" if name in required else f"`{name}`", schema) for name, schema in fields)
        yield _table("field | value", ((name, _type(schema, schemas)) for name, schema in names))


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {}).values()
    return "".join(media["schema"]["$ref"].rpartition("/")[2] for media in content)


def _errors(operation: dict[str, Any]) -> list[int]:
    statuses = map(int, operation["responses"])
    return [status for status in statuses if status >= 400 and status not in (*ALWAYS, 401, 415)]


def _parameter(parameter: dict[str, Any]) -> str:
    name: str = parameter["name"]
    return f"?{name}" if parameter["in"] == "query" else f"{name}:"


_LIMITS = {
    **{"minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}"},
    **{"minLength": "at least {} long", "maxLength": "at most {} long", "minItems": "at least {}"},
    **{"maxItems": "at most {}", "maxProperties": "at most {} members"},
}
_INT64 = 2**63


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Describes a schema in words, and an object that it refers to by the names of its members."""
    if "$ref" in schema:
        found = schemas[schema["$ref"].rpartition("/")[2]]
        return f"object of {_codes(found['properties'])}" if "properties" in found else _type(found, schemas)
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return " or ".join(
            dict.fromkeys(_type(form, schemas) for form in forms if form.get("type") != "null")
        )
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _codes(value if isinstance(value, str) and value else json.dumps(value) for value in values)
    known = ((text, schema[key]) for key, text in _LIMITS.items() if key in schema)
    limits = ", ".join(text.format(number) for text, number in known if abs(number) < _INT64)
    kind = schema.get("type", "anything")
    if "items" in schema:
        return f"list{f' ({limits})' if limits else ''} of {_type(schema['items'], schemas)}"
    return f"{kind}, {limits}" if limits else kind


# Metrics


def _metrics() -> Iterator[str]:
    yield """\
Prometheus scrapes `/metrics`. The samples of a counter have the suffix `_total`, those of a histogram
`_bucket`, `_sum` and `_count`. `--metrics-compat vllm` adds many of them under vLLM's names, those of older releases
included ([platforms](../guide/platforms.md#metrics))."""
    for title, metrics in (
        ("A server's", penstock.gateway.metrics.Metrics()),
        ("A switch's", penstock.cluster.metrics.SwitchMetrics()),
    ):
        yield f"## {title}"
        rows = [
            (f"`{name}`", metric.kind, _codes(metric.label_names), metric.documentation)
            for name, metric in metrics.page.named()
        ]
        yield _table("name | type | labels | what it measures", sorted(rows))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
