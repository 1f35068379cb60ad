"""The configuration of an engine. Frozen; made by ``server/settings.py`` or the offline ``LLM``."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.pooling import PoolingKind

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "bin", "dummy", "stub"]
Quantization = Literal["int8", "int4", "nf4", "fp8"]
CacheDtype = Literal["auto", "int8", "fp8", "fp8_e4m3"]
Policy = Literal["fcfs", "priority", "sjf", "lpm", "fair"]
Speculation = Literal["draft", "mtp", "eagle", "ngram", "suffix"]
DraftSampling = Literal["coupled", "rejection"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


_GPU_STEP_TOKENS = 2048
# With fewer, a small model's step takes a large GPU less time than the host.
_LARGE_GPU_STEP_TOKENS, _LARGE_GPU_BYTES = 8192, 64 << 30
_CPU_STEP_PASSES = 8
# With more, a CPU computes no more tokens per second, and running sequences wait longer for theirs.
_CPU_STEP_TOKENS = 256
# Prompt tokens that a step always has room for beside running sequences, so that prompts go on.
MIN_PROMPT_TOKENS = 64
# Longer gaps in a text are unpleasant to read. Shorter steps cost almost nothing, since decoding
# sequences advance in each of them; but a GPU's have to be long beside what they take the host.
_CPU_PROMPT_STEP_S, _GPU_PROMPT_STEP_S = 0.2, 0.1


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step and the order of the queue."""

    max_num_seqs: int = 256  # most sequences running at once
    # Tokens computed by one step; None: a default for the device. All running sequences wait for a
    # step, and a CPU takes a second for the thousands of tokens that a GPU needs to be busy.
    max_num_batched_tokens: int | None = None
    policy: Policy = "fcfs"
    adaptive_token_budget: bool = False  # smaller steps while few sequences run (``step_budget``)
    # Target duration of a step with prompts beside sequences that decode
    # (``engine/prompt_budget.py``); None: as many prompt tokens as a step has room for.
    prompt_step_s: float | None = None
    unchunked_prefill: bool = False  # no chunking: a prompt waits for a step with room for it
    overlap: bool | None = None  # launch a step while the previous one runs; None: on a GPU
    # Steps in flight at once, each of different sequences: one per pipeline stage.
    num_micro_batches: int = 1
    # The most consecutive tokens of a sequence that one step computes, if nothing waits and the
    # step stays short; None: a default for the device.
    max_step_passes: int | None = None
    # Batching window: hold new prompts back until one of these limits is reached. 0 ms: off.
    batching_window_ms: float = 0.0
    batching_window_prompts: int = 0  # 0: no limit by count
    batching_window_tokens: int = 0  # 0: max_num_batched_tokens

    @property
    def step_tokens(self) -> int:
        """The most tokens that one step computes."""
        return self.max_num_batched_tokens or _GPU_STEP_TOKENS

    def for_device(self, device: str, memory_bytes: float | None = None) -> SchedulerConfig:
        """A copy with unset values filled in.

        Args:
            device: such as ``cuda:0``.
            memory_bytes: the GPU's memory; None: that of ``device``, which is this machine's.
        """
        is_cpu, passes, tokens = device == "cpu", self.max_step_passes, self.max_num_batched_tokens
        if passes is None:
            passes = _CPU_STEP_PASSES if is_cpu else 1
        if tokens is not None:
            return msgspec.structs.replace(self, max_step_passes=passes)
        if is_cpu:
            tokens = max(_CPU_STEP_TOKENS, self.max_num_seqs + MIN_PROMPT_TOKENS)
        else:
            size = _gpu_bytes(device) if memory_bytes is None else memory_bytes
            tokens = _LARGE_GPU_STEP_TOKENS if size >= _LARGE_GPU_BYTES else _GPU_STEP_TOKENS
        return msgspec.structs.replace(
            self,
            max_step_passes=passes,
            max_num_batched_tokens=tokens,
            adaptive_token_budget=is_cpu,
            prompt_step_s=_CPU_PROMPT_STEP_S if is_cpu else _GPU_PROMPT_STEP_S,
        )

    def step_budget(self, num_running: int) -> int:
        """The token budget of a step while ``num_running`` sequences run."""
        if not self.adaptive_token_budget:
            return self.step_tokens
        return min(self.step_tokens, max(_CPU_STEP_TOKENS, num_running + MIN_PROMPT_TOKENS))


def _gpu_bytes(device: str) -> int:
    """The memory of a device such as ``cuda:0``; 0 if this machine has no such device."""
    import torch  # which takes seconds, and which a CPU's limits do not need

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return 0
    return torch.cuda.mem_get_info(torch.device(device))[1]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: int | None = None  # tokens per block; None: a default for the device
    dtype: CacheDtype = "auto"  # of keys and values; auto: the model's; otherwise 8-bit codes
    enable_prefix_caching: bool = True
    memory_bytes: int | None = None  # None: a share of the free device memory
    memory_utilization: float = 0.9  # share of a GPU's memory to use, weights included
    num_blocks: int | None = None  # overrides the memory budget
    offload_bytes: int = 0  # host memory for blocks evicted from the device


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many adapters are kept in memory."""

    max_loaded: int = 8  # on the device, unless one step needs more; 0: adapters are not accepted
    max_on_host: int = 64


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that an engine's ranks run on (``engine/parallel/rank_listener.py``).

    Every machine has the same number of ranks, and the first ranks are on the first machine.
    """

    size: int
    rank: int  # index of this machine; 0 has the scheduler
    master_addr: str  # address of the first machine, which the others connect to at start
    master_port: int
    secret_file: str  # shared by all machines, so that no other can join
    timeout_s: float = 0.0  # how long machines wait for each other at start; 0: forever

    @property
    def master_endpoint(self) -> str:
        """Address and port of the first machine, for messages."""
        address = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"{address}:{self.master_port}"


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drafted, to be verified several at once (``engine/speculation``)."""

    method: Speculation
    draft_model: str | None = None  # a directory, for ``draft`` and ``eagle``
    num_draft_tokens: int = 4  # most per sequence and step
    # Lengths of the final n-gram that is looked up earlier in the text, longest first.
    max_ngram: int = 4
    min_ngram: int = 2
    # How drafts are verified when sampling; greedy output is the same with both.
    draft_sampling: DraftSampling = "coupled"
    adaptive: bool = True  # as many drafts as pay off; otherwise always the maximum

    @property
    def uses_draft_head(self) -> bool:
        """Whether drafts come from a head that reads the model's own hidden states."""
        return self.method in ("mtp", "eagle")

    @property
    def drafts_in_runner(self) -> bool:
        """Whether the runner drafts, with a KV cache for it; otherwise the scheduler does."""
        return self.uses_draft_head or self.method == "draft"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine process's whole configuration, sent to it at start."""

    model: str  # a directory in Hugging Face format
    tokenizer: str | None = None  # a directory with the tokenizer, if not the model's
    dtype: Dtype = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None  # applied to weights at load
    max_model_len: int | None = None  # None: the model's own, limited by the KV cache
    attention_backend: str = "auto"
    batch_invariant: bool = False  # a sequence's logits are bitwise the same in any batch
    enforce_eager: bool = False  # no CUDA graphs or recorded steps
    pooling_type: PoolingKind | None = None  # None: the one that the model was trained for
    tensor_parallel_size: int = 1  # processes that each layer is split across, one GPU each
    pipeline_parallel_size: int = 1  # stages of consecutive layers
    enable_expert_parallel: bool = False  # each rank has whole experts instead of a part of each
    nodes: NodesConfig | None = None  # None: all ranks are on this machine
    replica: int = 0  # index among the engines on this machine that serve the same model
    num_replicas: int = 1  # number of such engines; on a CPU they share its cores
    host_share_bytes: int | None = None  # memory of the machine for this engine; None: what is free
    num_threads: int | None = None  # CPU threads per rank; None: divide the cores among all ranks
    seed: int = 0  # for dummy weights
    generation: int = 0  # how many times the weights have been replaced
    stub_step_ms: float = 0.0  # duration of a step with load_format "stub"
    step_timeout_s: float = 0.0  # after which the engine process exits; 0: no limit
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    lora: LoraConfig = LoraConfig()
    max_images: int = 16  # per prompt; 0: images are refused, and the vision tower is not loaded
    # Larger images are scaled down to this; None: the model's own limit, and less on a CPU.
    max_image_tokens: int | None = None
    max_audio_clips: int = 16  # per prompt; 0: audio is refused, and its encoder is not loaded
    max_audio_s: int = 1800  # of a clip
    max_videos: int = 4  # per prompt; 0: videos are refused
    max_video_s: int = 1800  # of a video
    # Of a video; None: the model's own limit, and less on a CPU.
    max_video_frames: int | None = None
    max_video_tokens: int | None = None  # of a video; frames of larger ones are scaled down
    video_fps: float | None = None  # shown of a video unless a request says; None: the model's own
    speculation: SpeculationConfig | None = None
    profile_dir: str | None = None  # directory for step traces; None: profiling is off
    log_level: LogLevel = "info"  # of the engine process, if there is one
    log_format: LogFormat = "text"

    @property
    def engine_name(self) -> str:
        """The engine's name, for messages."""
        return name_engine(self.replica, self.num_replicas)

    @property
    def num_ranks(self) -> int:
        """How many processes compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """How many ranks each machine has."""
        return self.num_ranks // (1 if self.nodes is None else self.nodes.size)

    @property
    def first_device(self) -> int:
        """The GPU of rank 0; the other ranks use those that follow."""
        return self.replica * self.num_ranks


def name_engine(number: int, count: int) -> str:
    """The name of engine ``number`` of ``count``, for use within a sentence."""
    return f"engine {number}" if count > 1 else "the engine"
