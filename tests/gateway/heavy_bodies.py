"""The worst bodies that anybody may send, and the longest replies: for every bound, list, number, tool and format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from penstock.gateway.access.idempotency import RESUMABLE_HEADER
from penstock.gateway.limits import Limits
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from tests.gateway.harness import MODEL
from tests.gateway.wire.tools.test_grammars import WRITTEN

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
CONTEXT = 131_072
MAX_BYTES = Limits().max_body_bytes
MOST_VALUES = Limits().max_json_values


def filled(start: str, entry: str, end: str, most: int = MAX_BYTES) -> bytes:
    """A body of `most` bytes that is nearly all one list of the same entries."""
    number = (most - len(start) - len(end)) // (len(entry) + 1)
    return f"{start}{','.join([entry] * number)}{end}".encode()


def numbered(start: str, entry: str, end: str, number: int) -> bytes:
    """Repeats an entry, each with its own number in it."""
    return f"{start}{','.join(entry % i for i in range(number))}{end}".encode()[:MAX_BYTES]


MODEL_JSON = f'"model":"{MODEL}"'
HELLO = '"messages":[{"role":"user","content":"Hi"}]'
IN_CHAT = f"{{{MODEL_JSON},{HELLO},"
IN_TEXT = f'{{{MODEL_JSON},"prompt":"Hi",'
IN_RESPONSE = f'{{{MODEL_JSON},"input":"Hi",'
MESSAGE = '{"role":"user","content":""}'
PART = '{"type":"text","text":""}'
SHORT, MANY_BYTES = "All work and no play. " * 46, 1024 * 1015
CALL = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
PROMPTS = f'{{{MODEL_JSON},"prompt":["a"' + ',"a"' * 63 + "],"
WORD = "All work and no play. " * 11
DECISIONS = "/v1/decisions"
QUESTION = '{"type":"predicate","instructions":"Is it so, now?"}'
IN_QUESTIONS = f'{{{MODEL_JSON},"input":"Hi","questions":['
CHOICES = '{"type":"choice","name":"%%d","instructions":"","choices":[%s]}'
LONG = "All work and no play. " * (CONTEXT * 3 // 4 // 22)

# Every field that takes a list or a map, at its largest: right, wrong, and as large as it is let in.
CORPUS: dict[str, tuple[str, bytes]] = {
    "prompt of floats": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "0.5", "]}")),
    "prompt of zeros": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "0", "]}")),
    "prompt of texts": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', '"a"', "]}")),
    "prompt of lists": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "[]", "]}")),
    "prompts of zeros": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', f"[{','.join(['0'] * 60_000)}]", "]}"),
    ),
    "prompt to the brim": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "200", "]}", 4 * CONTEXT - 200)),
    "stop": (COMPLETIONS, filled(IN_TEXT + '"stop":[', '"a"', "]}")),
    "stop_token_ids": (COMPLETIONS, filled(IN_TEXT + '"stop_token_ids":[', "-1", "]}")),
    "logit_bias": (COMPLETIONS, numbered(IN_TEXT + '"logit_bias":{', '"%d":0', "}}", 300_000)),
    "unknown": (COMPLETIONS, numbered(IN_TEXT, '"%x":0', "}", 300_000)),
    "unknown, as many as may be": (COMPLETIONS, numbered(IN_TEXT, '"%x":0', "}", 1000)),
    "messages": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', MESSAGE, "]}")),
    "messages of numbers": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', "0", "]}")),
    "messages, as many as may be": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', MESSAGE, "]}", 29 * 2048)),
    "messages, all wrong": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', '{"role":0}', "]}", 11 * 2048)),
    "parts": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[', f'{{"role":"user","content":[{",".join([PART] * 256)}]}}', "]}"
        ),
    ),
    "parts, as many as may be": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[',
            f'{{"role":"user","content":[{",".join([PART] * 256)}]}}',
            "]}",
            63 * 6800,
        ),
    ),
    "turns of one role, as many as may be": (
        MESSAGES,
        filled(f'{{{MODEL_JSON},"max_tokens":1,"messages":[', MESSAGE, "]}", 29 * 2048),
    ),
    "blocks, as many as may be": (
        MESSAGES,
        filled(
            f'{{{MODEL_JSON},"max_tokens":1,"messages":[',
            f'{{"role":"user","content":[{",".join([PART] * 256)}]}}',
            "]}",
            63 * 6800,
        ),
    ),
    "metadata": (CHAT, numbered(IN_CHAT + '"metadata":{', '"%x":""', "}}", 300_000)),
    "modalities": (CHAT, filled(IN_CHAT + '"modalities":[', '"text"', "]}", 8 * 65_000)),
    "annotations": (
        CHAT,
        filled(f'{{{MODEL_JSON},"messages":[{{"role":"assistant","content":"","annotations":[', "0", "]}]}"),
    ),
    "tools": (RESPONSES, filled(IN_RESPONSE + '"tools":[', "{}", "]}")),
    "include": (RESPONSES, filled(IN_RESPONSE + '"include":[', '"web_search_call.results"', "]}")),
    "input of numbers": (RESPONSES, filled(f'{{{MODEL_JSON},"input":[', "0", "]}")),
    "input, as much as may be": (RESPONSES, filled(f'{{{MODEL_JSON},"input":[', MESSAGE, "]}", 29 * 2048)),
    "items": ("/v1/conversations", filled('{"items":[', MESSAGE, "]}")),
    "tokens": ("/detokenize", filled('{"tokens":[', "200", "]}")),
    "tokens, as many as are counted": ("/detokenize", filled('{"tokens":[', "1", "]}", 2 * MOST_VALUES)),
    "prompt of as many numbers as are counted": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', "0", "]}", 2 * MOST_VALUES),
    ),
    "tokens to locate": ("/v1/prefixes/locate", filled('{"tokens":[', "200", "]}", 4 * CONTEXT - 200)),
    "depth": (CHAT, b'{"messages":' + b"[" * 4_000_000),
    "quotes": (CHAT, b'{"user":"' + b'\\"' * 2_000_000 + b'"}'),
    "empty texts": (CHAT, filled('{"user":[', '""', "]}")),
    "commas and brackets in texts": (CHAT, filled('{"user":[', '"[,[,[,"', "]}")),
    "long text": (
        COMPLETIONS,
        f'{{{MODEL_JSON},"prompt":"{LONG}"}}'.encode(),
    ),
    "long message": (
        CHAT,
        f'{{{MODEL_JSON},"messages":[{{"role":"user","content":"{LONG}"}}]}}'.encode(),
    ),
    "long text, spelt": (
        "/tokenize",
        f'{{"return_token_strs":true,"prompt":"{LONG}"}}'.encode(),
    ),
    "long input": (
        RESPONSES,
        f'{{{MODEL_JSON},"input":"{LONG}"}}'.encode(),
    ),
    "texts to embed": (EMBEDDINGS, filled(f'{{{MODEL_JSON},"input":[', f'"{SHORT}"', "]}", MANY_BYTES)),
    "empty texts to embed": (EMBEDDINGS, filled(f'{{{MODEL_JSON},"input":[', '"a"', "]}", 4 * 1024)),
    "tokens to embed": (
        EMBEDDINGS,
        filled(f'{{{MODEL_JSON},"input":[', f"[{','.join(['9'] * 507)}]", "]}", MANY_BYTES),
    ),
    "texts to rank": (
        "/rerank",
        filled(f'{{{MODEL_JSON},"query":"a","documents":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "texts to compare": (
        "/score",
        filled(f'{{{MODEL_JSON},"text_1":"a","text_2":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "texts to embed for Ollama": (
        "/api/embed",
        filled(f'{{{MODEL_JSON},"input":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "prompts, as many as may be": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', f'"{SHORT * 16}"', "]}", MANY_BYTES),
    ),
    "prompts with bad words": (
        COMPLETIONS,
        filled(PROMPTS + '"bad_words":[', f'"{WORD}"', "]}", 64 * 240),
    ),
    "prompts with biases": (COMPLETIONS, numbered(PROMPTS + '"logit_bias":{', '"%d":0', "}}", 200)),
    "prompts with allowed tokens": (
        COMPLETIONS,
        filled(PROMPTS + '"allowed_token_ids":[', "9", "]}", 2 * 16_000),
    ),
    "prompts of tokens, echoed": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"echo":true,"prompt":[', f"[{','.join(['99'] * 5_000)}]", "]}", 64 * 15_010),
    ),
    "calls, as many as may be": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[',
            f'{{"role":"assistant","tool_calls":[{",".join([CALL] * 128)}]}}',
            "]}",
            72 * 8000,
        ),
    ),
    "choices, as many as may be": (
        CHAT,
        numbered(IN_CHAT + '"structured_outputs":{"choice":[', '"%d"', "]}}", 1024),
    ),
    "a long message, counted": (
        "/v1/messages/count_tokens",
        f'{{{MODEL_JSON},"messages":[{{"role":"user","content":"{LONG}"}}]}}'.encode(),
    ),
    "too long a text": (COMPLETIONS, f'{{{MODEL_JSON},"prompt":"{"a" * 4_000_000}"}}'.encode()),
    "questions": (DECISIONS, filled(f'{{{MODEL_JSON},"input":"Hi","questions":[', QUESTION, "]}")),
    "questions, as many as may be": (
        DECISIONS,
        filled(
            f'{{{MODEL_JSON},"input":"{LONG[:20_000]}","questions":[',
            QUESTION,
            "]}",
            20_000 + 400 * (len(QUESTION) + 1),
        ),
    ),
    "choices": (
        DECISIONS,
        numbered(IN_QUESTIONS, CHOICES % ",".join(f'{{"value":"{i:03}"}}' for i in range(255)), "]}", 16),
    ),
    "long choices": (
        DECISIONS,
        numbered(
            IN_QUESTIONS, CHOICES % ",".join(f'{{"value":"{i}{"a" * 15_000}"}}' for i in range(255)), "]}", 1
        ),
    ),
    "criteria": (
        "/v1/systemone",
        numbered(
            f'{{{MODEL_JSON},"state":{{}},"questions":{{', '"%d":{"type":"noul","instructions":[]}', "}}", 400
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heavy:
    """A body, what the engine answers to it, and a path that is asked for afterwards, with the reply's id in it."""

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)
    reply: str = "ok"
    """The text of each choice, 16 characters a step."""
    num_top: int | None = None
    """The log probabilities of each token; None for none."""
    parser: str = "none"
    """The format of the calls in the reply."""
    then: str = ""


HI = [{"role": "user", "content": "Hi"}]
SPOKEN = 'the Quick brown_fox 12345,\t\u00e9\u4e16\U0001f600(){}"\\\n'
LONG_REPLY = 128 * 1024


def heavy(path: str, also: dict[str, Any] | None = None, **fields: Any) -> Heavy:
    """`also` are the fields of the Heavy itself."""
    return Heavy(path=path, content=orjson.dumps({"model": MODEL, **fields}), **(also or {}))


def chat(also: dict[str, Any] | None = None, **fields: Any) -> Heavy:
    return heavy(CHAT, also, **{"messages": HI, **fields})


def text(**fields: Any) -> Heavy:
    return heavy(COMPLETIONS, **{"prompt": "Hi", **fields})


def tool(schema: Any, number: int = 0) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def required(parser: str, *tools: dict[str, Any], **fields: Any) -> Heavy:
    """A chat that has to call one of these tools, in a format."""
    return chat({"parser": parser}, tools=tools, tool_choice="required", **fields)


def nested(depth: int) -> Any:
    """Lists and objects in each other."""
    value: Any = "a"
    for number in range(depth):
        value = [value] if number % 2 else {"anyOf": value}
    return value


def padded(start: str, part: str, end: str, size: int) -> str:
    """A text of that size, mostly repetitions."""
    room = size - len((start + end).encode())
    return start + part * (room // len(part.encode())) + " " * (room % len(part.encode())) + end


def sent(path: str, start: str, part: str, end: str = '"}') -> Callable[[int], Heavy]:
    """A body of any size, of one part again and again."""
    start = f'{{"model":"{MODEL}",{start}'
    return lambda size: Heavy(path=path, content=padded(start, part, end, size).encode())


def asked(path: str, field: str, entry: Any, **fields: Any) -> Callable[[int], Heavy]:
    """A body with a list of any length, whose entries are made by a function."""
    return lambda number: heavy(path, **{field: [entry(i) for i in range(number)], **fields})


def upload(size: int) -> Heavy:
    part = 'content-disposition: form-data; name="%s"%s\r\n\r\n'
    start = "--x\r\n" + part % ("purpose", "") + "batch\r\n--x\r\n" + part % ("file", '; filename="a"')
    content = padded(start, '{"custom_id":"a"}\n', "\r\n--x--\r\n", size).encode()
    headers = {"content-type": "multipart/form-data; boundary=x"}
    return Heavy(path="/v1/files", content=content, headers=headers)


def cut(part: str, length: int) -> str:
    """Returns a text of that many characters, if a body has room for them."""
    return (part * length)[: min(length, 4_180_000 * len(part) // len(part.encode()))]


def headed(number: int, size: int) -> Heavy:
    """A chat with so many headers of that size; a client sends some of its own."""
    headers = {f"x-{i:05}": "a" * (size - 7) for i in range(number - 4)}
    return Heavy(path=CHAT, content=chat().content, headers=headers)


def turn(number: int) -> dict[str, Any]:
    return {"role": ("user", "assistant")[number % 2], "content": SPOKEN}


def say(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


TEXTS = {
    "a letter": "a",
    "spaces": " ",
    "lines": "\n",
    "digits": "7",
    "marks": "!?",
    "words": "word and ",
    "far letters": "\u4e16",
    "faces": "\U0001f600",
    "all sorts": SPOKEN,
    "special": "<|im_end|>",
    "half special": "<|im_",
}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
SCHEMAS: dict[str, Callable[[int], Any]] = {
    "enum": lambda size: {"enum": [f"{i:012}" for i in range(size // 15)]},
    "properties": lambda size: {
        "properties": {f"{i:010}": {"enum": ["string"]} for i in range(min(2000, size // 33))}
    },
    "required": lambda size: {"required": [f"{i:013}" for i in range(size // 16)]},
    "anyOf": lambda size: {"anyOf": [{"const": f"{i:06}"} for i in range(size // 19)]},
    "pattern": lambda size: {"type": "string", "pattern": padded("", "(a|b)?", "", size - 30)},
    "lengths": lambda size: {
        "anyOf": [{"minLength": 1000 + i, "maxLength": 10_000 + i} for i in range(size // 38)]
    },
    "items": lambda size: {
        "prefixItems": [{"type": "integer", "minimum": 1000 + i} for i in range(size // 34)]
    },
    "description": lambda size: {"type": "string", "description": "a" * (size - 40)},
}


def lark(size: int) -> str:
    number = (size - 99) // 22
    rules = (f'r{i}: "a" r{i + 1} | "b"' for i in range(number))
    return "\n".join(["start: r0", *rules, f'r{number}: "c"'])


def of_schema(make: Callable[[int], Any], size: int) -> Heavy:
    return text(guided_json=make(size - 99))


def of_regex(part: str, size: int) -> Heavy:
    return text(guided_regex=padded("", part, "", size))


def of_prompt(path: str, name: str, part: str, number: int) -> Heavy:
    """A text of so many bytes for each token of the context."""
    content = {"model": MODEL, name: cut(part, number * CONTEXT)}
    return Heavy(path=path, content=orjson.dumps(content))


def of_tools(parser: str, number: int) -> Heavy:
    return required(parser, *(tool({"type": "string"}, i) for i in range(number)))


def of_bad_words(part: str, number: int) -> Heavy:
    return text(bad_words=[cut(part, number)] * 64)


BOUNDS: dict[str, dict[str, Callable[[int], Heavy]]] = {
    "max_body_bytes": {
        "space": sent(CHAT, '"a":1', " ", "}"),
        "digits": sent(CHAT, '"seed":', "9", "}"),
        "digits of a fraction": sent(CHAT, '"top_p":0.', "9", "}"),
        "escapes": sent(CHAT, '"user":"', "\\u0041"),
        "other letters": sent(CHAT, '"user":"', "\u4e16"),
        "instructions": sent(RESPONSES, '"input":"Hi","instructions":"', "word and "),
        "template variable": sent(
            CHAT, '"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{"a":"', "a", '"}}'
        ),
        "a tool's description": sent(
            CHAT,
            '"messages":[{"role":"user","content":"Hi"}],"tools":[{"type":"function","function":{"name":"f","description":"',
            "word ",
            '"}}]}',
        ),
        "arguments": sent(
            CHAT,
            '"messages":[{"role":"user","content":"Hi"},{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{',
            '\\"a\\":1,',
            '}"}}]}]}',
        ),
        "lines of a batch": sent(
            "/v1/messages/batches",
            '"requests":[',
            '{"custom_id":"a","params":{"a":1}},',
            '{"custom_id":"b","params":{}}]}',
        ),
        "not JSON": sent(CHAT, "", "a", ""),
    },
    "max_upload_bytes": {"lines": upload},
    "max_header_bytes": {
        "long": lambda size: headed(8, size // 4 - 99),
        "many": lambda size: headed(84, size // 80 - 4),
    },
    "max_headers": {"short": lambda number: headed(number, 10)},
    "max_json_depth": {
        "tool": lambda depth: chat({"parser": "hermes"}, tools=[tool(nested(depth - 6))]),
        "variable": lambda depth: chat(chat_template_kwargs={"a": nested(depth - 2)}),
    },
    "max_json_containers": {
        "parts": lambda number: chat(messages=say([{"type": "text", "text": "a"}] * 7) * (number // 9))
    },
    "max_json_strings": {
        "tool": lambda number: required("hermes", tool({"enum": [str(i) for i in range(number - 25)]}))
    },
    "max_json_values": {
        "tool": lambda number: required("hermes", tool({"enum": list(range(10**6, 10**6 + number - 11))})),
        "tokens": lambda number: heavy("/detokenize", tokens=list(range(10**6, 10**6 + number - 1))),
    },
    "max_json_members": {
        "tool": lambda number: required(
            "hermes",
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {f"p{i}": {"type": "string"} for i in range(number)},
                    },
                },
            },
        ),
        "variables": lambda number: chat(chat_template_kwargs={"a": {f"p{i}": i for i in range(number)}}),
    },
    "max_messages": {
        **{
            path: asked(path, "messages", turn)
            for path in (
                CHAT,
                "/api/chat",
                "/tokenize",
                "/apply-template",
                "/v1/prefixes/locate",
                "/v1/chat/completions/render",
            )
        },
        **{
            path: asked(path, "messages", turn, max_tokens=9)
            for path in (MESSAGES, "/v1/messages/count_tokens")
        },
        **{path: asked(path, "input", turn) for path in (RESPONSES, "/v1/responses/input_tokens")},
    },
    "max_content_parts": {
        CHAT: lambda number: chat(messages=say([{"type": "text", "text": "word"}] * number) * 60),
        MESSAGES: lambda number: heavy(
            MESSAGES, max_tokens=9, messages=say([{"type": "text", "text": "word"}] * number) * 60
        ),
        RESPONSES: lambda number: heavy(
            RESPONSES, input=say([{"type": "input_text", "text": "word"}] * number) * 60
        ),
        "/infill": asked(
            "/infill",
            "input_extra",
            lambda i: {"filename": f"{i}.py", "text": SPOKEN * 8},
            input_prefix="a",
            input_suffix="b",
        ),
    },
    "max_tools": {
        **{f"required, {name}": partial(of_tools, name) for name in TOOL_FORMATS},
        "said": lambda number: chat(
            {"parser": "hermes"}, tools=[tool(SCHEMAS["enum"](1000), i) for i in range(number)]
        ),
        "strict": lambda number: required(
            "qwen3_coder", *(tool(SCHEMAS["properties"](400), i) for i in range(number))
        ),
    },
    "max_tool_calls": {
        CHAT: lambda number: chat(
            messages=[*HI, {"role": "assistant", "tool_calls": [CALLED] * number}] * 90
        ),
        "/api/chat": lambda number: heavy(
            "/api/chat",
            messages=[
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}] * number,
                },
            ]
            * 50,
        ),
    },
    "max_template_variables": {
        "long": lambda number: chat(chat_template_kwargs={f"v{i}": "a" * 99_999 for i in range(number)})
    },
    "max_prompts": {
        "texts": asked(COMPLETIONS, "prompt", lambda _: SPOKEN * 800, max_tokens=1),
        "tokens": asked(COMPLETIONS, "prompt", lambda _: [9] * 8_000, max_tokens=1),
        "rendered": asked("/v1/completions/render", "prompt", lambda _: [9] * 8_000, max_tokens=1),
    },
    "max_inputs": {
        **{path: asked(path, "input", lambda i: f"{i} {SPOKEN * 20}") for path in (EMBEDDINGS, "/api/embed")},
        "/rerank": asked("/rerank", "documents", lambda i: f"{i} {SPOKEN * 20}", query="a"),
        "/score": asked("/score", "text_2", lambda i: f"{i} {SPOKEN * 20}", text_1="a"),
    },
    "max_branches": {
        "choices": lambda number: heavy(
            DECISIONS,
            input="Hi",
            questions=[
                {
                    "type": "choice",
                    "name": str(i),
                    "instructions": "",
                    "choices": [{"value": f"{j:02}"} for j in range(100)],
                }
                for i in range(number // 101)
            ],
        )
    },
    "max_choices": {
        "n": lambda number: chat(n=number, logit_bias={str(i): 1 for i in range(300)}),
        "best_of": lambda number: text(best_of=number, max_tokens=9),
    },
    "max_beams": {"n": lambda number: text(use_beam_search=True, n=number)},
    "max_stop": {"stop": lambda number: text(stop=[f"{i:0256}" for i in range(number)])},
    "max_stop_chars": {"stop": lambda number: text(stop=["a" * number] * 16)},
    "max_stop_token_ids": {"ids": lambda number: text(stop_token_ids=list(range(number)))},
    "max_logit_bias": {
        "map": lambda number: text(prompt=["a"] * 64, logit_bias={str(i): 1 for i in range(number)}),
        "pairs": lambda number: heavy(
            "/completion", prompt=["a"] * 64, logit_bias=[[i, False] for i in range(number)]
        ),
    },
    "max_bad_words": {"words": lambda number: text(prompt=["a"] * 64, bad_words=[cut(SPOKEN, 256)] * number)},
    "max_bad_word_chars": {name: partial(of_bad_words, part) for name, part in TEXTS.items()},
    "max_allowed_token_ids": {"ids": lambda number: text(prompt=["a"] * 64, allowed_token_ids=[9] * number)},
    "max_metadata": {
        CHAT: lambda number: chat(store=True, metadata={f"{i:064}": "a" * 512 for i in range(number)}),
        RESPONSES: lambda number: heavy(
            RESPONSES, input="Hi", metadata={f"{i:064}": "a" * 512 for i in range(number)}
        ),
    },
    "max_grammar_bytes": {
        **{f"schema, {name}": partial(of_schema, make) for name, make in SCHEMAS.items()},
        **{
            f"regex, {part}": partial(of_regex, part)
            for part in ("a", "(a|b)?", "[a-z]{1,9}", "(x+x+)+y", ".{0,999}", "(a|(b|(c|d)))*")
        },
        "Lark, rules": lambda size: text(guided_grammar=lark(size)),
        "Lark, text": lambda size: text(guided_grammar=padded('start: "', "a", '"', size)),
        "GBNF": lambda size: text(grammar=padded('root ::= "a" ', '| "b" ', "", size)),
    },
    "max_grammar_choices": {
        "choices": lambda number: text(guided_choice=[f"{i:056}" for i in range(number)])
    },
    "max_top_logprobs": {
        CHAT: lambda number: chat(
            {"reply": SPOKEN * 800, "num_top": number}, logprobs=True, top_logprobs=number, store=True
        ),
        "prompt": lambda number: text(prompt="a " * 20_000, prompt_logprobs=number),
    },
    "max_logprobs": {
        "one choice": lambda number: chat(
            {"reply": "a" * (number // 21), "num_top": 20},
            logprobs=True,
            top_logprobs=20,
            max_completion_tokens=number // 21,
        )
    },
    "max_bytes_per_token": {
        **{name: partial(of_prompt, COMPLETIONS, "prompt", part) for name, part in TEXTS.items()},
        **{
            path: partial(of_prompt, path, name, "word and ")
            for path, name in (
                ("/tokenize", "prompt"),
                ("/completion", "prompt"),
                (EMBEDDINGS, "input"),
                (RESPONSES, "input"),
            )
        },
    },
}
"""For every bound its bodies: with as much as it allows, and with more."""
FOR_ALL = {"max_bodies_bytes"}
"""The bounds on all bodies together."""


def calling(parser: str, part: str, fields: dict[str, Any]) -> Heavy:
    """A chat whose reply is one part again and again, in a format of calls."""
    also = {"reply": part * (LONG_REPLY // len(part)), "parser": parser}
    return chat(also, tools=[tool({"type": "string"})], **fields)


def kept(path: str, then: str, fields: dict[str, Any], also: dict[str, Any]) -> Heavy:
    """A long reply that is asked for again."""
    headers = {RESUMABLE_HEADER: "true"} if path == MESSAGES or "starting" in then else {}
    return heavy(
        path, {"reply": "word and " * (LONG_REPLY // 9), "then": then, "headers": headers, **also}, **fields
    )


STREAMED, LOGPROBS = {"stream": True}, {"num_top": 20, "reply": "word and " * 850}
REPLIES: dict[str, Callable[[], Heavy]] = {
    "long text that is cut, /api/embed": partial(of_prompt, "/api/embed", "input", SPOKEN, 16),
    "long text that is cut, /api/generate": partial(of_prompt, "/api/generate", "prompt", SPOKEN, 16),
    **{
        f"calls, {name}, {how}, {way}": partial(calling, name, part, fields)
        for name, written in WRITTEN.items()
        for how, part in (("many", written), ("broken", written[: len(written) // 2]))
        for way, fields in (("whole", {}), ("streamed", STREAMED))
    },
    **{
        f"long reply, {name}": partial(kept, path, then, fields, also)
        for name, path, then, fields, also in (
            ("stored chat", CHAT, f"{CHAT}/{{id}}", {"messages": HI, "store": True}, {}),
            ("stored stream", CHAT, f"{CHAT}/{{id}}", {"messages": HI, "store": True, **STREAMED}, {}),
            (
                "stored log probabilities",
                CHAT,
                f"{CHAT}/{{id}}",
                {"messages": HI, "store": True, "logprobs": True, "top_logprobs": 20},
                LOGPROBS,
            ),
            ("followed chat", CHAT, f"{CHAT}/{{id}}?starting_after=-1", {"messages": HI, **STREAMED}, {}),
            ("followed message", MESSAGES, f"{MESSAGES}/{{id}}", {"messages": HI, "max_tokens": 99_999}, {}),
            ("followed response", RESPONSES, f"{RESPONSES}/{{id}}?stream=true", {"input": "Hi"}, {}),
            (
                "followed log probabilities",
                RESPONSES,
                f"{RESPONSES}/{{id}}?stream=true",
                {"input": "Hi", "top_logprobs": 20, "include": ["message.output_text.logprobs"]},
                LOGPROBS,
            ),
            ("Ollama", "/api/chat", "", {"messages": HI}, {}),
            ("choices", CHAT, "", {"messages": HI, "n": 128, **STREAMED}, {"reply": "word and " * 100}),
        )
    },
}


def bodies() -> dict[str, Callable[[], Heavy]]:
    """Returns all of them, by name."""
    limits = Limits()
    return {
        **{name: partial(Heavy, path=path, content=content) for name, (path, content) in CORPUS.items()},
        **{
            f"{bound}, {name}{', and more' if is_more else ''}": partial(
                make, most + is_more * (1 + most // 64)
            )
            for bound, makes in BOUNDS.items()
            for most in (getattr(limits, bound),)
            for name, make in makes.items()
            for is_more in (False, True)
        },
        **REPLIES,
    }
