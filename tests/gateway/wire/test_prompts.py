"""From messages to tokens: as transformers does it, and never a special token from a user."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.gateway.errors import ApiError
from penstock.gateway.wire.prompts import Prompts
from tests.gateway.harness import SPECIAL, TEMPLATE, Gateway, client, make_tokenizer

TOKENIZER = make_tokenizer()
PROMPTS = Prompts(TOKENIZER)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def render(template: str, messages: list[dict[str, Any]]) -> str:
    prompts = Prompts(make_tokenizer(template))
    return TOKENIZER.decode(prompts.chat(messages), skip_special=False)


def test_a_conversation_becomes_the_templates_tokens() -> None:
    messages = [*user(" Hi "), {"role": "assistant", "content": "Ho"}]
    expected = "<|bos|><|user|>Hi<|end|><|assistant|>Ho<|end|><|assistant|>"
    assert PROMPTS.chat(messages) == TOKENIZER.encode(expected, parse_special=True)
    assert PROMPTS.chat(messages, add_generation_prompt=False)[-1] == TOKENIZER.id_of("<|end|>")


@given(st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "end", " ", "\ufdd0", "é", "x"]), max_size=12))
def test_no_content_becomes_a_special_token(pieces: list[str]) -> None:
    content = "".join(pieces)
    ids = PROMPTS.chat(user(content))
    frame = PROMPTS.chat(user(""))
    assert [i for i in ids if i in TOKENIZER.special_ids] == frame
    said = content.strip().replace("\ufdd0", "\ufffd")
    text = TOKENIZER.decode([i for i in ids if i not in TOKENIZER.special_ids])
    assert text == said


@given(st.text())
def test_plain_prompts_never_have_special_tokens_but_the_first(text: str) -> None:
    ids = PROMPTS.text(text)
    assert ids[0] == TOKENIZER.id_of("<|bos|>")
    assert not TOKENIZER.special_ids & set(ids[1:])


@given(st.integers(-9, 9), st.integers(-9, 9), st.sampled_from(["<|end|>", "x<|end|><|user|>y", "<|<|end|>"]))
def test_a_template_that_cuts_texts_makes_no_special_token(start: int, stop: int, content: str) -> None:
    cut = "{% for m in messages %}{{ m.content[START:] }}-{{ m.content[:STOP] }}{% endfor %}"
    prompts = Prompts(make_tokenizer(cut.replace("START", str(start)).replace("STOP", str(stop))))
    assert not TOKENIZER.special_ids & set(prompts.chat(user(content)))


def test_blocks_leave_no_lines_behind() -> None:
    template = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert render(template, user("x")) == "x\n"


def test_loop_controls_json_dates_and_generation_blocks() -> None:
    template = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}said{% endgeneration %} {{ strftime_now('%Y') }}"
    )
    text = render(template, [*user("<é>"), {"role": "assistant", "content": "no"}])
    assert text.startswith(json.dumps({"role": "user", "content": "<é>"}, ensure_ascii=False) + "said ")
    assert int(text[-4:]) >= datetime(2024, 1, 1).year


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[99].content.x }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'x' }}",
    ],
)
def test_a_template_that_fails_is_a_400(template: str) -> None:
    with pytest.raises(ApiError) as error:
        Prompts(make_tokenizer(template)).chat(user("x"))
    assert (error.value.status, error.value.param) == (400, "messages")


def test_renders_what_transformers_renders() -> None:
    template = make_tokenizer().chat_template
    messages = [{"role": "system", "content": " Be\nbrief. "}, *user("Ünï\n\n code"), *user("")]
    rendered, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<|bos|>"
    )
    assert PROMPTS.chat(messages) == TOKENIZER.encode(rendered[0], parse_special=True)


@pytest.mark.anyio
async def test_tokenize_and_detokenize_are_inverses() -> None:
    async with client(Gateway().app) as http:
        reply = (await http.post("/tokenize", json={"prompt": "Ünï", "return_token_strs": True})).json()
        assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == 6
        assert reply["max_model_len"] == 512
        back = await http.post("/detokenize", json={"tokens": reply["tokens"][1:]})
        assert back.json() == {"prompt": "Ünï"}
        bare = await http.post("/tokenize", json={"prompt": "Ünï", "add_special_tokens": False})
        assert bare.json()["tokens"] == reply["tokens"][1:]
        chat = await http.post("/tokenize", json={"messages": user("Hi")})
        assert chat.json()["tokens"] == PROMPTS.chat(user("Hi"))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": user("x")}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "x" * 9000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [9] * 513}, "tokens"),
        ("/detokenize", {"tokens": [10_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_tokenize_names_what_is_wrong(path: str, body: dict[str, Any], param: str) -> None:
    async with client(Gateway().app) as http:
        response = await http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


@pytest.mark.anyio
async def test_long_prompts_are_tokenised_off_the_loop() -> None:
    gateway = Gateway()
    gateway.engine.max_sequence_tokens = 200_000
    seen: list[str] = []
    encode = gateway.service.tokenizer.encode

    def spy(*args: Any, **kwargs: Any) -> list[int]:
        seen.append(threading.current_thread().name)
        return encode(*args, **kwargs)

    gateway.service.tokenizer.encode = spy  # type: ignore[method-assign]
    async with client(gateway.app) as http:
        for length in (10, 40_000):
            assert (await http.post("/tokenize", json={"prompt": "x" * length})).status_code == 200
    assert seen[0] == "MainThread"
    assert seen[1] != "MainThread"


@pytest.mark.parametrize("knows", [False, True])
def test_a_developer_is_the_system_where_the_template_knows_no_other(knows: bool) -> None:
    template = TEMPLATE.replace("{{- bos_token }}", "{{- bos_token }}{# developer #}") if knows else TEMPLATE
    tokenizer = make_tokenizer(template)
    token_ids = Prompts(tokenizer).chat([{"role": "developer", "content": "Be brief."}])
    said = tokenizer.decode(token_ids, skip_special=False)
    assert said.startswith("<|bos|><|system|>Be brief." if not knows else "<|bos|><|developer|>Be brief.")
