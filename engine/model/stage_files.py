"""The tensors of a checkpoint as a stage sees them: its own, under the names that its own layers have."""

from __future__ import annotations

from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import expected_shapes
from penstock.engine.quant.storages.names import LAYERS
from penstock.engine.spec import ModelSpec


class StageFiles(TensorFiles):
    """The files of a checkpoint with the tensors of a stage, under the names that its own layers have."""

    def __init__(self, files: TensorFiles, config: ModelConfig) -> None:
        self._names = {name: _name_in_model(name, config.spec) for name in expected_shapes(config)}
        entries = {name: files.entries[whole] for name, whole in self._names.items()}
        super().__init__(files.path, entries, lambda name: files.own_name(self._names[name]))
        self._files = files

    def give_back(self) -> None:
        self._files.give_back()

    def read(self, name: str) -> Tensor:
        return self._files.read(self._names[name])


def _name_in_model(name: str, spec: ModelSpec) -> str:
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{spec.first_layer + int(number)}.{rest}"
