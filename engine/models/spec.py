"""What a decoder-only model is, apart from its weights. Standard library only.

A family reader (``families.py``) makes a :class:`DecoderSpec` from a Hugging Face config; the
decoder, the weight rules and the memory plan read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from engine.models.recurrence import RecurrenceSpec, layer_state_bytes
from engine.models.rope_spec import DynamicScaling, LinearScaling, RopeSpec, YarnScaling
from kernels.activations import ActivationKind

# Where a layer's norms stand, x being the residual stream:
#   pre:      x += attention(norm(x));        x += mlp(norm(x))            Llama
#   post:     x += norm(attention(x));        x += norm(mlp(x))            OLMo 2
#   sandwich: x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))      Gemma 2
#   parallel: x += attention(norm(x)) + mlp(norm(x))                       GPT-NeoX, Cohere
Placement = Literal["pre", "post", "sandwich", "parallel"]


@dataclass(frozen=True)
class HeadSpec:
    """Heads that a layer has in place of the model's."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False  # before norm and rope; there is no projection to values


@dataclass(frozen=True)
class LayerSpec:
    """Where layers of one model may differ."""

    window: int | None = None  # positions seen, the token's own included; None: all
    rope: bool = True  # False: no position embedding in this layer (NoPE)
    local_rope: bool = False  # by the model's other frequencies, of its windowed layers
    experts: bool = False  # a mixture of experts in place of the MLP
    chunk: int | None = None  # a position sees none before its own chunk of so many; None: all
    looks_ahead: bool = False  # the tokens of an image see all of it
    recurrent: bool = False  # the model's recurrence in place of attention
    hybrid: bool = False  # attention and the model's recurrence, both of the same norm, summed
    placement: Placement | None = None  # of its norms; None: as in the model's other layers
    heads: HeadSpec | None = None  # of its own; None: the model's
    # The number of the layer whose keys and values it reads in place of any of its own.
    reads: int | None = None
    intermediate_size: int | None = None  # of its MLP; None: the model's
    mlp: bool = True  # False: it ends with what mixes its tokens
    # The numbers that a checkpoint has for what mixes its tokens and for its MLP, where these are
    # layers of their own there (Nemotron-H); None: the layer's own.
    stored: tuple[int, int] | None = None

    @property
    def keeps_state(self) -> bool:
        """Whether it has the model's recurrence."""
        return self.recurrent or self.hybrid


NormKind = Literal["rms", "layer"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """``(up + 1) * gate * sigmoid(alpha * gate)``; before, the gate is clamped to ``limit`` from
    above and up to it on both sides (GPT-OSS)."""

    alpha: float
    limit: float


# relu2 is the square of relu; it and relu are for MLPs without a gate.
Activation = ActivationKind | ClampedSwiglu


@dataclass(frozen=True)
class NormSpec:
    """How all norms of a model are computed."""

    eps: float
    kind: NormKind = "rms"
    bias: bool = False
    offset: float = 0.0  # added to the weights as they are stored (Gemma: 1)


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017): each token goes to the ``top_k`` experts of the
    highest scores, weighted by them.

    Experts may be grouped (DeepSeek-AI 2024): a token then chooses among those of its
    ``top_groups`` best groups, a group being as good as its ``group_best`` best experts together.
    """

    num_experts: int
    top_k: int
    intermediate_size: int  # of an expert
    normalised: bool  # a token's weights sum to one
    scoring: Scoring = "softmax"  # of what the router says; over all experts
    scale: float = 1.0  # of a token's weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    corrected: bool = False  # a bias is added to the scores, for the choice alone
    exact_router: bool = False  # it computes in float32 whatever the model's dtype
    biased: bool = False  # router and experts have biases
    weighs_input: bool = False  # a weight multiplies what an expert reads, not what it gives
    shared_intermediate_size: int = 0  # of an expert that all tokens go to; 0: there is none
    latent_size: int = 0  # of what experts read and give in place of hidden states; 0: these
    shared_gate: bool = False  # the shared expert's share is a sigmoid of the token
    # The layer's MLP is there, too, each with norms of its own; the router reads the residual
    # stream, normed by weights of its own, and each expert has a factor (Gemma 4).
    beside_mlp: bool = False
    held: tuple[int, int] | None = None  # the run of experts, [begin, end), that a rank has; all
    # What config.json calls both widths, for who is told that they do not do.
    width_key: str = "moe_intermediate_size"
    shared_width_key: str = "shared_expert_intermediate_size"

    @property
    def num_held(self) -> int:
        """How many experts there are here; tokens choose among ``num_experts``."""
        return self.num_experts if self.held is None else self.held[1] - self.held[0]


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (``engine/models/latent.py``): what the widths are."""

    rank: int  # of the latent that stands for keys and values
    query_rank: int | None  # of the one that queries are made from; None: from the hidden state
    plain_dim: int  # of a head's query and key, without position
    rope_dim: int  # of what is rotated; all heads share a key's
    value_dim: int  # of a head's value
    eps: float = 1e-6  # of the norms of latents

    @property
    def query_dim(self) -> int:
        """Of a head's query."""
        return self.plain_dim + self.rope_dim

    def projected(self, num_heads: int) -> tuple[int, int]:
        """Widths of what a token is first projected to: what queries are made from, and the latent
        with the rotated part of the key."""
        queries = self.query_rank or num_heads * self.query_dim
        return queries, self.rank + self.rope_dim


@dataclass(frozen=True)
class TemperatureSpec:
    """The query at position p is multiplied by ``1 + scale * log(1 + floor((p + first) / every))``
    (Nakanishi 2025), in layers without position embedding (Llama 4) or in all (Ministral 3)."""

    scale: float
    every: int
    first: int = 1
    with_rope: bool = False  # in layers with position embedding too


@dataclass(frozen=True)
class StageSpec:
    """Which run of a model's layers a stage of a pipeline has. The first stage has embeddings and
    head, the last one the norm behind all layers."""

    begin: int  # the number of its first layer
    num_layers: int  # of the whole model
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder. The defaults are Llama's: pre-norm, rotary positions, gated MLP with SiLU."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys as they are cached
    max_position_embeddings: int
    norm: NormSpec
    rope: RopeSpec | None  # None: positions are learned, and added to the embeddings
    layers: tuple[LayerSpec, ...]
    local_rope: RopeSpec | None = None
    placement: Placement = "pre"
    shared_norm: bool = False  # parallel: attention and MLP read the same norm
    activation: Activation = "silu"
    gated: bool = True  # False: one projection and the activation, no gate
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    moe: MoeSpec | None = None  # of the layers that have experts
    latent: LatentSpec | None = None  # then there is one KV head, of the latent's width
    recurrence: RecurrenceSpec | None = None  # of the layers that have one in place of attention
    attention_gate: bool = False  # what attention gives is scaled by sigmoids of the token
    gates_apart: bool = False  # checkpoints have the gates' weights in a tensor of their own
    keys_are_values: bool = False  # see HeadSpec
    qk_norm: bool = False  # RMS norm of each head's query and key before rope
    unit_value_norm: bool = False  # RMS norm of each head's value, without weights
    queries_alone: bool = False  # keys and values are another layer's
    per_layer_size: int = 0  # of what is embedded for each layer by itself; 0: nothing is
    per_layer_vocab_size: int = 0  # tokens that are
    per_layer_pad_id: int = 0  # the one in whose place those of images are
    layer_scales: bool = False  # behind each layer the residual stream has a factor, a parameter
    norms_turned: bool = False  # with qk_norm: behind rope instead
    unit_qk_norm: bool = False  # the same without weights, in layers with rope
    temperature: TemperatureSpec | None = None
    wide_qk_norm: bool = False  # RMS norm over all query heads together, and over all key heads
    has_sinks: bool = False  # each query head has one more score in its softmax, without a value
    attention_softcap: float | None = None
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # c * tanh(x / c)
    # Factors that are part of some tensors of a checkpoint here, by the names that
    # ``layouts.Multiplied`` has for them.
    multipliers: tuple[tuple[str, tuple[float, ...]], ...] = ()
    generates: bool = True  # False: it has no head that scores tokens
    num_labels: int = 0  # of the classification head in its place; 0: there is none
    score_sigmoid: bool = True  # a score is the sigmoid of what that head says
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None  # as config.json tells it
    naming: str = ""  # the table of its tensors' names, where its architecture has several
    num_draft_layers: int = 0  # behind the last one, of which a checkpoint's tensors are not read
    stage: StageSpec | None = None  # then ``layers`` are those of a stage; None: all

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def of_layer(self, layer: LayerSpec) -> DecoderSpec:
        """The model as one of its layers has it: with the heads and the width of that layer."""
        own = layer.heads or HeadSpec(self.num_kv_heads, self.head_dim, self.keys_are_values)
        return replace(
            self,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            keys_are_values=own.keys_are_values and layer.reads is None,
            queries_alone=layer.reads is not None,
            intermediate_size=layer.intermediate_size or self.intermediate_size,
        )

    @cached_property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """Of each layer that keeps keys and values: how many KV heads, and how wide they are."""
        paged = (layer for layer in self.layers if not layer.recurrent and layer.reads is None)
        specs = map(self.of_layer, paged)
        return tuple((own.num_kv_heads, own.head_dim) for own in specs)

    @property
    def has_unlike_layers(self) -> bool:
        """Whether some layers have heads unlike the others', or read what others keep."""
        return any(layer.heads is not None or layer.reads is not None for layer in self.layers)

    @cached_property
    def num_paged_layers(self) -> int:
        """Those that keep keys and values of their own."""
        return len(self.cached_heads)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state, which no token can be taken back from."""
        return any(layer.keeps_state for layer in self.layers)

    @property
    def looks_ahead(self) -> bool:
        """Whether the tokens of an image see each other in some layer."""
        return any(layer.looks_ahead for layer in self.layers)

    @property
    def first_layer(self) -> int:
        """The number of the first of its layers among all that the model has."""
        return 0 if self.stage is None else self.stage.begin

    @property
    def num_layers_ahead(self) -> int:
        """How many layers of the whole model there are from its first one on."""
        return self.num_layers if self.stage is None else self.stage.num_layers - self.stage.begin

    @property
    def entering_size(self) -> int:
        """Width of what a stage is handed for a token: the residual stream, and what is embedded
        for each layer that is ahead."""
        return self.hidden_size + self.num_layers_ahead * self.per_layer_size

    @property
    def has_ends(self) -> bool:
        """Whether embeddings and head are here."""
        return self.stage is None or self.stage.is_first

    @property
    def has_last_norm(self) -> bool:
        """Whether the norm behind all layers is here."""
        return self.stage is None or self.stage.is_last

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def has_input_norms(self, layer: LayerSpec) -> bool:
        """Whether a layer's attention and MLP read norms."""
        return (layer.placement or self.placement) != "post"

    def has_output_norms(self, layer: LayerSpec) -> bool:
        """Whether what they give is normed before it is added."""
        return (layer.placement or self.placement) in ("post", "sandwich")

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that its layers choose from: the model's, and the local one."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def rope_head_dims(self) -> tuple[int, ...]:
        """Of the layers that each of ``ropes`` turns."""
        dims = [self.rope_head_dim] * len(self.ropes)
        for layer in self.layers:
            if layer.heads is not None and layer.rope:
                dims[int(layer.local_rope)] = layer.heads.head_dim
        return tuple(dims)

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head that a rotary embedding may turn."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int | None:
        """How many of a key's first numbers are its value; None: values lie by themselves."""
        return self.latent.rank if self.latent else None

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Widths of what a token is first projected to, in attention."""
        if self.latent:
            return self.latent.projected(self.num_heads)
        if self.queries_alone:
            return (self.query_size + self.gate_size,)
        keys_and_values = (self.kv_size,) if self.keys_are_values else (self.kv_size, self.kv_size)
        if self.gates_apart:
            return self.gate_size, self.query_size, *keys_and_values
        return self.query_size + self.gate_size, *keys_and_values

    @property
    def gate_size(self) -> int:
        """Width of the gates of what attention gives, which are made with the queries."""
        return self.query_size if self.attention_gate else 0

    @property
    def attended_size(self) -> int:
        """Width of what attention hands to its last projection."""
        return self.num_heads * self.latent.value_dim if self.latent else self.query_size

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers that attend."""
        attending = (layer for layer in self.layers if not layer.recurrent)
        return tuple(dict.fromkeys(layer.window for layer in attending))

    def windows_of(self, heads: HeadSpec | None) -> tuple[int | None, ...]:
        """Those of the layers that have these heads of their own; None: the model's."""
        attending = (layer for layer in self.layers if not layer.recurrent)
        return tuple(dict.fromkeys(layer.window for layer in attending if layer.heads == heads))

    @property
    def widest_window(self) -> int | None:
        """The positions that a token sees in any layer; None: all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    @property
    def chunk(self) -> int | None:
        """The chunk of the layers that attend within chunks; None where there are none."""
        return next((layer.chunk for layer in self.layers if layer.chunk is not None), None)

    @property
    def default_context(self) -> int:
        """Longest context that is served without being asked for, in tokens."""
        scaling = self.rope.scaling if self.rope else None
        if isinstance(scaling, DynamicScaling):
            return self.max_position_embeddings
        return self.longest_context

    @property
    def longest_context(self) -> int:
        """Longest context the position embedding is made for, in tokens."""
        scaling, trained = self.rope.scaling if self.rope else None, self.max_position_embeddings
        if isinstance(scaling, LinearScaling | DynamicScaling):
            return int(trained * scaling.factor)
        if isinstance(scaling, YarnScaling):
            return max(trained, int(scaling.original_max_position_embeddings * scaling.factor))
        return trained

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """``2 * kv_heads * head_dim * itemsize`` of each layer; once where values are parts of
        keys."""
        numbers = sum(heads * head_dim for heads, head_dim in self.cached_heads)
        return (1 if self.latent else 2) * numbers * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """What a sequence's states take, in all layers that keep one."""
        if self.recurrence is None:
            return 0
        return self._num_recurrent * layer_state_bytes(self.recurrence, itemsize)

    def trial_bytes(self, itemsize: int) -> int:
        """What is held of a token on trial (``engine/models/trial.py``), in all of these layers."""
        if self.recurrence is None:
            return 0
        return self._num_recurrent * self.recurrence.fed_size * itemsize

    @property
    def _num_recurrent(self) -> int:
        return sum(layer.keeps_state for layer in self.layers)
