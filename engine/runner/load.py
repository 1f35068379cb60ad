"""From a config to a runner: read, check, load, plan the memory, assemble."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engine.audio.types import AudioClip
from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.images.types import Image
from engine.kv_cache.sizing import plan_memory
from engine.kv_cache.states import make_states, num_state_lines
from engine.kv_cache.storage import KVCache
from engine.limits import check_max_model_len, num_row_lines
from engine.lora.store import AdapterStore
from engine.media import Media
from engine.models.audio.encoder import AudioEncoder
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.decoder import Decoder
from engine.models.encoder.spec import EncoderSpec
from engine.models.modules import Modules, make_modules
from engine.models.spec import DecoderSpec
from engine.models.vision.tower import VisionTower
from engine.parallel.shard import parameter_slices
from engine.runner.adapter_load import make_adapters
from engine.runner.device import divide_machine
from engine.runner.device_errors import translated_load_errors
from engine.runner.graphs import CudaCapture, DecodeGraphs
from engine.runner.host_blocks import HostBlocks
from engine.runner.images import MediaEmbedder
from engine.runner.kernel_warmup import KernelWarmup
from engine.runner.load_plan import LoadPlan, make_plan
from engine.runner.media_encoders import MediaEncoder
from engine.runner.model_info import describe
from engine.runner.model_runner import ModelRunner
from engine.runner.programs import DecodePrograms
from engine.runner.prompt_graphs import PromptGraphs, can_capture
from engine.runner.protocol import Runner, SleepingRunner
from engine.runner.recurrent_support import check_recurrent_support
from engine.runner.rows import RowTable
from engine.runner.sleeping import ReloadPlan, SleepingModel
from engine.runner.snapshots import Snapshots
from engine.runner.source_support import check_source_room, check_source_support
from engine.runner.stream_support import check_stream_support
from engine.runner.weight_room import check_weights_fit
from engine.speculation.draft_model import DraftModel
from engine.speculation.features import Features
from engine.speculation.load_head import LoadedHead
from engine.types import EngineInfo, MemoryPlan
from kernels.select import NoKernelsError

if TYPE_CHECKING:
    import torch

    from engine.parallel.leader import Team

logger = logging.getLogger(__name__)


def load_runner(config: EngineConfig, on_progress: LoadProgress | None = None) -> Runner:
    """See ``engine.runner.load_runner``. Refusals come before weights load where possible."""
    config = divide_machine(config)
    model = read_config(config.model)
    check_max_model_len(config.max_model_len, model.spec.max_context_len)
    with translated_load_errors(config.model):
        return _load(config, model, on_progress)


def _load(
    config: EngineConfig, model: ModelConfig, on_progress: LoadProgress | None = None
) -> Runner:
    if isinstance(model.spec, EncoderSpec):
        from engine.runner.encoder_load import load_encoder

        if config.num_ranks > 1:
            size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
            asked = f"tensor_parallel_size {size}"
            if stages > 1:
                asked = f"pipeline_parallel_size {stages}"
            raise ModelLoadError(f"{asked}: encoders are not shared out")
        return load_encoder(config, model, on_progress).runner()
    try:
        return _load_decoder(config, model, on_progress).runner()
    except NoKernelsError as error:  # a check of products lost the GPU
        raise ModelLoadError(str(error)) from None


class LoadedWeights(NamedTuple):
    """All parameters of this process."""

    modules: Modules
    draft: Modules | None
    head: LoadedHead | None
    tower: VisionTower | None  # for images
    audio_encoder: AudioEncoder | None  # for audio

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return sum(part.num_bytes for part in self if part is not None)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder in memory, without its KV cache; see ``engine.runner.sleeping.LoadedModel``."""

    plan: LoadPlan
    parts: LoadedWeights
    info: EngineInfo
    team: Team | None  # the ranks with the other shards

    @property
    def reload_plan(self) -> ReloadPlan:
        """How to read it again: into the same memory, with the same number of threads."""
        plan, info = self.plan, self.info
        again = partial(
            _load_decoder, num_threads=plan.num_threads, memory=info.memory, team=self.team
        )
        return ReloadPlan(plan.config, plan.full_spec, info, again)

    def runner(self) -> ModelRunner:
        """See ``LoadedModel.runner``. Raises EngineDead when another rank is gone."""
        plan, loaded, memory, team = self.plan, self.parts, self.info.memory, self.team
        if team is not None:
            team.wake()
        config, spec = plan.config, plan.spec
        kernels, attention = plan.kernels, plan.attention
        dtype, device = attention.dtype, attention.device
        max_num_rows = num_row_lines(config, memory.num_states)
        num_lines = num_state_lines(config, memory.num_states, memory.num_snapshots)
        states = make_states(spec, num_lines, dtype, device)
        cache = KVCache(
            spec,
            memory.num_blocks,
            memory.block_size,
            dtype,
            device,
            attention.cache_dtype,
            states,
            interleave_layers=kernels.supports_interleaved_layers,
        )
        peers = None if team is None else team.group
        decoder = Decoder(spec, loaded.modules, kernels, memory.max_model_len, peers)
        rows = RowTable(
            max_num_rows=max_num_rows,
            max_num_blocks=min(memory.num_blocks, -(-memory.max_model_len // memory.block_size)),
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            device=device,
            image_cell=None if plan.images is None else plan.images.table_cell,
        )
        adapters = make_adapters(plan)
        features = None if loaded.head is None else loaded.head.features(memory)
        graphs, prompt_graphs = _graphs(plan, decoder, cache, rows, adapters, features, team)
        draft = _draft_model(plan, loaded, memory, rows, features)
        slots = memory.num_host_blocks
        speculation = config.speculation
        rejects = speculation is not None and speculation.draft_sampling == "rejection"
        most_tokens = config.scheduler.for_device(device.type).step_tokens
        warmup = KernelWarmup(
            decoder, kernels.operations, rows, max_tokens=most_tokens, rejection_sampling=rejects
        )
        return ModelRunner(
            self.info,
            decoder,
            cache,
            kernels,
            attention,
            rows,
            adapters,
            graphs,
            draft,
            prompt_graphs=prompt_graphs,
            features=features,
            rejection_sampling=rejects,
            warmup=warmup,
            team=team,
            host=HostBlocks(cache, slots, draft, team) if slots else None,
            snapshots=Snapshots(states, rows, team) if memory.num_states else None,
            make_sleeping=self._make_sleeping,
            media=_media_embedder(plan, loaded, rows, device),
        )

    def _make_sleeping(self, level: int) -> SleepingRunner:
        own = SleepingModel(self, level)
        if self.team is None:
            return own
        from engine.parallel.sleeping import SleepingTeam  # imports torch.distributed

        return SleepingTeam(own, self.team, level)


def _load_decoder(
    config: EngineConfig,
    model: ModelConfig,
    on_progress: LoadProgress | None = None,
    *,
    num_threads: int | None = None,
    memory: MemoryPlan | None = None,
    team: Team | None = None,
) -> LoadedDecoder:
    """Read a decoder.

    ``num_threads`` and ``memory`` are what an earlier load planned for it; ``team`` is the ranks
    that hold it, if there are several.
    """
    assert isinstance(model.spec, DecoderSpec)
    check_recurrent_support(config, model.spec)
    check_source_support(config, model)
    check_stream_support(config, model.spec)
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise ModelLoadError("enable_expert_parallel needs a tensor_parallel_size above 1")
    if config.num_ranks == 1:
        plan = make_plan(config, model, model.spec, num_threads=num_threads)
        return _read_decoder(plan, on_progress, memory)
    if team is not None:
        plan = make_plan(config, model, model.spec, team.shard, num_threads=num_threads)
        with team.reading_weights(config.model, config.generation):
            return _read_decoder(plan, on_progress, memory, team)
    from engine.parallel.leader import Team  # imports torch.distributed

    team = Team(config, model.spec)
    try:
        plan = make_plan(config, model, model.spec, team.shard)
        return _read_decoder(plan, on_progress, team=team)
    except BaseException:
        team.close()
        raise


def _read_decoder(
    plan: LoadPlan,
    on_progress: LoadProgress | None,
    memory: MemoryPlan | None = None,
    team: Team | None = None,
) -> LoadedDecoder:
    """Read what was planned, as rank 0 of ``team`` if there is one."""
    started_s = time.monotonic()
    loaded = read_weights(plan, on_progress)
    if memory is not None:
        memory = msgspec.structs.replace(memory, weights_bytes=loaded.num_bytes)
    else:
        memory = plan_cache(plan, loaded)
        if team is not None:
            memory = team.rendezvous(memory, plan.attention.device, plan.attention.dtype)
        check_source_room(plan.spec, memory.max_model_len)
    if team is not None:
        loaded = loaded._replace(modules=team.parallelize(loaded.modules))
    logger.info(memory.describe())
    return LoadedDecoder(plan, loaded, describe(plan, memory, started_s), team)


def read_weights(plan: LoadPlan, on_progress: LoadProgress | None) -> LoadedWeights:
    """Read the weights of the model and of its draft model or head. Raises ModelLoadError."""
    check_weights_fit(plan)
    config, method, attention = plan.config, plan.method, plan.attention
    cuts = None if plan.shard is None else parameter_slices(plan.full_spec, plan.shard)
    weights = plan.files.open(plan.full_spec, attention.dtype, attention.device, on_progress, cuts)
    modules = make_modules(plan.spec, weights, method, stacked=plan.stack_experts)
    draft = None if plan.draft is None else plan.draft.modules(config, method)
    head = None if plan.head is None else plan.head.load(config, method, modules)
    tower = audio_encoder = None
    if plan.images is not None and (plan.shard is None or not plan.shard.number):
        tower = plan.images.load(plan.files, attention.dtype, attention.device)
    if plan.audio is not None and (plan.shard is None or not plan.shard.number):
        audio_encoder = plan.audio.load(plan.files, attention.dtype, attention.device)
    return LoadedWeights(modules, draft, head, tower, audio_encoder)


def plan_cache(plan: LoadPlan, loaded: LoadedWeights) -> MemoryPlan:
    """Plan the KV cache's size, the same for all ranks that share this machine's memory.

    Raises ModelLoadError.
    """
    config, attention = plan.config, plan.attention
    guessers = (part for part in (plan.draft, plan.head) if part is not None)
    image_bytes = 0
    if plan.images is not None and loaded.tower is not None:
        image_bytes = plan.images.num_bytes(plan.spec, loaded.tower, attention.dtype)
    if plan.audio is not None and loaded.audio_encoder is not None:
        image_bytes += plan.audio.num_bytes(plan.spec, loaded.audio_encoder, attention.dtype)
    return plan_memory(
        plan.spec,
        config.cache,
        config.scheduler,
        block_size=attention.block_size,
        max_model_len=config.max_model_len or _trained_max_len(plan.model, plan.spec),
        dtype=attention.dtype,
        device=attention.device,
        weights_bytes=loaded.num_bytes,
        draft_bytes_per_token=sum(part.bytes_per_token for part in guessers),
        codes=attention.cache_dtype,
        num_processes=config.ranks_per_node,
        lines_per_state=num_row_lines(config, 1),
        max_shared_bytes=config.host_share_bytes,
        image_bytes=image_bytes,
        num_drafts=0 if config.speculation is None else config.speculation.num_draft_tokens,
        has_codes=plan.has_codes,
    )


def _media_embedder(
    plan: LoadPlan, loaded: LoadedWeights, rows: RowTable, device: torch.device
) -> MediaEmbedder | None:
    """Make the reader of images and audio; None: the model takes neither."""
    encoders: dict[type[Media], MediaEncoder[Any]] = {}
    num_cells = 0
    if plan.images is not None and loaded.tower is not None:
        encoders[Image] = plan.images.encoder(loaded.tower, device)
        num_cells += plan.images.num_cached_cells
    if plan.audio is not None and loaded.audio_encoder is not None:
        encoders[AudioClip] = plan.audio.encoder(loaded.audio_encoder, device)
        num_cells += plan.audio.num_cached_cells
    return MediaEmbedder(encoders, rows, device, num_cells) if encoders else None


def _graphs(
    plan: LoadPlan,
    decoder: Decoder,
    cache: KVCache,
    rows: RowTable,
    adapters: AdapterStore,
    features: Features | None,
    team: Team | None,
) -> tuple[DecodeGraphs | DecodePrograms | None, PromptGraphs | None]:
    """Make the runners of captured decode steps and of steps with prompts; None: not captured."""
    attention = plan.attention
    parts = decoder, cache, plan.kernels, attention, rows
    speculation = plan.config.speculation
    num_drafts = 0 if speculation is None else speculation.num_draft_tokens
    if not plan.captures_steps:
        if team is not None or not plan.is_capturable:
            return None, None
        programs = DecodePrograms(
            *parts, adapters=adapters, features=features, num_drafts=num_drafts
        )
        return programs, None
    if team is not None and not team.captures_steps:
        return None, None
    most = rows.padding_slot  # the slots before the spare one
    capture = CudaCapture()
    decode = DecodeGraphs(
        *parts,
        most,
        capture,
        features,
        adapters=adapters,
        peers=team,
        num_drafts=num_drafts,
    )
    if not can_capture(attention):
        return decode, None
    most_tokens = plan.config.scheduler.for_device("cuda").step_tokens
    prompts = PromptGraphs(
        *parts,
        most,
        most_tokens,
        capture,
        features,
        has_codes=plan.has_codes,
        adapters=adapters,
        peers=team,
    )
    return decode, prompts


def _draft_model(
    plan: LoadPlan,
    loaded: LoadedWeights,
    memory: MemoryPlan,
    rows: RowTable,
    features: Features | None,
) -> DraftModel | None:
    eager = plan.config.enforce_eager
    if loaded.head is not None and features is not None:
        return loaded.head.make_draft_model(features, memory, rows, enforce_eager=eager)
    if plan.draft is None or loaded.draft is None:
        return None
    return plan.draft.make_draft_model(
        loaded.draft, memory, rows, plan.spec.vocab_size, enforce_eager=eager
    )


def _trained_max_len(model: ModelConfig, spec: DecoderSpec) -> int | None:
    """Return the input length an embedding model was trained for, if it is stated and shorter."""
    longest = model.sentence.max_tokens
    if spec.is_generative or longest is None:
        return None
    return min(longest, spec.max_context_len)
