"""Reads the small files of a model before it is loaded, for a server, for a program and for `penstock doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from jinja2 import TemplateSyntaxError

from penstock.app.checkpoint import find_checkpoint
from penstock.app.errors import OperatorError
from penstock.app.log import said_if_slow
from penstock.app.settings import EngineSettings
from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config, read_generation_defaults, read_tokenizer
from penstock.engine.model.split import check_shared_experts, check_split
from penstock.engine.model.stages import check_stages
from penstock.engine.planning.embedding import Embedding, read_embedding
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True)
class Model:
    """The small files of a checkpoint."""

    folder: Path
    """The checkpoint's folder."""
    config: ModelConfig
    tokenizer: Tokenizer
    prompts: Prompts
    defaults: SamplingDefaults
    embedding: Embedding


def read_model(settings: EngineSettings) -> Model:
    """Reads the model that settings ask for, less its weights.

    Raises:
        OperatorError: a path, an option or a file is wrong.
    """
    folder = find_checkpoint(settings.model, settings.revision)
    try:
        config = read_config(folder)
        with said_if_slow("reading the tokenizer of %s", folder):
            tokenizer = read_tokenizer(folder)
        _check_ranks(folder, config, settings)
        check_stages(folder, config, settings.pipeline_parallel, settings.tensor_parallel)
        defaults, embedding = _sampling_defaults(folder), read_embedding(folder, config.hidden_size)
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    return Model(folder, config, tokenizer, make_prompts(folder, tokenizer), defaults, embedding)


def _check_ranks(folder: Path, config: ModelConfig, settings: EngineSettings) -> None:
    """Raises CheckpointError if --tensor-parallel cannot share the model out as it is asked to."""
    num_ranks, experts = settings.tensor_parallel, settings.expert_parallel
    if settings.data_parallel_attention:
        check_shared_experts(folder, config, num_ranks, settings.pipeline_parallel, experts)
    else:
        check_split(folder, config, num_ranks, experts)


def make_prompts(folder: Path, tokenizer: Tokenizer) -> Prompts:
    """Raises OperatorError if the chat template is broken."""
    try:
        return Prompts(tokenizer)
    except TemplateSyntaxError as error:
        raise OperatorError(f"{folder}: the chat template is broken: {error}") from None


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """The checkpoint's own recommendation; what it leaves open is as OpenAI has it."""
    recommended = asdict(read_generation_defaults(folder))
    known = {field.name for field in fields(SamplingDefaults)}
    return SamplingDefaults(**{k: v for k, v in recommended.items() if k in known and v is not None})
