"""Plans and loads a draft model: checked before anything loads, loaded with the large model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache.storage import KVCache, bytes_per_token
from engine.models.attention import other_heads, selection
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.linear import LinearMethod
from engine.models.modules import Modules, make_modules
from engine.models.spec import DecoderSpec
from engine.quantization import choose_method
from engine.runner.graphs import CudaCapture, DecodeGraphs
from engine.runner.kernels import choose_kernels
from engine.runner.programs import DecodePrograms
from engine.runner.rows import RowTable
from engine.runner.weight_files import WeightFiles, find_weights
from engine.speculation.draft_model import DraftModel
from engine.types import MemoryPlan
from kernels.attention import AttentionSpec
from kernels.operations import Kernels

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that is ready to be loaded."""

    spec: DecoderSpec
    files: WeightFiles
    attention: AttentionSpec
    kernels: Kernels
    rejection_sampling: bool

    @property
    def bytes_per_token(self) -> int:
        """The size of a token's keys and values."""
        return bytes_per_token(self.spec, self.attention.dtype, self.attention.cache_dtype)

    def modules(self, config: EngineConfig, method: LinearMethod) -> Modules:
        """Load its parameters with the model's ``method``, or as its own checkpoint has them."""
        dtype, device = self.attention.dtype, self.attention.device
        if self.files.codes is not None:
            method = choose_method(
                None,
                dtype,
                device,
                invariant=config.batch_invariant,
                checkpoint_format=self.files.codes,
            )
        weights = self.files.open(self.spec, dtype, device)
        return make_modules(self.spec, weights, method, stacked=self.kernels.name == "triton")

    def make_draft_model(
        self,
        modules: Modules,
        memory: MemoryPlan,
        rows: RowTable,
        vocab_size: int,
        *,
        enforce_eager: bool,
    ) -> DraftModel:
        """Assemble the draft model, with a cache of as many blocks as the large model's.

        Raises:
            ModelLoadError: its context is shorter than the model's, or its cache does not fit.
        """
        if memory.max_model_len > self.spec.max_context_len:
            raise ModelLoadError(
                f"the draft model's context is {self.spec.max_context_len} tokens, the model's "
                f"{memory.max_model_len}: set max_model_len"
            )
        attention = self.attention
        size = (memory.num_blocks, memory.block_size, attention.dtype, attention.device)
        decoder = Decoder(self.spec, modules, self.kernels, memory.max_model_len)
        interleave_layers = self.kernels.supports_interleaved_layers
        cache = KVCache(
            self.spec, *size, attention.cache_dtype, interleave_layers=interleave_layers
        )
        programs: DecodePrograms | DecodeGraphs | None = None
        parts = decoder, cache, self.kernels, attention, rows
        if enforce_eager or not self.kernels.attention.is_capturable:
            pass
        elif attention.device.type == "cpu":
            programs = DecodePrograms(*parts, enable_feedback=False)
        else:
            num_rows = rows.padding_slot  # those before it
            programs = DecodeGraphs(*parts, num_rows, CudaCapture(), enable_feedback=False)
        return DraftModel(
            decoder,
            cache,
            self.kernels,
            attention,
            rows,
            vocab_size=vocab_size,
            rejection_sampling=self.rejection_sampling,
            programs=programs,
        )


def plan_draft(
    config: EngineConfig, spec: DecoderSpec, attention: AttentionSpec
) -> DraftPlan | None:
    """Plan the draft model that ``config`` asks for; None if it asks for none.

    Args:
        config: of the engine.
        spec: of the model that it drafts for.
        attention: of that model; device, dtype and block size also apply to the draft model.

    Raises:
        ModelLoadError: it cannot be used, or none is named.
    """
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.method != "draft":
        if speculation.draft_model is not None and not speculation.uses_draft_head:
            logger.warning("speculation %s: no use is made of draft_model", speculation.method)
        return None
    if speculation.draft_model is None:
        raise ModelLoadError("speculation with a draft model needs draft_model")
    model = read_config(speculation.draft_model)
    own = model.spec
    if not isinstance(own, DecoderSpec) or not own.is_generative:
        raise ModelLoadError(f"the draft model {model.directory} does not generate text")
    if own.is_recurrent:
        raise ModelLoadError(
            f"the draft model {model.directory} is a {own.architecture} model, which keeps a state "
            "of each sequence; such models cannot be draft models"
        )
    _check_vocabulary(config, Path(model.directory), own, spec)
    files = find_weights(config, model, attention.dtype, attention.device, config.seed + 1)
    own_attention = draft_attention(own, attention)
    kernels = choose_kernels(config.attention_backend, own_attention)
    rejects = speculation.draft_sampling == "rejection"
    return DraftPlan(own, files, own_attention, kernels, rejects)


def draft_attention(own: DecoderSpec, attention: AttentionSpec) -> AttentionSpec:
    """The attention of a drafting model, derived from that of the large model."""
    return replace(
        attention,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        windows=own.windows_of(None),
        other_heads=other_heads(own),
        softcap=own.attention_softcap,
        has_sinks=own.has_sinks,
        has_slopes=own.alibi_slopes is not None,
        value_dim=own.value_dim,
        chunk_size=own.chunk,
        has_attention_layers=True,
        selection=selection(own),
    )


def _check_vocabulary(
    config: EngineConfig, directory: Path, own: DecoderSpec, spec: DecoderSpec
) -> None:
    """Check that the models have the same tokens; rows that pad embeddings may differ."""
    mine = directory / _TOKENIZER
    theirs = Path(config.tokenizer or config.model) / _TOKENIZER
    if mine.is_file() and theirs.is_file():
        if mine.read_bytes() != theirs.read_bytes():
            logger.warning("the draft model's tokenizer.json is not the model's: few drafts fit")
    elif own.vocab_size != spec.vocab_size:
        raise ModelLoadError(
            f"the draft model has {own.vocab_size} tokens, the model {spec.vocab_size}"
        )
