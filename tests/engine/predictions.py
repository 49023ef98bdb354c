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

from tests.engine.families import SPARSE, STATES
from tests.engine.gguf_files import KINDS, stacked_experts, write_family
from tests.engine.gguf_states import KINDS as STATE_KINDS
from tests.engine.gguf_states import write_state_family

_BEHIND = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
"""DeepSeek's names, which GLM has and GGUF files have for all, by those of Qwen."""


class Layer(nn.Module):
    """A layer by the names that Qwen's tensors have behind "mtp."."""

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
        for buffer in layer.buffers():
            nn.init.uniform_(buffer, -0.1, 0.1)
    tensors, config = load_file(path), read_entries(folder)
    own = {_name(name, config): tensor for name, tensor in layer.state_dict().items()}
    if is_behind(config):  # such checkpoints have experts one by one, and what is shared once more
        own = one_by_one(own)
        prefix = f"model.layers.{config['num_hidden_layers']}."
        own[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **own}, path, {"format": "pt"})
    with_entries(folder, **{"num_nextn_predict_layers" if is_behind(config) else "mtp_num_hidden_layers": 1})
    return folder


def is_behind(config: dict[str, Any]) -> bool:
    """Whether a model's layer lies behind its others, and not by itself."""
    return config["model_type"] in ("glm4_moe", "deepseek_v3", "glm4_moe_lite")


def _name(name: str, config: dict[str, Any]) -> str:
    """The checkpoint's name of a tensor of Layer."""
    return name_behind(name, config) if is_behind(config) else f"mtp.{name}"


def name_behind(name: str, config: dict[str, Any]) -> str:
    """DeepSeek's name of a tensor of Layer."""
    module = next(module for module in _BEHIND if name.startswith(module))
    return f"model.layers.{config['num_hidden_layers']}.{_BEHIND[module]}{name.removeprefix(module)}"


def read_entries(folder: Path) -> dict[str, Any]:
    """Reads config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with a linear map of its own for each expert of a layer."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, map = name.partition(".experts.")
        if map not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        maps = ("gate_proj", "up_proj") if map == "gate_up_proj" else (map,)
        for own, part in zip(maps, tensor.chunk(len(maps), 1), strict=True):
            found |= {f"{prefix}.experts.{i}.{own}.weight": one.clone() for i, one in enumerate(part)}
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `one_by_one` took apart."""
    found = stacked_experts(tensors)
    for name in [name for name in found if name.endswith(".experts.gate_proj.weight")]:
        prefix = name.removesuffix("gate_proj.weight")
        gates_and_ups = [found.pop(f"{prefix}{map}_proj.weight") for map in ("gate", "up")]
        found[f"{prefix}gate_up_proj"] = torch.cat(gates_and_ups, 1)
        found[f"{prefix}down_proj"] = found.pop(f"{prefix}down_proj.weight")
    return found


def write_predicting(folder: Path, path: Path) -> Path:
    """Writes a model with such a layer as llama.cpp's converter does: behind the model's others."""
    tensors, config = load_file(folder / "model.safetensors"), read_entries(folder)
    renamed = {
        name_behind(name.removeprefix("mtp."), config) if name.startswith("mtp.") else name: tensor
        for name, tensor in one_by_one(tensors).items()
    }
    shared = (".embed_tokens.weight", ".shared_head.head.weight")
    kept = {
        name: tensor for name, tensor in renamed.items() if not ("layers" in name and name.endswith(shared))
    }
    longer = path.parent / "longer"
    longer.mkdir()
    save_file(kept, longer / "model.safetensors")
    text = json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1})
    (longer / "config.json").write_text(text, encoding="utf-8")
    write, kinds = (write_family, KINDS) if is_behind(config) else (write_state_family, STATE_KINDS)
    count: dict[str, Any] = {f"{kinds[config['model_type']]}__nextn_predict_layers": 1}
    return write(longer, path, **count)


def with_entries(folder: Path, **entries: object) -> None:
    """Changes config.json."""
    text = json.dumps({**read_entries(folder), **entries})
    (folder / "config.json").write_text(text, encoding="utf-8")


def without_tensors(folder: Path, *names: str) -> None:
    """Takes the tensors out of a checkpoint whose names begin so."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith(names)}, path)


def make_predicting(family: str, folder: Path, **overrides: Any) -> Path:
    """A tiny random model of a family of STATES or SPARSE, with a layer that drafts."""
    return add_prediction((SPARSE | STATES)[family].make(folder, **overrides))


class ReferencePrediction:
    """A checkpoint with such a layer in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._layer = Layer(self._model)
        tensors, config = _stacked(load_file(folder / "model.safetensors")), read_entries(folder)
        self._layer.load_state_dict({name: tensors[_name(name, config)] for name in self._layer.state_dict()})
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
