"""The description of a model: all that its decoder computes, and the tensors that it computes with.

A family of models is a function that makes a `ModelSpec` from the entries of a config.json. Code that loads, plans,
splits, quantizes or runs a model reads its spec, and knows no family.

Names are transformers' names; a layer's follow `model.layers.N.`.
"""

from penstock.engine.spec.attention import Attention, Rope
from penstock.engine.spec.experts import (
    EXPERT_ACTIVATIONS,
    SCORINGS,
    Activation,
    Experts,
    Router,
    Stack,
    default_stacks,
    expert_field,
)
from penstock.engine.spec.feed_forward import ACTIVATIONS, Mlp
from penstock.engine.spec.latent import LatentAttention
from penstock.engine.spec.maps import Groups, HeadOrder, LinearMap, Norm, Rows, Vector
from penstock.engine.spec.model import (
    Layer,
    LayerEmbedding,
    LayerEmbeddings,
    Mixer,
    ModelSpec,
    Prediction,
    Stage,
)
from penstock.engine.spec.state_mixers import GatedDelta, Mamba2, ShortConv, StateMixer, state_floats

__all__ = [
    "ACTIVATIONS",
    "EXPERT_ACTIVATIONS",
    "SCORINGS",
    "Activation",
    "Attention",
    "Experts",
    "GatedDelta",
    "Groups",
    "HeadOrder",
    "LatentAttention",
    "Layer",
    "LayerEmbedding",
    "LayerEmbeddings",
    "LinearMap",
    "Mamba2",
    "Mixer",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Prediction",
    "Rope",
    "Router",
    "Rows",
    "ShortConv",
    "Stack",
    "Stage",
    "StateMixer",
    "Vector",
    "default_stacks",
    "expert_field",
    "state_floats",
]
