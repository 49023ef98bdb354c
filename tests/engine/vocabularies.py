"""Two small tokenizers, made on the spot.

Byte-level BPE as Llama 3 and Qwen have it, and metaspace with byte fallback as Llama 2 and Mistral have it.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "the river turns the wheel and the wheel turns the mill",
    "Wörter mit Umlauten, 日本語のテキスト, עברית, и немного по-русски",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and e\u0301 combining a\u0308\u0323 marks",
    "a b c 0 1 2 3 !? the the the quick quick brown fox",
]
SPECIAL = ["<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]


@cache
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["[plain]"])
    return str(tokenizer.to_str())


@cache
def metaspace_json() -> str:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = sorted({f"▁{word}" for line in TEXT for word in line.split() if word.isascii()})
    tokens += ["▁", *(character for word in words for character in word[1:]), *words]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
            merges.append((word[: end - 1], word[end - 1]))
    model = models.BPE(
        vocab=vocabulary,
        merges=list(dict.fromkeys(merges)),
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return str(tokenizer.to_str())
