"""A decoder's parameters in the form it computes with: linear layers made, the rest as loaded.

Parameters are read one by one in the order of the layers, and what a layer is made from is let go
before the next is read: a model that is quantised at load never lies in memory as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine.models.linear import Head, Linear, LinearMethod
from engine.models.loader import Weights
from engine.models.spec import DecoderSpec
from kernels.attention import LayerAttention


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Its last norm is that of the layer behind it."""

    attention: LayerAttention
    has_rope: bool
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Modules:
    """All that is loaded of a model."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, hidden_size]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Head
    num_bytes: int


def make_modules(spec: DecoderSpec, weights: Weights, method: LinearMethod) -> Modules:
    """Read the weights and make the layers, in order.

    Raises:
        ModelLoadError: they cannot be read, or the device has no room for them.
    """
    layers = tuple(_make_layer(spec, weights, method, i) for i in range(spec.num_layers))
    norm = weights["norm"]
    num_bytes = norm.nbytes + sum(_layer_bytes(layer) for layer in layers)
    embedding = weights["embedding"]
    if spec.tie_word_embeddings:
        head = method.make_head(embedding)
        return Modules(head.rows, layers, norm, head, num_bytes + head.num_bytes)
    head = method.make_head(weights["head"])
    embed = partial(functional.embedding, weight=embedding)
    return Modules(embed, layers, norm, head, num_bytes + head.num_bytes + embedding.nbytes)


def _make_layer(spec: DecoderSpec, weights: Weights, method: LinearMethod, i: int) -> Layer:
    def linear(name: str) -> Linear:
        return method.make(weights[f"{i}.{name}.weight"], weights.get(f"{i}.{name}.bias"))

    qk_norm = None
    if spec.qk_norm:
        query_norm = weights[f"{i}.query_norm"].expand(spec.num_heads, -1)
        key_norm = weights[f"{i}.key_norm"].expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat((query_norm, key_norm))
    return Layer(
        attention=LayerAttention(
            spec.attention_scale, spec.layers[i].window, spec.attention_softcap
        ),
        has_rope=spec.layers[i].rope,
        attention_norm=weights[f"{i}.attention_norm"],
        qkv=linear("qkv"),
        qk_norm=qk_norm,
        output=linear("output"),
        mlp_norm=weights[f"{i}.mlp_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )


def _layer_bytes(layer: Layer) -> int:
    norms = (layer.attention_norm, layer.mlp_norm, layer.qk_norm)
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return sum(norm.nbytes for norm in norms if norm is not None) + sum(
        linear.num_bytes for linear in linears
    )
