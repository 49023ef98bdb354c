"""The files of sentence-transformers decide how a checkpoint's embeddings are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import CheckpointError
from penstock.engine.planning.embedding import Embedding, read_embedding
from penstock.engine.planning.params import Pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def written(path: Path, modules: Any, pooling: Any) -> Path:
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return path


def test_a_plain_decoder_has_its_last_token_normalised(tmp_path: Path) -> None:
    assert read_embedding(tmp_path, 8) == Embedding(8, Pooling.LAST, is_normalised=True)
    assert read_embedding(tmp_path / "model.gguf", 8) == Embedding(8, Pooling.LAST, is_normalised=True)


@pytest.mark.parametrize(
    ("asked", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, Pooling.FIRST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_files_decide(tmp_path: Path, asked: Any, pooling: Pooling, is_normalised: bool) -> None:
    modules = [TRANSFORMER, POOLING, *([NORMALIZE] if is_normalised else [])]
    assert read_embedding(written(tmp_path, modules, asked), 8) == Embedding(8, pooling, is_normalised)


@pytest.mark.parametrize(
    ("modules", "asked", "said"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode": "mean"}, "modules of type Dense are not supported"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling by max_tokens is not supported"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling by cls_token and mean_tokens is not supported",
        ),
        ([TRANSFORMER, POOLING], {}, "pooling by nothing is not supported"),
        ([TRANSFORMER, POOLING], [], "holds no JSON object"),
        ({}, {}, "holds no list of modules"),
        ([3], {}, "holds no list of modules"),
        ([{"path": ""}], {}, "type"),
    ],
)
def test_what_is_not_supported_is_said_in_a_line(tmp_path: Path, modules: Any, asked: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        read_embedding(written(tmp_path, modules, asked), 8)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
