"""A decoder as data, without its weights. Standard library only.

A family reader (``families/``) makes a :class:`DecoderSpec` from a Hugging Face config; the
decoder, the weight rules and the memory plan read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from engine.models.altup_spec import AltUpSpec
from engine.models.latent_spec import LatentSpec
from engine.models.layer_spec import HeadSpec, LayerSpec, Placement
from engine.models.recurrence import RecurrenceSpec, layer_state_bytes
from engine.models.rope_spec import DynamicScaling, LinearScaling, RopeSpec, YarnScaling
from engine.models.source_spec import SourceSpec
from engine.models.stage_spec import StageSpec
from kernels.activations import ActivationKind, OutputGateKind

NormKind = Literal["rms", "layer"]
Scoring = Literal["softmax", "sigmoid", "late_sigmoid", "sparse_mixer"]  # see ``RoutingRule``
# Parameters that not every checkpoint of a family has (``optional_tensors.py``).
OptionalPart = Literal["norm_biases", "router_corrections"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` (GPT-OSS).

    The gate is clamped to at most ``limit`` before, and ``up`` to between ``-limit`` and ``limit``.
    """

    alpha: float
    limit: float


# relu2 is the square of relu; both are only for MLPs without a gate.
# xielu has coefficients of each layer's own (``kernels.reference.layers``).
Activation = ActivationKind | ClampedSwiglu | Literal["xielu"]


@dataclass(frozen=True)
class NormSpec:
    """How all norms of a model are computed."""

    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    has_weight: bool = True  # False: all ones, which checkpoints leave out
    offset: float = 0.0  # added to the stored weights (Gemma: 1)
    final_offset: float | None = None  # the same, of the final norm; None: no other
    output_eps: float | None = None  # ``eps`` of norms after attention and MLP; None: no other

    def offset_of(self, name: str) -> float:
        """Return what is added to the stored weights of a norm, by its parameter's name."""
        is_final = name == "norm" and self.final_offset is not None
        return self.final_offset or 0.0 if is_final else self.offset


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017).

    Each token goes to its ``top_k`` experts with the highest scores, which weight their outputs.
    Experts may be grouped (DeepSeek-AI 2024): a token then chooses within its ``top_groups`` best
    groups, where a group's score is the sum of its ``group_best`` best experts' scores.
    """

    num_experts: int
    top_k: int
    intermediate_size: int  # of an expert
    normalised: bool  # a token's weights sum to one
    scoring: Scoring = "softmax"  # of the router's output, over all experts
    margin: float = 0.0  # see ``RoutingRule``
    scale: float = 1.0  # of a token's weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    # Experts after the others that return what they read, at no cost, and their weights' factor:
    # results of several ranks are summed.
    num_identity_experts: int = 0
    identity_scale: float = 1.0
    has_correction_bias: bool = False  # a bias is added to scores for the choice only
    router_in_float32: bool = False  # always computed in float32
    biased: bool = False  # router and experts have biases
    apply_router_weight_on_input: bool = False  # weights multiply the experts' inputs, not outputs
    shared_intermediate_size: int = 0  # of the shared expert; 0: there is none
    shared_scale: float = 1.0  # of its output
    latent_size: int = 0  # of the experts' input and output; 0: they use hidden states
    shared_gate: bool = False  # a sigmoid of the token scales the shared expert
    # The layer also has its MLP, and each has its own norms. The router reads the residual stream
    # through a norm with its own weights, and each expert has a factor (Gemma 4).
    with_mlp: bool = False
    local_expert_range: tuple[int, int] | None = None  # a rank's experts, [begin, end); None: all
    # The config.json names of both widths, for error messages.
    width_key: str = "moe_intermediate_size"
    shared_width_key: str = "shared_expert_intermediate_size"

    @property
    def num_choices(self) -> int:
        """Number of experts that tokens choose among."""
        return self.num_experts + self.num_identity_experts

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank, without those that return what they read."""
        return (
            self.num_experts
            if self.local_expert_range is None
            else self.local_expert_range[1] - self.local_expert_range[0]
        )


@dataclass(frozen=True)
class TemperatureSpec:
    """A query factor that grows with the position (Nakanishi 2025).

    The query at position p is multiplied by ``1 + scale * log(1 + floor((p + first) / every))``, in
    layers without position embedding (Llama 4) or in all (Ministral 3).
    """

    scale: float
    floor_scale: int
    position_offset: int = 1
    with_rope: bool = False  # also in layers with position embedding


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder. The defaults are Llama's: pre-norm, rotary positions, gated MLP with SiLU."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of the cached keys
    max_position_embeddings: int
    norm: NormSpec
    rope: RopeSpec | None  # None: learned positions, added to the embeddings
    layers: tuple[LayerSpec, ...]
    local_rope: RopeSpec | None = None
    placement: Placement = "pre"
    shared_norm: bool = False  # parallel: attention and MLP share a norm
    activation: Activation = "silu"
    gated: bool = True  # False: no gate, only one projection before the activation
    tie_word_embeddings: bool = False
    head_bias: bool = False
    qkv_bias: bool = False
    key_bias: bool = True  # False: with ``qkv_bias``, keys have none
    qkv_clip: float | None = None  # queries, keys and values lie between it and its negative
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    moe: MoeSpec | None = None  # of layers with experts
    latent: LatentSpec | None = None  # if set, there is one KV head, of the latent's width
    recurrence: RecurrenceSpec | None = None  # of layers without attention
    source: SourceSpec | None = None  # what every layer attends to besides the text
    attention_gate: bool = False  # values made from the token scale attention's output
    separate_gates: bool = False  # the gates' weights are a separate tensor
    gates_by_head: bool = False  # one gate for all of a head's values; its weights are separate
    gate_kind: OutputGateKind = "sigmoid"
    keys_are_values: bool = False  # see HeadSpec
    value_head_dim: int | None = None  # of values narrower than keys; the cache holds more
    value_scale: float = 1.0  # factor of values
    qk_norm: bool = False  # RMS norm of each head's query and key before rope
    qk_norm_after_rope: bool = False  # with qk_norm: after rope
    unit_qk_norm: bool = False  # RMS norms without weights, in layers with rope
    unit_qk_norm_without_rope: bool = False  # with unit_qk_norm: in the others, too
    wide_qk_norm: bool = False  # RMS norm over all query heads, and over all key heads
    qk_layer_norm: bool = False  # layer norms instead; each head has its own weights
    separate_head_norms: bool = False  # with qk_layer_norm: each head's weights are a tensor
    unit_value_norm: bool = False  # RMS norm of each head's value, without weights
    uses_shared_kv: bool = False  # keys and values are another layer's
    per_layer_size: int = 0  # width of per-layer embeddings; 0: none
    per_layer_vocab_size: int = 0  # their number of tokens
    per_layer_pad_id: int = 0  # used for image tokens
    altup: AltUpSpec | None = None  # None: there is one residual stream
    # Rank of the gates of input norms, except of those before MLPs without experts; 0: no gates.
    norm_gate_rank: int = 0
    layer_scales: bool = False  # a learned factor of the residual stream after each layer
    temperature: TemperatureSpec | None = None
    # Each query head's factor of a key's distance from the query, added to scores (ALiBi).
    alibi_slopes: tuple[float, ...] | None = None
    has_sinks: bool = False  # each query head's softmax has one more score, with no value
    attention_softcap: float | None = None
    attention_scale: float | None = None  # factor of scores; None: head_dim ** -0.5
    embedding_norm: bool = False  # a norm between the embeddings and the first layer
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of attention and MLP outputs
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # c * tanh(x / c)
    # Factors that become part of some of a checkpoint's tensors, by their names in
    # ``layouts.ScaledOutputs``.
    multipliers: tuple[tuple[str, tuple[float, ...]], ...] = ()
    is_generative: bool = True  # False: no language model head
    num_labels: int = 0  # of a classification head; 0: there is none
    score_sigmoid: bool = True  # a score is the sigmoid of the head's output
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None  # from config.json
    optional: tuple[OptionalPart, ...] = ()  # what is here only if the files have it, too
    naming: str = ""  # name table, if the architecture has none of its own or several
    num_draft_layers: int = 0  # after the last layer; their tensors are not read
    num_unread_layers: int = 0  # the same, if they cannot serve as draft heads
    stage: StageSpec | None = None  # if set, ``layers`` are its own; None: the whole model

    @property
    def num_learned_positions(self) -> int:
        """Number of learned positions, where positions are learned."""
        before = 0 if self.source is None else self.source.num_places
        return self.max_position_embeddings - before

    @property
    def num_layers(self) -> int:
        """Number of decoder layers here."""
        return len(self.layers)

    def for_layer(self, layer: LayerSpec) -> DecoderSpec:
        """Return the model with one layer's heads, rotary embedding and widths."""
        own = layer.heads or HeadSpec(self.num_kv_heads, self.head_dim, self.keys_are_values)
        return replace(
            self,
            num_heads=own.num_heads or self.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            rope=self.local_rope if layer.local_rope else self.rope,
            keys_are_values=own.keys_are_values and layer.kv_sharing_layer is None,
            uses_shared_kv=layer.kv_sharing_layer is not None,
            has_sinks=self.has_sinks and layer.sinks,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )

    @cached_property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """(number of KV heads, their width) of each layer that keeps keys and values."""
        paged = (
            layer for layer in self.layers if not layer.recurrent and layer.kv_sharing_layer is None
        )
        specs = map(self.for_layer, paged)
        return tuple((own.num_kv_heads, own.head_dim) for own in specs)

    @property
    def has_heterogeneous_layers(self) -> bool:
        """Whether layers differ in their heads, or some read another layer's keys and values."""
        return any(
            layer.heads is not None or layer.kv_sharing_layer is not None for layer in self.layers
        )

    @cached_property
    def num_paged_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        return len(self.cached_heads)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a recurrent state, from which no token can be removed."""
        return any(layer.has_recurrence for layer in self.layers)

    @property
    def bidirectional_images(self) -> bool:
        """Whether image tokens see each other in some layer."""
        return any(layer.bidirectional_images for layer in self.layers)

    @property
    def first_layer(self) -> int:
        """Number of its first layer in the whole model."""
        return 0 if self.stage is None else self.stage.begin

    @property
    def num_remaining_layers(self) -> int:
        """Number of the whole model's layers from its first one on."""
        return self.num_layers if self.stage is None else self.stage.num_layers - self.stage.begin

    @property
    def stage_input_size(self) -> int:
        """Width of a stage's input per token: the residual stream, and the per-layer embeddings
        of the remaining layers."""
        return self.hidden_size + self.num_remaining_layers * self.per_layer_size

    @property
    def has_embed_and_head(self) -> bool:
        """Whether embeddings and head are here."""
        return self.stage is None or self.stage.is_first

    @property
    def has_final_norm(self) -> bool:
        """Whether the final norm is here."""
        return self.stage is None or self.stage.is_last

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def has_input_norms(self, layer: LayerSpec) -> bool:
        """Return whether the inputs of a layer's attention and MLP are normed."""
        return (layer.placement or self.placement) != "post"

    def has_output_norms(self, layer: LayerSpec) -> bool:
        """Return whether their outputs are normed before the addition."""
        return (layer.placement or self.placement) in ("post", "sandwich")

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that its layers choose from: the model's, and the local one."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def rope_head_dims(self) -> tuple[int, ...]:
        """Head dimensions of the layers that use each of ``ropes``."""
        dims = [self.rope_head_dim] * len(self.ropes)
        for layer in self.layers:
            if layer.heads is not None and layer.rope:
                dims[int(layer.local_rope)] = layer.heads.head_dim
        return tuple(dims)

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head that a rotary embedding may rotate."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int | None:
        """How many of a key's first numbers are its value; None: values are separate."""
        return self.latent.rank if self.latent else None

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Widths of a token's first projection in attention."""
        if self.latent:
            gates = (self.gate_size,) if self.attention_gate else ()
            return *gates, *self.latent.qkv_sizes(self.num_heads)
        if self.uses_shared_kv:
            return (self.query_size + self.gate_size,)
        values = self.num_kv_heads * (self.value_head_dim or self.head_dim)
        keys_and_values = (self.kv_size,) if self.keys_are_values else (self.kv_size, values)
        if self.separate_gates:
            return self.gate_size, self.query_size, *keys_and_values
        return self.query_size + self.gate_size, *keys_and_values

    @property
    def gate_size(self) -> int:
        """Width of the attention gates, which are projected with the queries."""
        if not self.attention_gate:
            return 0
        return self.num_heads if self.gates_by_head else self.attention_output_size

    @property
    def attention_output_size(self) -> int:
        """Width of the input of attention's output projection."""
        own = self.latent.value_dim if self.latent else self.value_head_dim
        return self.num_heads * (own or self.head_dim)

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the attention layers."""
        attending = (layer for layer in self.layers if not layer.recurrent)
        return tuple(dict.fromkeys(layer.window for layer in attending))

    def windows_of(self, heads: HeadSpec | None) -> tuple[int | None, ...]:
        """Return the distinct windows of layers with these heads; None: the model's."""
        attending = (layer for layer in self.layers if not layer.recurrent)
        return tuple(dict.fromkeys(layer.window for layer in attending if layer.heads == heads))

    @property
    def max_window(self) -> int | None:
        """The longest window of any layer, in tokens; None: unlimited."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def chunk(self) -> int | None:
        """The chunk size of layers with chunked attention; None if there are none."""
        return next((layer.chunk for layer in self.layers if layer.chunk is not None), None)

    @property
    def default_context_len(self) -> int:
        """The default context length, in tokens."""
        scaling = self.rope.scaling if self.rope else None
        if isinstance(scaling, DynamicScaling):
            return self.max_position_embeddings
        return self.max_context_len

    @property
    def max_context_len(self) -> int:
        """The longest context that the position embedding supports, in tokens."""
        scaling, trained = self.rope.scaling if self.rope else None, self.max_position_embeddings
        if isinstance(scaling, LinearScaling | DynamicScaling):
            return int(trained * scaling.factor)
        if isinstance(scaling, YarnScaling):
            return max(trained, int(scaling.original_max_position_embeddings * scaling.factor))
        return trained

    @property
    def index_dims(self) -> tuple[int, ...]:
        """The width of an index key in each layer that keeps keys; 0: it keeps no index keys."""
        indexer = None if self.latent is None else self.latent.indexer
        if indexer is None:
            return (0,) * self.num_paged_layers
        return tuple(0 if layer.shares_selection else indexer.head_dim for layer in self.layers)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Sum over layers of ``2 * kv_heads * head_dim * itemsize``; once where values are parts
        of keys. Index keys are added."""
        numbers = sum(heads * head_dim for heads, head_dim in self.cached_heads)
        return ((1 if self.latent else 2) * numbers + sum(self.index_dims)) * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Return a sequence's state size over all recurrent layers, in bytes."""
        if self.recurrence is None:
            return 0
        return self._num_recurrent * layer_state_bytes(self.recurrence, itemsize)

    def trial_bytes(self, itemsize: int) -> int:
        """Return what recurrent layers hold per token on trial (``engine/models/trial.py``)."""
        if self.recurrence is None:
            return 0
        return self._num_recurrent * self.recurrence.trial_size * itemsize

    @property
    def _num_recurrent(self) -> int:
        return sum(layer.has_recurrence for layer in self.layers)
