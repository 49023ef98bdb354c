"""Random layers of multi-token prediction in checkpoints, and what such a layer says, composed of transformers' parts.

transformers leaves the tensors of these layers out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engine.families import STATES


class Layer(nn.Module):
    """A layer by the names that its tensors have behind "mtp."."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        config, inner = model.config, model.model
        norm, hidden = type(inner.norm), config.hidden_size
        self.pre_fc_norm_embedding = norm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([type(inner.layers[-1])(config, config.num_hidden_layers - 1)])
        self.norm = norm(hidden, eps=config.rms_norm_eps)
        self._rotary = [inner.rotary_emb]

    def forward(self, embedded: Tensor, features: Tensor) -> Tensor:
        """[T, hidden] behind the last norm; row i reads token i and the features of the token before it."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)), -1))
        positions = torch.arange(len(x))[None]
        turned = self._rotary[0](x[None], positions)
        made: Tensor = self.norm(self.layers[0](x[None], position_embeddings=turned, position_ids=positions))
        return made[0]


def add_prediction(folder: Path, seed: int = 0) -> Path:
    """Adds a layer to the checkpoint of a model that can have one."""
    path = folder / "model.safetensors"
    torch.manual_seed(seed)
    layer = Layer(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        for parameter in layer.parameters():
            is_norm = parameter.dim() == 1
            nn.init.normal_(parameter, 0.0, 0.2 if is_norm else 2.0 / parameter.shape[-1] ** 0.5)
    own = {f"mtp.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file({**load_file(path), **own}, path, {"format": "pt"})
    with_entries(folder, mtp_num_hidden_layers=1)
    return folder


def with_entries(folder: Path, **entries: object) -> None:
    """Changes config.json."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **entries}
    path.write_text(json.dumps(config), encoding="utf-8")


def without_tensors(folder: Path, *names: str) -> None:
    """Takes the tensors out of a checkpoint whose names begin so."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith(names)}, path)


def make_predicting(family: str, folder: Path, **overrides: Any) -> Path:
    """A tiny random model of a family of STATES, with a layer that drafts."""
    return add_prediction(STATES[family].make(folder, **overrides))


class ReferencePrediction:
    """A checkpoint with such a layer in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._layer = Layer(self._model)
        tensors = load_file(folder / "model.safetensors")
        own = {
            name.removeprefix("mtp."): tensor for name, tensor in tensors.items() if name.startswith("mtp.")
        }
        self._layer.load_state_dict(own)
        self._known: list[tuple[list[int], Tensor]] = []

    def features(self, token_ids: list[int]) -> Tensor:
        """[T, hidden] of the model behind its last norm, as they are kept: bfloat16. Longer sequences come first."""
        for known, features in self._known:
            if known[: len(token_ids)] == token_ids:
                return features[: len(token_ids)]
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([token_ids])).last_hidden_state[0]
        self._known.append((token_ids, hidden.bfloat16().float()))
        return self._known[-1][1]

    @torch.inference_mode()
    def hidden(self, token_ids: list[int], features: Tensor) -> Tensor:
        """[T, hidden] of tokens, each beside the features of the one before it."""
        made: Tensor = self._layer(self._model.get_input_embeddings()(torch.tensor(token_ids)), features)
        return made

    @torch.inference_mode()
    def logits(self, token_ids: list[int], features: Tensor, drafts: list[int]) -> Tensor:
        """[len(drafts) + 1, vocab]: of what follows the known tokens, and of what follows each draft.

        Args:
            features: of the known tokens but the last.
        """
        found = []
        for number in range(len(drafts) + 1):
            hidden = self.hidden([*token_ids, *drafts[:number]][1:], features)[-1:]
            features = torch.cat((features, hidden))
            found.append(self._model.get_output_embeddings()(hidden)[0])
        return torch.stack(found)
