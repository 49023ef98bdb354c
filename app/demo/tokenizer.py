"""The tokenizer: byte-level BPE with single digits, four special tokens for the turns, and the chat template."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 3072
BOS, END = "<|bos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [BOS, END, *ROLES.values()]

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{%- if role not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('this model knows no role ' ~ role) }}"
    "{%- endif %}"
    "{{- '<|' ~ role ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' }}"
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
    """Ids of plain text."""
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
