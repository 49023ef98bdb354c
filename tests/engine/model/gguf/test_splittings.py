"""The names of pre-tokenizers in GGUF files, and published vocabularies: ids are those of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from penstock.engine.model.gguf.tokenizer import SPLITTINGS, read_tokenizer
from tests.engine.model.gguf.test_tokenizer import PRE

WORLD = Path(__file__).parents[4].parent / "shared" / "world" / "vocab"
SAME = {
    "gpt-2": "phi-2 olmo mpt exaone4 a.x-4.0 mellum trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "llama-bpe": "llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2",
    "deepseek-r1-qwen": "megrez kormo f2llmv2 hunyuan solar-open",
    "dbrx": "smaug-bpe chatglm-bpe",
    "gpt-4o": "llama4 minimax-m2",
    "hunyuan-dense": "deepseek-v3",
}
"""Names that stand for the same in llama.cpp."""

SAMPLE = "HTTPServer's 12345 नमस्ते,\nÇa水が5!/\n\n  x"
PIECES = {
    "qwen2": "HTTPServer|'s| |1|2|3|4|5| नमस|्त|े,\n|Ça水が|5|!/\n\n| | x",
    "hunyuan": "HTTPServer|'s| |1|2|3|4|5| नमस|्त|े,\n|Ça水が|5|!/\n\n| | x",
    "qwen35": "HTTPServer|'s| |1|2|3|4|5| नमस्ते|,\n|Ça水が|5|!/\n\n| | x",
    "ufakzeka": "HTTPServer|'s| |1|2|3|4|5| नमस|्त|े,\n|Ça水が|5|!/\n\n| | x",
    "lfm2": "HTTPServer|'s| |123|45| नमस|्त|े,\n|Ça水が|5|!/\n\n| | x",
    "llama4": "HTTPServer's| |123|45| नमस्ते|,\n|Ça水が|5|!/\n\n| | x",
    "kimi-k2": "HTTPServer's| |123|45| नमस्ते|,\n|Ça|水|が|5|!/\n\n| | x",
    "tiny_aya": "HTTPServer's| |12|345| नमस्ते|,\n|Ça水が|5|!/\n\n| | x",
    "deepseek-llm": "HTTPServer|'|s| |12345| |नमस्ते|,|\n|Ç|a|水が|5|!/|\n|\n| | x",
    "deepseek-coder": "HTTPServer|'|s| |1|2|3|4|5| |नमस|्|त|े|,|\n|Ça|水が|5|!/|\n|\n| | x",
    "deepseek-v3": "HTTPServer|'s| |123|45| नमस्ते|,\n|Ça|水が|5|!/\n\n| | x",
    "viking": "HTTPServer's| |1|2|3|4|5| नमस्ते|,\n|Ça水が|5|!|/|\n\n | x",
    "superbpe": "HTTPServer's |12|345| नमस्ते,\nÇa水が|5|!/\n\n  x",
}
"""What llama.cpp's expressions cut the sample into."""


@pytest.mark.parametrize("pre", PIECES)
def test_a_text_is_cut_where_llama_cpp_cuts_it(pre: str) -> None:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITTINGS[pre].patterns]
    pieces = [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(SAMPLE)]
    assert pieces == PIECES[pre].split("|")


def test_a_contraction_is_a_piece_where_llama_cpp_has_it_so() -> None:
    """Turkish puts an apostrophe before the endings of names."""
    for pre, pieces in (("hunyuan", ["Van", "'d", "en"]), ("ufakzeka", ["Van", "'den"])):
        cut = pre_tokenizers.Split(Regex(*SPLITTINGS[pre].patterns), "isolated")
        assert [piece for piece, _ in cut.pre_tokenize_str("Van'den")] == pieces


def test_every_name_is_one_of_those_that_were_compared() -> None:
    same = {name: first for first, names in SAME.items() for name in names.split()}
    assert all(SPLITTINGS[name] == SPLITTINGS[first] for name, first in same.items())
    assert SPLITTINGS.keys() == {*PRE, *PIECES, *SAME, *same, "default"}
    assert {name for name, splitting in SPLITTINGS.items() if splitting.adds_bos} == {
        *("llama-bpe", "tekken"),
        *SAME["llama-bpe"].split(),
    }
    assert {name for name, splitting in SPLITTINGS.items() if splitting.has_whole_words} == {
        *("llama-bpe", "tekken", "glm4", "minicpm5"),
        *SAME["llama-bpe"].split(),
    }


@pytest.mark.skipif(not WORLD.is_dir(), reason="no published vocabularies lie beside the repository")
@pytest.mark.parametrize("path", sorted(WORLD.glob("*.gguf")), ids=lambda path: path.stem)
def test_published_vocabularies_give_the_ids_of_llama_cpp(path: Path) -> None:
    found = read_tokenizer(path)
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert len(expected) > 40
    # Some lists of texts end in an empty one without ids.
    for text, ids in zip(texts, expected, strict=False):
        assert found.encode(text) == ids, text
        assert found.decode(ids).lstrip() == text.lstrip()
    for token_id in found.special_ids:
        marker = found.decode([token_id], skip_special=False)
        assert found.encode(marker, parse_special=True) == [token_id], marker
        assert not found.special_ids & set(found.encode(f"a{marker}b")), marker
