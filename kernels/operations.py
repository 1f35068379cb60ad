"""What a decoder step computes besides attention and matrix products: one protocol for all kernels.

Each kind of kernels has a module ``operations`` that satisfies :class:`Operations`.
``kernels.reference.operations`` is the reference, and the docstrings of its functions are the
contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from kernels.activations import ActivationKind, OutputGateKind
from kernels.attention import AttentionBackend, DeviceGeometry, LayerCache
from kernels.inputs import StepInputs, StepRows
from kernels.lora import AdapterRows, AdapterWeights
from kernels.moe import ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts
from kernels.skinny import RowNorm
from kernels.sparse import IndexQuery


class Operations(Protocol):
    """The tensor functions of a step, all on one device; none waits for it."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor:
        """See ``kernels.reference.fused``."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, /
    ) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def activate(self, x: torch.Tensor, kind: ActivationKind, /) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def xielu(self, x: torch.Tensor, coefficients: torch.Tensor, /) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def softcap(self, x: torch.Tensor, cap: float, /) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def attention_temperatures(
        self, positions: torch.Tensor, first: int, every: int, scale: float, /
    ) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def rope_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``kernels.reference.layers``."""
        ...

    def norm_rope(
        self,
        query: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.fused``."""
        ...

    def places_behind(self, values: torch.Tensor, begin: int, /) -> torch.Tensor:
        """See ``kernels.reference.source``."""
        ...

    def norm_rope_store(
        self,
        fused: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.fused``."""
        ...

    def latent_rope_store(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        slot_mapping: torch.Tensor,
        /,
    ) -> None:
        """See ``kernels.reference.fused``."""
        ...

    def index_rope_store(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor,
        norm: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        rotation: tuple[torch.Tensor, torch.Tensor],
        index_keys: torch.Tensor,
        slot_mapping: torch.Tensor,
        /,
    ) -> None:
        """See ``kernels.reference.sparse``."""
        ...

    def index_weights(self, x: torch.Tensor, weight: torch.Tensor, /) -> torch.Tensor:
        """See ``kernels.reference.sparse``."""
        ...

    def selected_lengths(self, seq_lens: torch.Tensor, top_k: int, /) -> torch.Tensor:
        """See ``kernels.reference.sparse``."""
        ...

    def select_slots(
        self,
        index: IndexQuery,
        index_keys: torch.Tensor,
        tokens: DeviceGeometry,
        longest: int,
        slots: torch.Tensor,
        /,
    ) -> None:
        """See ``kernels.reference.sparse``."""
        ...

    def silu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor:
        """See ``kernels.reference.layers``."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor:
        """See ``kernels.reference.fused``."""
        ...

    def erf_gelu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor:
        """See ``kernels.reference.fused``."""
        ...

    def clamped_silu_mul(self, gate_up: torch.Tensor, limit: float, /) -> torch.Tensor:
        """See ``kernels.reference.moe``."""
        ...

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float, /) -> torch.Tensor:
        """See ``kernels.reference.moe``."""
        ...

    def route(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        rule: RoutingRule,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``kernels.reference.moe``."""
        ...

    def fused_moe(
        self,
        x: torch.Tensor,
        experts: ExpertTensors,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        apply_router_weight_on_input: bool = False,
        some_elsewhere: bool = False,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.moe``."""
        ...

    def add_experts(
        self,
        stream: torch.Tensor,
        norm: RowNorm,
        router: RouterWeights,
        rule: RoutingRule,
        experts: ExpertTensors,
        gating: GatedActivation,
        /,
    ) -> None:
        """See ``kernels.reference.moe``."""
        ...

    def add_gated(
        self, out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, /
    ) -> torch.Tensor:
        """See ``kernels.reference.moe``."""
        ...

    def moe_token_thresholds(self, num_experts: int, top_k: int, /) -> tuple[int, ...]:
        """See ``kernels.reference.moe``."""
        ...

    def plan_adapters(self, rows: AdapterRows, num_slots: int, /) -> AdapterRows:
        """See ``kernels.reference.lora``."""
        ...

    def add_adapters(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weights: AdapterWeights,
        rows: AdapterRows,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.lora``."""
        ...

    def build_inputs(
        self,
        rows: StepRows,
        newest: torch.Tensor,
        tables: torch.Tensor,
        block_size: int,
        max_query: int,
        /,
    ) -> StepInputs:
        """See ``kernels.reference.inputs``."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        table: SamplingTable,
        counts: TokenCounts | None = None,
        bias: LogitBias | None = None,
        masks: torch.Tensor | None = None,
        out: SamplerOutput | None = None,
        /,
    ) -> SamplerOutput:
        """See ``kernels.reference.sampling_step``."""
        ...

    def candidates(
        self,
        logits: torch.Tensor,
        at: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        table: SamplingTable,
        count: int,
        counts: TokenCounts | None = None,
        bias: LogitBias | None = None,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.sampling_step``."""
        ...

    def feed_back(
        self,
        newest: torch.Tensor,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        count_line: torch.Tensor,
        counts: TokenCounts | None = None,
        /,
    ) -> None:
        """See ``kernels.reference.feedback``."""
        ...

    def accept_drafts(
        self,
        newest: torch.Tensor,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        is_kept: torch.Tensor,
        sizes: torch.Tensor,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.drafts``."""
        ...

    def distribution(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        table: SamplingTable,
        counts: TokenCounts | None = None,
        bias: LogitBias | None = None,
        masks: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.sampling_step``."""
        ...

    def verify_drafts(
        self,
        wanted: torch.Tensor,
        proposed: torch.Tensor | None,
        draft_ids: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``kernels.reference.drafts``."""
        ...

    def sample_from_probs(
        self, shares: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int, /
    ) -> torch.Tensor:
        """See ``kernels.reference.drafts``."""
        ...

    def copy_blocks(
        self, cache: LayerCache, sources: torch.Tensor, targets: torch.Tensor, /
    ) -> None:
        """See ``kernels.reference.kv_store``."""
        ...

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StepRows,
        activates: bool,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def gated_conv(
        self,
        fused: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StepRows,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def gated_delta(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        log_a: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        rows: StepRows,
        shape: GatedDeltaShape,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def selective_scan(
        self,
        mixed: torch.Tensor,
        time_steps: torch.Tensor,
        log_a: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        rows: StepRows,
        shape: ScanShape,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def channel_scan(
        self,
        x: torch.Tensor,
        time_steps: torch.Tensor,
        write: torch.Tensor,
        read: torch.Tensor,
        rates: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        rows: StepRows,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gates_first: bool,
        /,
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...

    def apply_gate(
        self, x: torch.Tensor, gate: torch.Tensor, kind: OutputGateKind, /
    ) -> torch.Tensor:
        """See ``kernels.reference.recurrent``."""
        ...


class Kernels(NamedTuple):
    """The kernels of one kind, chosen at startup (``kernels/select.py``)."""

    attention: AttentionBackend
    operations: Operations

    @property
    def name(self) -> str:
        """``reference``, ``triton`` or ``cpu``."""
        return self.attention.name

    @property
    def supports_chunked_attention(self) -> bool:
        """Whether attention supports chunks itself; see ``LayerAttention``."""
        return self.name == "cpu"

    @property
    def supports_interleaved_layers(self) -> bool:
        """Whether layers' blocks may be interleaved; see ``LayerCache``."""
        return self.name == "cpu"
