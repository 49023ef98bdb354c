"""A decoder of which one layer at a time is in memory, and whose linear maps can be looked at while they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.experts import ExpertLinear, ListedExperts
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.reference import cap, glu
from penstock.engine.model.safetensors import DTYPES, TensorFiles
from penstock.engine.model.tensors import LinearSpec, expected_shapes, linear_specs
from penstock.engine.model.texts import Text
from penstock.engine.model.weights import Reader, load_layer
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.interpreter import Interpreter, Run
from penstock.engine.program.parameters import LayerWeights, Weights
from penstock.engine.quant.storages.names import EMBEDDING, LM_HEAD
from penstock.engine.spec import Attention, Experts, Layer, Mixer, Mlp, ModelSpec

See = Callable[[LinearSpec, Tensor], None]
"""Is called with the inputs [T, in] of a linear map before its weight is read, which it may replace."""

_BLOCK_SIZE = 64
"""The tokens of a KV block of a text."""
_TOKENS_AT_A_TIME = 512
"""Gates and ups are made of so many tokens at a time: they are the widest activations."""
_LOGITS_AT_A_TIME = 1 << 24


class LayerTensors(TensorFiles):
    """The tensors of one layer in float32, each of which may be replaced."""

    def __init__(self, config: ModelConfig, index: int, files: TensorFiles, device: torch.device) -> None:
        super().__init__(files.path, files.entries, files.own_name)
        self.index = index
        self.specs = _in_order(config.spec.layers[index], linear_specs(config, index))
        """The linear maps by their field of `LayerWeights`, in the order in which they run."""
        self._spec = config.spec.layers[index]
        self._prefix = f"model.layers.{index}."
        self.tensors = {
            name: files.read(name).to(device, torch.float32, copy=True)
            for name in expected_shapes(config)
            if name.startswith(self._prefix)
        }
        """By their full names."""

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def weight(self, module: str) -> Tensor:
        return self.tensors[f"{module}.weight"]

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor has in the checkpoint."""
        return DTYPES[self.entries[name].dtype]

    def before(self, spec: LinearSpec) -> str | None:
        """Returns the one norm or linear map that makes a linear map's inputs, if it can be divided; else None."""
        layer, name = self._spec, spec.parts[0].name.removeprefix(self._prefix)
        mixer, own = layer.mixer, layer.feed_forward
        attention = mixer if isinstance(mixer, Attention) else None
        if mixer is not None and attention is None and name in _names(mixer):
            return None
        if attention is not None and name == attention.o:
            return self._last(attention.qkv) if not attention.norms_values else None
        is_query = attention is not None and name in attention.qkv
        if isinstance(own, Experts) and not is_query:
            return self._in_experts(own, name)
        if isinstance(own, Mlp) and name == own.down:
            return self._last(own.gate_up) if own.is_gated else None
        norm = layer.input_norm if is_query else layer.post_norm
        can_be_divided = norm is not None and not norm.offset and not layer.is_parallel
        return f"{self._prefix}{norm.name}" if norm is not None and can_be_divided else None

    def _last(self, fused: tuple[str, ...]) -> str | None:
        """The last of several linear maps whose rows are multiplied as one: values, or ups."""
        return f"{self._prefix}{fused[-1]}" if len(fused) > 1 else None

    def _in_experts(self, own: Experts, name: str) -> str | None:
        """Returns the module that makes an expert map's inputs. Gates and ups all read one norm, as the router does."""
        if own.shared is not None and name == own.shared.down:
            return self._last(own.shared.gate_up)
        expert, _, map = name.rpartition(".")
        is_linear = own.activation.is_gated and not own.activation.limit and not own.activation.shift
        return f"{self._prefix}{expert}.{own.gate_up[-1]}" if map == own.down and is_linear else None

    def heads(self, spec: LinearSpec) -> tuple[int, int, int] | None:
        """(key-value heads, query heads that share one, head_dim) if these are the inputs of a linear map."""
        own = self._spec.mixer
        if not isinstance(own, Attention) or spec.parts[0].name != f"{self._prefix}{own.o}":
            return None
        return own.num_kv_heads, own.num_heads // own.num_kv_heads, own.head_dim

    def scale_inputs(self, spec: LinearSpec, scales: Tensor) -> None:
        """Multiplies the columns of a linear map, and divides the module that makes its inputs.

        A norm is rounded to its type in the checkpoint, and where that makes it 0, it is left as it is.

        Args:
            scales: [in]; inputs that share a value head have the same scales.
        """
        before = self.before(spec)
        assert before is not None
        name, bias = f"{before}.weight", f"{before}.bias"
        made = self.tensors[name]
        if made.dim() == 1:
            divided = (made / scales).to(self.dtype(name)).float()
            divided = torch.where((divided != 0) & divided.isfinite(), divided, made)
            scales = torch.where(divided != 0, made / divided, torch.ones_like(made))
            self.tensors[name] = divided
        else:
            heads = self.heads(spec)
            by = scales if heads is None else scales.view(heads)[:, 0].flatten()
            self.tensors[name] = made / by[:, None]
            if bias in self.tensors:
                self.tensors[bias] = self.tensors[bias] / by
        for name in spec.names:
            self.tensors[f"{name}.weight"] = self.weight(name) * scales


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual stream of some texts between two layers."""

    texts: Sequence[Text]
    batch: Batch
    """The texts, a sequence each."""
    hidden: Tensor
    """[T, hidden] float32"""


def _in_order(layer: Layer, specs: dict[str, LinearSpec]) -> dict[str, LinearSpec]:
    """The linear maps of a layer as they run: both parts of a parallel one read the stream before either adds to it."""
    late = ("o", "out", "down") if layer.is_parallel else ()
    return dict(sorted(specs.items(), key=lambda item: item[0] in late))


def _names(mixer: Mixer) -> set[str]:
    return {rows.name for map in mixer.maps().values() for rows in map.rows}


class LayerwiseDecoder:
    """A decoder that takes texts through one layer at a time, in float32."""

    def __init__(self, config: ModelConfig, files: TensorFiles, device: torch.device) -> None:
        embedding = files.read(f"{EMBEDDING}.weight")
        self._head = files.read(f"{EMBEDDING if config.spec.ties_embeddings else LM_HEAD}.weight")
        self._config = config
        kernels = replace(reference_kernels(device, torch.float32), embedding_dtype=embedding.dtype)
        self._kernels = replace(kernels, glu=_multiplied_already)
        norm = Reader(files, self._kernels).norm(config.spec.final_norm)
        self._ends = Weights(embedding, [], norm, DenseLinear(self._head, None), is_tied=False)

    def start(self, texts: Sequence[Text]) -> ResidualStream:
        """The stream before the first layer."""
        lengths = [len(text.token_ids) for text in texts] or [0]
        tables = _block_tables(lengths)
        batch = blank_batch(lengths, lengths, tables)
        batch.token_ids = torch.tensor([token for text in texts for token in text.token_ids]).int()
        device = self._kernels.device
        hidden = self._run(slice(1), batch).to(device)  # where the embedding is, on the host
        return ResidualStream(texts, batch.to(device), hidden)

    def through(
        self, layer: LayerTensors, stream: ResidualStream, see: See = lambda *_: None
    ) -> ResidualStream:
        """The stream after a layer; each of its linear maps has the weight of the moment at which it runs."""
        spec = self._config.spec.layers[layer.index]
        own = spec.feed_forward
        dense = own.shared if isinstance(own, Experts) else own
        reader = _ReaderAtUse(layer, self._kernels, see, "" if dense is None else dense.activation)
        weights = load_layer(spec, reader, layer.index, layer.specs)
        hidden = self._run(slice(1, -1), stream.batch, stream.hidden, layer.index, [weights])
        return replace(stream, hidden=hidden)

    def perplexity(self, stream: ResidualStream) -> float:
        """e to the mean negative log likelihood of the tokens that count, of a stream after the last layer."""
        counted = torch.tensor([mark for text in stream.texts for mark in _counted(text)])
        rows = counted.roll(-1).nonzero().flatten().int().to(stream.hidden.device)
        normed = self._run(slice(-1, None), replace(stream.batch, sample_rows=rows), stream.hidden)
        targets = stream.batch.token_ids.cpu()[counted]
        return math.exp(_mean_surprise(normed, targets, self._head, self._config.spec))

    def _run(
        self,
        part: slice,
        batch: Batch,
        hidden: Tensor | None = None,
        index: int = 0,
        own: Sequence[LayerWeights] = (),
    ) -> Tensor:
        """Runs a part of the program that has one layer alone, or none: the embedding, that layer, the final norm."""
        spec = replace(self._config.spec, layers=self._config.spec.layers[index : index + len(own)])
        config, weights = replace(self._config, spec=spec), replace(self._ends, layers=list(own))
        num_blocks = int(batch.block_tables.max()) + 1 if own else 1
        kv = KVCache(KVLayout.of(config, _BLOCK_SIZE), num_blocks, torch.float32, self._kernels.device)
        decoder = make_decoder(config, weights, self._kernels, kv, max(1, batch.max_query_len or 0))
        assert isinstance(decoder, Interpreter)
        return Run(decoder, batch, hidden).through(decoder.program.ops[part])


class _ReaderAtUse(Reader):
    """Reads the weights of linear maps when they run."""

    def __init__(self, layer: LayerTensors, kernels: Kernels, see: See, activation: str) -> None:
        super().__init__(layer, kernels)
        self._see, self._activation = see, activation

    def linear(self, spec: LinearSpec) -> Linear:
        """A linear map that is read when it runs. One of gates and ups multiplies them, too: see `LinearPacker`."""
        return partial(self._run, spec)

    def experts(self, specs: Sequence[LinearSpec]) -> ExpertLinear:
        """Experts that are read when they run, each once, whether or not a row has chosen it."""
        return _ExpertsAtUse([partial(self._read, spec) for spec in specs], specs[0].out_features)

    def _read(self, spec: LinearSpec, x: Tensor) -> Tensor:
        self._see(spec, x)
        return super().linear(spec)(x)

    def _run(self, spec: LinearSpec, x: Tensor) -> Tensor:
        if not spec.gated:
            return self._read(spec, x)
        self._see(spec, x)
        linear = super().linear(spec)
        parts = torch.split(x, _TOKENS_AT_A_TIME)
        return torch.cat([glu(linear(part), self._activation) for part in parts])


class _ExpertsAtUse(ListedExperts):
    """Linear maps of which each is called once with all rows that chose it, and with none if there are none."""

    def chosen(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        chosen, nowhere = dict(super().chosen(ids)), ids.new_empty(0).long()
        yield from ((expert, chosen.get(expert, nowhere)) for expert in range(self.num_experts))

    def product(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)


def _multiplied_already(x: Tensor, activation: str) -> Tensor:  # noqa: ARG001
    return x


def _block_tables(lengths: list[int]) -> Tensor:
    """[texts, most blocks] int32: blocks one after another from block 1 on, as many as each text fills."""
    counts = -(-torch.tensor(lengths) // _BLOCK_SIZE)
    places = torch.arange(max(1, int(counts.max())))
    tables = (counts.cumsum(0) - counts)[:, None] + places + 1
    return tables.masked_fill(places >= counts[:, None], 0).int()


def _counted(text: Text) -> list[bool]:
    """The tokens of a text that count: never the first, which nothing foretells."""
    return [False, *(text.counted or [True] * len(text.token_ids))[1:]]


def _mean_surprise(x: Tensor, targets: Tensor, head: Tensor, spec: ModelSpec) -> float:
    """The mean of -log p(target) for hidden states x [N, hidden] and an output head [vocab, hidden] of any type."""

    def capped(logits: Tensor) -> Tensor:
        return cap(logits, spec.logit_scale, spec.logit_softcap)

    total = x.new_full((len(x),), -torch.inf)
    for rows in torch.split(head, max(1, _LOGITS_AT_A_TIME // len(x))):
        total = torch.logaddexp(total, capped(x @ rows.to(x).T).logsumexp(-1))
    chosen = capped((x * head[targets].to(x)).sum(-1))
    return float((total - chosen).double().mean())
