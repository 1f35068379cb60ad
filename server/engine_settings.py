"""The conversion of a server's settings into the engine's config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig

if TYPE_CHECKING:
    from server.settings import Settings


def engine_config(settings: Settings) -> EngineConfig:
    """The engine process's part of ``settings``."""
    return EngineConfig(
        model=settings.model_dir,
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        device=settings.device,
        load_format=settings.load_format,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        attention_backend=settings.attention_backend,
        batch_invariant=settings.batch_invariant,
        enforce_eager=settings.enforce_eager,
        pooling_type=settings.pooling_type,
        max_images=settings.max_images,
        max_image_tokens=settings.max_image_tokens,
        max_audio_clips=settings.max_audio_clips,
        max_audio_s=settings.max_audio_s,
        max_videos=settings.max_videos,
        max_video_s=settings.max_video_s,
        max_video_frames=settings.max_video_frames,
        max_video_tokens=settings.max_video_tokens,
        video_fps=settings.video_fps,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        enable_expert_parallel=settings.enable_expert_parallel,
        nodes=settings.nodes_config(),
        num_threads=settings.num_threads,
        seed=settings.seed,
        stub_step_ms=settings.stub_step_ms,
        step_timeout_s=settings.step_timeout_s,
        scheduler=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            policy=settings.policy,
            overlap=settings.overlap,
            max_step_passes=settings.max_step_passes,
            batching_window_ms=settings.batching_window_ms,
            batching_window_prompts=settings.batching_window_prompts,
            batching_window_tokens=settings.batching_window_tokens,
        ),
        cache=CacheConfig(
            block_size=settings.block_size,
            dtype=settings.kv_cache_dtype,
            enable_prefix_caching=settings.enable_prefix_caching,
            memory_bytes=settings.kv_cache_memory_bytes,
            memory_utilization=settings.gpu_memory_utilization,
            num_blocks=settings.num_gpu_blocks_override,
            offload_bytes=settings.kv_offload_bytes,
        ),
        lora=LoraConfig(max_loaded=settings.max_loras, max_on_host=settings.max_cpu_loras),
        speculation=settings.speculation_config(is_embedded=settings.model is None),
        profile_dir=None if settings.profile is None else str(settings.profile.absolute()),
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
