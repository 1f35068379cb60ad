"""The offline engine: ``LLM`` loads a model and generates in the caller's thread.

from engine import LLM, SamplingParams

with LLM() as llm:
    for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(result.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack, cast

from engine.argument_types import check_arguments
from engine.beam_search import BeamParams
from engine.config import (
    CacheConfig,
    CacheDtype,
    Device,
    DraftSampling,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
    Policy,
    Quantization,
    SchedulerConfig,
    Speculation,
)
from engine.core import EngineCore
from engine.driver import Choice, Driver, TextStream
from engine.errors import InvalidParameter
from engine.model_source import resolve_model, resolve_tokenizer
from engine.offline.adapters import Lora, OfflineAdapters
from engine.offline.beam_search import search_all
from engine.offline.images import ChatPrompt
from engine.offline.inputs import Prompt, as_beams, as_params, as_prompt, new_id, params_for
from engine.offline.inspection import OfflineInspection
from engine.offline.limits import (
    BlockSize,
    Count,
    CountOrZero,
    DraftCount,
    Duration,
    FrameCount,
    FrameRate,
    ImageTokens,
    PartCount,
    RankCount,
    Share,
)
from engine.offline.pooling import OfflineVectors
from engine.offline.sleep import OfflineSleep
from engine.offline.speech import OfflineSpeech
from engine.offline.text import ChatOptions, Conversation, OfflineText
from engine.paths import default_model_dir
from engine.pooling import PoolingKind
from engine.profiler import make_profile_directory
from engine.progress import LoadingBar, run_to_completion
from engine.requests import fan_out
from engine.results import RequestResult, make_result
from engine.speculation.options import speculation_config
from engine.types import Adapter, Request, SamplingParams


class LLM(OfflineText, OfflineVectors, OfflineSpeech, OfflineInspection, OfflineSleep):
    """A loaded model. Not thread-safe; use the server to share one.

    Prompts run as one continuous batch: each joins when there is room and leaves when it ends.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        dtype: Dtype = "auto",
        device: Device = "auto",
        load_format: LoadFormat = "auto",
        quantization: Quantization | None = None,
        max_model_len: Count | None = None,
        attention_backend: str = "auto",
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        pooling_type: PoolingKind | None = None,
        max_images: PartCount = 16,
        max_image_tokens: ImageTokens | None = None,
        max_audio_clips: PartCount = 16,
        max_audio_s: Duration = 1800,
        max_videos: PartCount = 4,
        max_video_s: Duration = 1800,
        max_video_frames: FrameCount | None = None,
        max_video_tokens: ImageTokens | None = None,
        video_fps: FrameRate | None = None,
        tensor_parallel_size: RankCount = 1,
        pipeline_parallel_size: RankCount = 1,
        enable_expert_parallel: bool = False,
        num_threads: Count | None = None,
        seed: CountOrZero = 0,
        max_loras: CountOrZero = 8,
        max_cpu_loras: Count = 64,
        max_num_seqs: Count = 256,
        max_num_batched_tokens: Count | None = None,
        scheduling_policy: Policy = "fcfs",
        overlap: bool | None = None,
        block_size: BlockSize | None = None,
        kv_cache_dtype: CacheDtype = "auto",
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: Count | None = None,
        kv_offload_bytes: CountOrZero = 0,
        gpu_memory_utilization: Share = 0.9,
        num_gpu_blocks_override: Count | None = None,
        speculation: Speculation | None = None,
        draft_model: str | Path | None = None,
        num_draft_tokens: DraftCount = 4,
        adaptive_drafts: bool = True,
        draft_sampling: DraftSampling = "coupled",
        profile: str | Path | None = None,
        use_tqdm: bool = True,
    ) -> None:
        """Load ``model``. The arguments are the server's settings of the same names.

        Args:
            model: directory in Hugging Face format, GGUF file, or name on the Hub, which is
                downloaded (``engine/model_source.py``). Default: the embedded model.
            tokenizer: directory of the tokenizer, or its name on the Hub. Default: the model's.
            chat_template: a template's source or file, instead of the model's own.
            dtype: of weights and KV cache. auto: the checkpoint's, on a CPU what suits it best.
            device: "cpu" or "cuda"; auto uses a GPU if there is one.
            quantization: quantise the weights at load: "int8", "int4", "nf4" or "fp8".
            load_format: "dummy" makes random weights from config.json alone, "stub" has no model.
            max_model_len: longest context in tokens, prompt and output together.
            attention_backend: auto uses the fastest that supports the model.
            batch_invariant: the same logits, bit for bit, in any batch; slower.
            enforce_eager: capture no CUDA graphs, and record no steps on a CPU.
            pooling_type: which hidden states make an embedding. Default: the model's own choice.
            max_images: most images in one prompt; 0 does not load the image encoder.
            max_image_tokens: most tokens per image; larger images are scaled down.
            max_audio_clips: most audio clips in one prompt; 0 does not load the audio encoder.
            max_audio_s: most seconds of a clip.
            max_videos: most videos in one prompt; 0 refuses videos.
            max_video_s: most seconds of a video.
            max_video_frames: most frames that are shown of a video.
            max_video_tokens: most tokens per video; frames of larger ones are scaled down.
            video_fps: frames per second that are shown of a video. Default: the model's own.
            tensor_parallel_size: processes that share each layer.
            pipeline_parallel_size: stages of layers, each with that many processes.
            enable_expert_parallel: give each process whole experts, not a part of each.
            num_threads: CPU threads of each process. Default: the cores, divided evenly.
            seed: of dummy weights.
            max_loras: LoRA adapters kept on the device; more if one step needs more.
            max_cpu_loras: adapters kept in host memory.
            max_num_seqs: most sequences that run at once.
            max_num_batched_tokens: most tokens per step. Default: 8192 on a GPU of 64 GiB and more,
                2048 on others; on a CPU 256, or 64 more than the running sequences.
            scheduling_policy: order of the queue: "fcfs", "priority", "sjf", "lpm" or "fair".
            overlap: plan each step while the previous one runs. Default: on for a GPU.
            block_size: tokens per KV block. Default: 64 on a GPU, 16 on a CPU.
            kv_cache_dtype: "int8" or "fp8" halve the KV cache; auto is the model's own format.
            enable_prefix_caching: reuse the KV blocks of prompts with the same beginning.
            kv_cache_memory_bytes: size of the KV cache. Default: what a GPU has left; on a CPU
                512 MiB, or more if one sequence of full length needs it.
            kv_offload_bytes: host memory for KV blocks evicted from the cache.
            gpu_memory_utilization: share of a GPU's memory to use, including the weights.
            num_gpu_blocks_override: number of KV blocks, regardless of memory.
            speculation: draft tokens ahead by "draft", "mtp", "eagle", "ngram" or "suffix".
            draft_model: a small model with the same tokenizer, or an EAGLE head.
            num_draft_tokens: most draft tokens per sequence and step.
            adaptive_drafts: draft only as many tokens as pay for themselves.
            draft_sampling: how draft tokens are accepted when sampling: "coupled" or "rejection".
            profile: directory for the traces of ``start_profile``; created if it is missing.
            use_tqdm: show progress while the weights are downloaded and loaded.

        Raises:
            InvalidParameter: an argument has a value of a wrong type or out of range.
            ModelLoadError: the model is missing, damaged or not supported.
            OSError: ``profile`` cannot be written to.
        """
        check_arguments(LLM.__init__, locals())
        on_progress = None if use_tqdm else _no_progress
        if model is None:
            directory = str(default_model_dir())
        else:
            directory = resolve_model(str(model), load_format, on_progress)
        if draft_model is not None:
            draft_model = resolve_model(str(draft_model), load_format, on_progress)
        text_directory = directory
        if tokenizer is not None:
            text_directory = resolve_tokenizer(str(tokenizer), on_progress)
        super().__init__(text_directory, chat_template)
        config = EngineConfig(
            model=directory,
            tokenizer=text_directory,
            dtype=dtype,
            device=device,
            load_format=load_format,
            quantization=quantization,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            enforce_eager=enforce_eager,
            pooling_type=pooling_type,
            max_images=max_images,
            max_image_tokens=max_image_tokens,
            max_audio_clips=max_audio_clips,
            max_audio_s=max_audio_s,
            max_videos=max_videos,
            max_video_s=max_video_s,
            max_video_frames=max_video_frames,
            max_video_tokens=max_video_tokens,
            video_fps=video_fps,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            num_threads=num_threads,
            seed=seed,
            lora=LoraConfig(max_loaded=max_loras, max_on_host=max_cpu_loras),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=scheduling_policy,
                overlap=overlap,
            ),
            cache=CacheConfig(
                block_size=block_size,
                dtype=kv_cache_dtype,
                enable_prefix_caching=enable_prefix_caching,
                memory_bytes=kv_cache_memory_bytes,
                memory_utilization=gpu_memory_utilization,
                num_blocks=num_gpu_blocks_override,
                offload_bytes=kv_offload_bytes,
            ),
            speculation=speculation_config(
                speculation,
                draft_model,
                is_embedded=model is None,
                num_draft_tokens=num_draft_tokens,
                adaptive=adaptive_drafts,
                draft_sampling=draft_sampling,
            ),
            profile_dir=None if profile is None else make_profile_directory(profile),
        )
        with LoadingBar(use_tqdm) as bar:
            core = EngineCore.load(config, bar)
        self._driver = Driver(core, self._tokenizer)
        self._image_rules, self._audio_rules = core.info.images, core.info.audio
        self._video_rules = core.info.video
        self._adapters = OfflineAdapters()

    # ------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestResult]:
        """Continue each prompt.

        Args:
            prompts: a text, a list of token ids, or several of either. Special tokens spelled out
                in a text are plain text; ``encode(text, parse_special=True)`` parses them.
            params: for all prompts, or one for each.
            lora: an adapter for all prompts, or one or None for each: its directory, or its name
                on the Hub, from which it is downloaded.
            use_tqdm: show progress.

        Returns:
            One result per prompt, in order. A request that fails while it runs has completions
            with ``finish_reason == "error"``; the others are complete.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was started.
        """
        token_ids, texts = self._encode_prompts(prompts)
        prepared = [ChatPrompt(ids) for ids in token_ids]
        return self._run(prepared, texts, params, lora=lora, use_tqdm=use_tqdm, continuation=True)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beams: BeamParams | None = None,
        params: SamplingParams | None = None,
    ) -> list[RequestResult]:
        """Find the continuations of each prompt that are most likely as a whole.

        Args:
            prompts: as in ``generate``.
            beams: how to search.
            params: only ``max_tokens``, ``stop_token_ids``, ``ignore_eos``, ``logprobs``,
                ``include_stop_str_in_output`` (for these tokens) and ``skip_special_tokens`` apply,
                since nothing is sampled.

        Returns:
            One result per prompt, in order, with ``beams.width`` completions each, best first.

        Raises:
            RequestError: a prompt or its parameters cannot be served.
            RequestFailed: a step failed.
        """
        token_ids, texts = self._encode_prompts(prompts)
        how, sampling = as_beams(beams), as_params(params)
        return search_all(self._driver, self._tokenizer, token_ids, texts, how, sampling)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: Lora | Sequence[Lora | None] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestResult]:
        """Answer each conversation; ``messages`` is one, or several.

        The further arguments are those of ``encode_chat`` and ``generate``, as are the errors.
        """
        several = cast("Sequence[Conversation]", messages)
        if isinstance(messages, str | Mapping) or (messages and isinstance(messages[0], Mapping)):
            several = [cast("Conversation", messages)]
        return self._run(
            [self._encode_conversation(conversation, **options) for conversation in several],
            [None] * len(several),
            params,
            lora=lora,
            use_tqdm=use_tqdm,
            continuation=options.get("continue_final_message", False),
        )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: Lora | None = None
    ) -> TextStream:
        """Continue one prompt and yield its text as it is produced.

        Several streams can run at once, and alongside ``generate``: each step serves all of them.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
        """
        prompt = as_prompt(prompt)
        token_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._open(
            ChatPrompt(token_ids), params, self._adapters.get(lora), continuation=True
        )

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        lora: Lora | None = None,
        **options: Unpack[ChatOptions],
    ) -> TextStream:
        """Answer one conversation and yield the text as it is produced.

        The further arguments are those of ``encode_chat``. Raises as ``stream``.
        """
        return self._open(
            self._encode_conversation(messages, **options),
            params,
            self._adapters.get(lora),
            continuation=options.get("continue_final_message", False),
        )

    def close(self) -> None:
        """Free the model and end the template's process. Idempotent."""
        self._driver.close()
        self._close_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ private

    def _open(
        self,
        prompt: ChatPrompt,
        params: SamplingParams | None,
        adapter: Adapter | None,
        *,
        continuation: bool,
    ) -> TextStream:
        sampling = self._driver.prepare_sampling(as_params(params))
        if sampling.n != 1:
            raise InvalidParameter("a stream gives one choice; use generate for more", param="n")
        (choice,) = self._driver.submit(
            _requests(prompt, sampling, adapter),
            sampling,
            continuation=continuation,
            keep_deltas=True,
        )
        return TextStream(self._driver, choice)

    def _run(
        self,
        prompts: Sequence[ChatPrompt],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        lora: Lora | Sequence[Lora | None] | None,
        use_tqdm: bool,
        continuation: bool,
    ) -> list[RequestResult]:
        driver = self._driver
        adapters = self._adapters.each(lora, len(prompts))
        each = [driver.prepare_sampling(sampling) for sampling in params_for(params, len(prompts))]
        groups: list[list[Choice]] = []
        try:
            for prompt, sampling, adapter in zip(prompts, each, adapters, strict=True):
                requests = _requests(prompt, sampling, adapter)
                groups.append(driver.submit(requests, sampling, continuation=continuation))
            run_to_completion(driver, groups, use_tqdm)
        finally:  # refused, interrupted or lost: nothing of this call stays behind
            driver.abort([choice for group in groups for choice in group])
        return [
            make_result(group, text, sampling, self._tokenizer)
            for group, text, sampling in zip(groups, texts, each, strict=True)
        ]


def _requests(
    prompt: ChatPrompt, sampling: SamplingParams, adapter: Adapter | None
) -> list[Request]:
    """The requests for the choices of one prompt."""
    token_ids, images, audio = prompt
    media = {"images": images, "audio": audio}
    return fan_out(new_id(), token_ids, sampling, **media, adapter=adapter)


def _no_progress(name: str, done: int, total: int) -> None:
    """Show nothing of a download."""
