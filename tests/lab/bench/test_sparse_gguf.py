"""The GGUF file that other servers are compared by is one that the engine takes."""

from __future__ import annotations

from pathlib import Path

from engine.config import LoadOptions
from engine.model.checkpoint import read_config
from engine.model.files import open_files
from engine.model.stacks import unstacked
from engine.model.tensors import check_tensors, make_recipe
from engine.spec import Experts
from lab.bench.sparse_files import SparseShape
from lab.bench.sparse_gguf import write_sparse_gguf

SHAPE = SparseShape("tiny", 64, 2, 4, 2, 16, 4, 2, 32, 512)


def test_it_has_all_tensors_of_its_description(tmp_path: Path) -> None:
    path = write_sparse_gguf(SHAPE, tmp_path / "tiny.gguf")
    config = read_config(path)
    files = unstacked(open_files(path), config)
    check_tensors(config, files, make_recipe(config, LoadOptions(), files))
    experts = config.layers[1].feed_forward
    assert isinstance(experts, Experts)
    assert (experts.inner_size, experts.router.num_experts, experts.router.top_k) == (32, 4, 2)
