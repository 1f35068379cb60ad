"""Flags of vLLM, SGLang and llama.cpp that Quire does not have, and what to do instead.

People type them by habit. The nearest spelling among our own flags would mislead them, so this
table is consulted first. A flag that a sentence names is one of ``quire serve``.
"""

from __future__ import annotations

_AS_MODEL = "give the model as MODEL, without a flag"
_LENGTH = "use --max-model-len"
_SEQS = "use --max-num-seqs"
_STEP_TOKENS = "use --max-num-batched-tokens, the most tokens of a step"
_MEMORY = "use --gpu-memory-utilization, a share that includes the weights"
_OFFLOAD = "use --kv-offload-bytes, such as 8GiB"
_REVISION = "write the revision after the name: org/name@REVISION"
_CONFIG = "not supported: config.json of the checkpoint says it; change it there"
_WHOLE_MODEL = "not supported: the whole model is on one kind of device, see --device"
_KIND = "not needed: the model's architecture tells it; see --pooling-type for embeddings"
_ALWAYS = "not needed: always on"
_BACKEND = "not needed: there is one implementation"
_SAMPLING = "not supported: requests set the sampling and the length"

_ADVICE: dict[tuple[str, ...], str] = {
    # The model
    ("--model-path", "-m", "--hf-repo", "-hfr"): _AS_MODEL,
    ("--tokenizer-path",): "use --tokenizer",
    ("--alias", "-a"): "use --served-model-name",
    ("--revision", "--code-revision", "--tokenizer-revision"): _REVISION,
    ("--download-dir",): "set HF_HOME, the directory of the Hub's cache",
    ("--trust-remote-code",): "not needed: models are built in, and a checkpoint's code is not run",
    ("--hf-overrides", "--json-model-override-args"): _CONFIG,
    ("--rope-scaling", "--rope-theta", "--rope-scale", "--rope-freq-base"): _CONFIG,
    ("--task", "--runner", "--convert", "--is-embedding", "--embedding", "--embeddings"): _KIND,
    ("--model-impl", "--tokenizer-mode", "--config-format"): _BACKEND,
    ("--generation-config",): (
        "not supported: of generation_config.json only the end tokens are used; requests set the "
        "sampling"
    ),
    ("--override-generation-config", "--n-predict", "--predict", "-n", "--temp"): _SAMPLING,
    ("--context-length", "--ctx-size", "-c", "--max-seq-len"): _LENGTH,
    ("-q",): "leave it out for a quantised checkpoint; --quantization is for dense ones",
    ("--enable-lora",): "not needed: --lora NAME=DIRECTORY and --lora-dir turn adapters on",
    ("--lora-modules", "--lora-paths"): "use --lora NAME=DIRECTORY, once for each",
    ("--max-lora-rank",): "not needed: adapters may have any rank up to 512",
    ("--max-loras-per-batch",): "use --max-loras",
    ("--jinja",): _ALWAYS,
    ("--chat-template-file",): "use --chat-template",
    ("--chat-template-content-format",): "not needed: the chat template tells it",
    ("--enable-auto-tool-choice", "--enable-reasoning"): (
        "not needed: always on; the format is detected, see --tool-call-parser and "
        "--reasoning-parser"
    ),
    ("--reasoning-format",): "use --reasoning-fields and --reasoning-parser",
    ("--limit-mm-per-prompt",): "use --max-images, --max-videos and --max-audio-clips",
    ("--mm-processor-kwargs",): "use --max-image-tokens and --max-video-frames",
    # Memory
    ("--mem-fraction-static", "--mem-frac"): _MEMORY,
    ("--swap-space", "--kv-offloading-size", "--preemption-mode", "--hicache-size"): _OFFLOAD,
    ("--enable-hierarchical-cache", "--cache-ram", "-cram"): _OFFLOAD,
    ("--cpu-offload-gb", "--n-gpu-layers", "--gpu-layers", "-ngl"): _WHOLE_MODEL,
    ("--max-total-tokens",): "use --kv-cache-memory-bytes",
    ("--page-size",): "use --block-size",
    ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"): "use --kv-cache-dtype, for both",
    ("--disable-radix-cache",): "use --no-enable-prefix-caching",
    # Steps
    ("--parallel", "-np", "--max-running-requests"): _SEQS,
    ("--chunked-prefill-size", "--max-prefill-tokens"): _STEP_TOKENS,
    ("--batch-size", "-b", "--ubatch-size", "-ub"): _STEP_TOKENS,
    ("--enable-chunked-prefill",): (
        "not needed: prompts are always computed in chunks, of --max-num-batched-tokens at most"
    ),
    ("--cont-batching", "-cb"): _ALWAYS,
    ("--num-scheduler-steps",): "use --max-step-passes",
    ("--async-scheduling",): "use --overlap",
    ("--schedule-policy",): "use --scheduling-policy",
    ("--disable-cuda-graph",): "use --enforce-eager",
    ("--compilation-config", "-O", "--cuda-graph-max-bs", "--max-seq-len-to-capture"): (
        "not needed: CUDA graphs are captured by default; --enforce-eager turns them off"
    ),
    ("--flash-attn", "-fa"): "not needed: the fastest is used; see --attention-backend",
    ("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"): _BACKEND,
    ("--sampling-backend",): _BACKEND,
    ("--speculative-config", "--speculative-algorithm"): "use --speculation and --draft-model",
    ("--speculative-model", "--speculative-draft-model-path", "--model-draft", "-md"): (
        "use --draft-model"
    ),
    ("--num-speculative-tokens", "--speculative-num-draft-tokens", "--draft-max", "--draft"): (
        "use --num-draft-tokens"
    ),
    ("--enable-deterministic-inference",): "use --batch-invariant",
    # Processes
    ("-tp", "--tp", "--tp-size"): "use --tensor-parallel-size",
    ("-pp", "--pp", "--pp-size"): "use --pipeline-parallel-size",
    ("-dp", "--dp", "--dp-size"): "use --data-parallel-size",
    ("-ep", "--ep", "--ep-size", "--expert-parallel-size"): "use --enable-expert-parallel",
    ("--threads", "-t", "--threads-batch", "-tb"): "use --num-threads",
    ("--dist-init-addr", "--nccl-init-addr"): "use --master-addr and --master-port",
    ("--distributed-executor-backend",): "not needed; on a Ray cluster use the command 'quire ray'",
    ("--api-server-count", "--tokenizer-worker-num"): "use --api-workers",
    # The server
    ("--allowed-origins", "--cors-allow-origins"): "use --cors-origin",
    ("--forwarded-allow-ips",): "use --trusted-proxy",
    ("--root-path",): "not needed: the proxy tells it with X-Forwarded-Prefix; see --trusted-proxy",
    ("--enable-log-requests", "--log-requests"): (
        "not needed: on by default; --disable-log-requests turns it off"
    ),
    ("--disable-log-stats", "--enable-metrics", "--metrics"): "not needed: /metrics is always on",
    ("--uvicorn-log-level",): "use --log-level",
    ("--watchdog-timeout",): "use --step-timeout-s",
    ("--max-logprobs",): "not supported: requests may ask for up to 20",
    ("--random-seed",): "not supported: a request has a seed of its own",
    ("--kv-transfer-config",): "not supported: prompts and outputs are computed by the same engine",
}
_BY_FLAG = {flag: advice for flags, advice in _ADVICE.items() for flag in flags}
FOREIGN_FLAGS = tuple(flag for flags in _ADVICE for flag in flags)


def foreign_advice(flag: str) -> str | None:
    """What to do instead of ``flag``, in one sentence; None if it is no flag that others have.

    Words may be separated by underscores, and ``--no-x`` is answered like ``--x``.
    """
    name = flag.replace("_", "-")
    return _BY_FLAG.get(name) or _BY_FLAG.get(name.replace("--no-", "--", 1))
