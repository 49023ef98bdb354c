"""The tokenizer: byte-level BPE with single digits, four special tokens for the turns, and the chat template."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 3072
BOS, END = "<|bos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [BOS, END, *ROLES.values()]

TOOLS_INTRODUCTION = "You can call these tools:"
CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"
RESULT_START, RESULT_END = "<tool_response>\n", "\n</tool_response>"

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set ns = namespace(rest=messages) %}"
    "{%- if tools %}"
    "{{- '<|system|>' }}"
    "{%- if messages and messages[0]['role'] in ['system', 'developer'] %}"
    "{{- (messages[0]['content'] | trim) ~ '\\n\\n' }}"
    "{%- set ns.rest = messages[1:] %}"
    "{%- endif %}"
    f"{{{{- '{TOOLS_INTRODUCTION}' }}}}"
    "{%- for tool in tools %}"
    "{%- set parameters = (tool['function']['parameters'] or {})['properties'] or {} %}"
    "{{- '\\n' ~ tool['function']['name'] ~ '(' ~ (parameters | join(', ')) ~ ')' }}"
    "{%- if tool['function']['description'] %}{{- ': ' ~ (tool['function']['description'] | trim) }}{%- endif %}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endif %}"
    "{%- for message in ns.rest %}"
    "{%- set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{%- set content = (message['content'] or '') | trim %}"
    "{%- if role == 'tool' %}"
    "{{- '<|user|><tool_response>\\n' ~ content ~ '\\n</tool_response>' }}"
    "{%- elif role in ['system', 'user', 'assistant'] %}"
    "{{- '<|' ~ role ~ '|>' ~ content }}"
    "{%- else %}"
    "{{- raise_exception('this model knows no role ' ~ role) }}"
    "{%- endif %}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' if content or not loop.first }}"
    "{{- '<tool_call>\\n{\"name\": ' ~ (call['function']['name'] | tojson) ~ ', \"arguments\": ' }}"
    "{{- (call['function']['arguments'] | tojson) ~ '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

Message = tuple[str, str]  # role, content


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, special_id(tokenizer, BOS))]
    )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, f"{token} is not in the vocabulary"
    return number


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of plain text, where the name of a special token is text, as the server reads it."""
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """The ids of a finished conversation, and which of them the model is taught to say."""
    ids, said = [special_id(tokenizer, BOS)], [False]
    end = special_id(tokenizer, END)
    for role, content in messages:
        body = [*encode_text(tokenizer, content), end]
        ids += [special_id(tokenizer, ROLES[role]), *body]
        said += [False, *([role == "assistant"] * len(body))]
    return ids, said
