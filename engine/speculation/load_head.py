"""Plans and loads a draft head: checked before anything loads, loaded after its model.

It borrows the model's embeddings and language-model head.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache.storage import KVCache, bytes_per_token
from engine.models.checkpoint import ModelConfig, read_headers
from engine.models.draft_head.config import mtp_spec, read_eagle_config, with_checkpoint_tensors
from engine.models.draft_head.loading import make_draft_head, read_draft_vocab_ids
from engine.models.draft_head.network import DraftHead, DraftHeadModules
from engine.models.draft_head.spec import DraftHeadSpec
from engine.models.linear import LinearMethod
from engine.models.loader import Weights, dummy_weights, load_weights
from engine.models.modules import Modules
from engine.models.packed_tensors import QuantFormat
from engine.models.safetensors import Header
from engine.models.spec import DecoderSpec
from engine.runner.graphs import CudaCapture
from engine.runner.kernels import choose_kernels
from engine.runner.rows import RowTable
from engine.speculation.draft_model import DraftModel
from engine.speculation.features import Features
from engine.speculation.head_graphs import HeadGraphs
from engine.speculation.load import draft_attention
from engine.types import MemoryPlan
from kernels.attention import AttentionSpec
from kernels.operations import Kernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head that is ready to be loaded."""

    spec: DraftHeadSpec
    model_spec: DecoderSpec
    headers: list[Header]
    quant_format: QuantFormat | None  # the quantisation of its matrices in the checkpoint
    attention: AttentionSpec
    kernels: Kernels
    rejection_sampling: bool

    @property
    def bytes_per_token(self) -> int:
        """The size of a token's keys and values, and of the features that it reads."""
        dtype = self.attention.dtype
        cached = bytes_per_token(self.spec.layer, dtype, self.attention.cache_dtype)
        return cached + self.spec.layer.hidden_size * dtype.itemsize

    def load(self, config: EngineConfig, method: LinearMethod, model: Modules) -> LoadedHead:
        """Load its parameters beside those of its model. Raises ModelLoadError."""
        dtype, device = self.attention.dtype, self.attention.device
        if config.load_format == "dummy":
            weights: Weights = dummy_weights(self.spec, dtype, device, config.seed + 1)
        else:
            weights = load_weights(self.spec, self.headers, dtype, device, None, self.quant_format)
        modules, num_bytes = make_draft_head(
            self.spec,
            weights,
            method,
            (self.model_spec, model),
            read_draft_vocab_ids(self.spec, self.headers, device),
            stacked=self.kernels.name == "triton",
        )
        return LoadedHead(self, modules, num_bytes)


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head's loaded parameters, before there is a cache."""

    plan: HeadPlan
    modules: DraftHeadModules
    num_bytes: int  # without what it borrows from its model

    def features(self, memory: MemoryPlan) -> Features:
        """Make the head and the table of features that it reads."""
        plan, attention = self.plan, self.plan.attention
        head = DraftHead(
            plan.spec, self.modules, plan.kernels, memory.max_model_len, attention.device
        )
        size = memory.num_blocks, memory.block_size
        return Features(head, *size, attention.dtype, attention.device)

    def make_draft_model(
        self, features: Features, memory: MemoryPlan, rows: RowTable, *, enforce_eager: bool
    ) -> DraftModel:
        """Assemble the draft model, with a cache of as many blocks as the model's.

        Raises:
            ModelLoadError: the cache does not fit.
        """
        plan, attention = self.plan, self.plan.attention
        size = (memory.num_blocks, memory.block_size, attention.dtype, attention.device)
        cache = KVCache(
            plan.spec.layer,
            *size,
            attention.cache_dtype,
            interleave_layers=plan.kernels.supports_interleaved_layers,
        )
        graphs: HeadGraphs | None = None
        is_capturable = plan.kernels.attention.is_capturable and not enforce_eager
        if is_capturable and attention.device.type == "cuda":
            graphs = HeadGraphs(features, cache, plan.kernels, attention, rows, CudaCapture())
        return DraftModel(
            features.head,
            cache,
            plan.kernels,
            attention,
            rows,
            vocab_size=plan.model_spec.vocab_size,
            rejection_sampling=plan.rejection_sampling,
            programs=graphs,
            features=features,
        )


def plan_head(
    config: EngineConfig,
    model: ModelConfig,
    spec: DecoderSpec,
    headers: list[Header],
    quant_format: QuantFormat | None,
    attention: AttentionSpec,
) -> HeadPlan | None:
    """Plan the head that ``config`` asks for; None if it asks for none.

    Args:
        config: of the engine.
        model, spec: the model that it drafts for.
        headers, quant_format: of that model's checkpoint.
        attention: of that model; device, dtype and block size also apply to the head.

    Raises:
        ModelLoadError: it cannot be used, or there is none.
    """
    speculation = config.speculation
    if speculation is None or not speculation.uses_draft_head:
        return None
    if not spec.is_generative:
        raise ModelLoadError(f"{model.directory}: a model without text has nothing to guess ahead")
    is_dummy = config.load_format == "dummy"
    if speculation.method == "mtp":
        if model.gguf is not None:
            raise ModelLoadError(f"{config.model}: heads of GGUF files are not read (speculation)")
        if speculation.draft_model is not None:
            logger.warning("speculation mtp: no use is made of draft_model")
        head = mtp_spec(spec, _names(headers), model.directory)
        if spec.num_draft_layers > 1:
            logger.info("of %d mtp layers the first guesses alone", spec.num_draft_layers)
    elif speculation.draft_model is None:
        raise ModelLoadError("speculation with an EAGLE head needs draft_model, its directory")
    else:
        directory = Path(speculation.draft_model)
        head = read_eagle_config(directory, spec)
        headers, quant_format = [], None
        if not is_dummy:
            headers = read_headers(directory, config.load_format)
            head = with_checkpoint_tensors(head, _names(headers), directory)
    own_attention = draft_attention(head.layer, attention)
    kernels = choose_kernels(config.attention_backend, own_attention)
    rejects = speculation.draft_sampling == "rejection"
    return HeadPlan(head, spec, headers, quant_format, own_attention, kernels, rejects)


def _names(headers: list[Header]) -> set[str]:
    return {name for header in headers for name in header.entries}
