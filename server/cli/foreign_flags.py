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
_SAMPLING = (
    "not supported: requests set the sampling and the length; generation_config.json of the "
    "checkpoint has the sampling that they leave out"
)
_OUTPUT_FORM = "not supported: requests set it with response_format"
_TEMPLATE_VARIABLES = "not supported: requests set chat_template_kwargs"
_GPUS = "set CUDA_VISIBLE_DEVICES"
_RANKS = "use --tensor-parallel-size or --pipeline-parallel-size"
_MAPPING = "not supported: weights are read into memory, not mapped from their file"
_NEVER_LOGGED = "not needed: prompts and answers are never logged"
_ADAPTIVE = "not needed: as many tokens are drafted as pay for themselves, see --adaptive-drafts"
_LOG_LEVEL = "use --log-level debug"

_ADVICE: dict[tuple[str, ...], str] = {
    # The model
    ("--model-path", "--model-id", "-m", "--hf-repo", "-hf", "-hfr"): _AS_MODEL,
    ("--hf-file", "-hff"): "write a part of the file's name after the model's: org/name:Q4_K_M",
    ("--model-url", "-mu"): "not supported: download the file and give it as MODEL",
    ("--models-dir",): "not supported: a server has one model; start one for each",
    ("--tokenizer-path",): "use --tokenizer",
    ("--alias", "-a"): "use --served-model-name",
    ("--revision", "--code-revision", "--tokenizer-revision"): _REVISION,
    ("--download-dir",): "set HF_HOME, the directory of the Hub's cache",
    ("--hf-token", "-hft"): "set HF_TOKEN",
    ("--offline",): "set HF_HUB_OFFLINE=1",
    ("--mlock", "--mmap", "--no-mmap"): _MAPPING,
    ("--check-tensors",): _ALWAYS,
    ("--trust-remote-code",): "not needed: models are built in, and a checkpoint's code is not run",
    ("--hf-overrides", "--json-model-override-args"): _CONFIG,
    ("--rope-scaling", "--rope-theta", "--rope-scale", "--rope-freq-base"): _CONFIG,
    ("--task", "--runner", "--convert", "--is-embedding", "--embedding", "--embeddings"): _KIND,
    ("--rerank", "--reranking"): _KIND,
    ("--pooling", "--pooler-config", "--override-pooler-config"): "use --pooling-type",
    ("--model-impl", "--tokenizer-mode", "--config-format"): _BACKEND,
    ("--generation-config",): (
        "not supported: the checkpoint's own generation_config.json is used; change it there"
    ),
    ("--override-generation-config", "--n-predict", "--predict", "-n"): _SAMPLING,
    ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--samplers"): _SAMPLING,
    ("--presence-penalty", "--frequency-penalty"): _SAMPLING,
    ("--grammar", "--grammar-file", "--json-schema", "-j"): _OUTPUT_FORM,
    ("--context-shift", "--keep"): "not supported: an answer ends where the context is full",
    ("--special", "-sp"): "not supported: requests set skip_special_tokens",
    ("--return-tokens-as-token-ids",): "not supported: requests set return_tokens_as_token_ids",
    ("--enable-prompt-embeds",): "not supported: prompts are text or token ids",
    ("--logprobs-mode",): "not supported: log-probabilities are those before the temperature",
    ("--context-length", "--ctx-size", "-c", "--max-seq-len"): _LENGTH,
    ("-q",): "leave it out for a quantised checkpoint; --quantization is for dense ones",
    ("--enable-lora",): "not needed: --lora NAME=DIRECTORY and --lora-dir turn adapters on",
    ("--lora-modules", "--lora-paths"): "use --lora NAME=DIRECTORY, once for each",
    ("--max-lora-rank",): "not needed: adapters may have any rank up to 512",
    ("--lora-scaled",): "use --lora NAME=DIRECTORY; its adapter_config.json has the scale",
    ("--max-loras-per-batch",): "use --max-loras",
    ("--jinja",): _ALWAYS,
    ("--chat-template-file",): "use --chat-template",
    ("--chat-template-content-format",): "not needed: the chat template tells it",
    ("--default-chat-template-kwargs", "--chat-template-kwargs"): _TEMPLATE_VARIABLES,
    ("--reasoning-budget",): "not supported: requests set reasoning_effort",
    ("--tool-parser-plugin", "--reasoning-parser-plugin"): (
        "not supported: parsers are built in, see --tool-call-parser and --reasoning-parser"
    ),
    ("--enable-auto-tool-choice", "--enable-reasoning"): (
        "not needed: always on; the format is detected, see --tool-call-parser and "
        "--reasoning-parser"
    ),
    ("--reasoning-format",): "use --reasoning-fields and --reasoning-parser",
    ("--limit-mm-per-prompt",): "use --max-images, --max-videos and --max-audio-clips",
    ("--mm-processor-kwargs",): "use --max-image-tokens and --max-video-frames",
    ("--media-io-kwargs",): "use --max-video-frames and --video-fps",
    ("--language-model-only",): "use --max-images 0, --max-videos 0 and --max-audio-clips 0",
    ("--mmproj", "-mm", "--mmproj-url", "-mmu"): (
        "not supported: GGUF files are served for text; for images give a directory in Hugging "
        "Face format"
    ),
    ("--no-mmproj",): "use --max-images 0",
    ("--allowed-local-media-path", "--allowed-media-domains", "--media-path"): (
        "not supported: requests carry their images; the server opens no file or URL for them"
    ),
    # Memory
    ("--mem-fraction-static", "--mem-frac"): _MEMORY,
    ("--swap-space", "--kv-offloading-size", "--preemption-mode", "--hicache-size"): _OFFLOAD,
    ("--enable-hierarchical-cache", "--cache-ram", "-cram"): _OFFLOAD,
    ("--hicache-ratio", "--kv-offloading-backend"): _OFFLOAD,
    ("--cpu-offload-gb", "--n-gpu-layers", "--gpu-layers", "-ngl"): _WHOLE_MODEL,
    ("--gpu-layers-draft", "-ngld", "--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe"): _WHOLE_MODEL,
    ("--override-tensor", "-ot"): _WHOLE_MODEL,
    ("--max-total-tokens",): "use --kv-cache-memory-bytes",
    ("--page-size",): "use --block-size",
    ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"): "use --kv-cache-dtype, for both",
    ("--calculate-kv-scales",): "not needed: each token and head has a scale of its own",
    ("--prefix-caching-hash-algo",): _BACKEND,
    ("--cache-reuse",): "not needed: --enable-prefix-caching is on",
    ("--disable-radix-cache",): "use --no-enable-prefix-caching",
    # Steps
    ("--parallel", "-np", "--max-running-requests"): _SEQS,
    ("--chunked-prefill-size", "--max-prefill-tokens"): _STEP_TOKENS,
    ("--batch-size", "-b", "--ubatch-size", "-ub"): _STEP_TOKENS,
    ("--enable-chunked-prefill",): (
        "not needed: prompts are always computed in chunks, of --max-num-batched-tokens at most"
    ),
    ("--cont-batching", "-cb", "--enable-mixed-chunk"): _ALWAYS,
    ("--warmup", "--skip-server-warmup"): "not needed: graphs are captured after the first answer",
    ("--stream-interval",): "not supported: what a step has produced is sent at once",
    ("--num-scheduler-steps",): "use --max-step-passes",
    ("--async-scheduling",): "use --overlap",
    ("--disable-overlap-schedule",): "use --no-overlap",
    ("--schedule-policy",): "use --scheduling-policy",
    ("--disable-cuda-graph",): "use --enforce-eager",
    (
        *("--compilation-config", "-O", "--cuda-graph-bs", "--cuda-graph-max-bs"),
        *("--max-seq-len-to-capture", "--enable-torch-compile"),
    ): "not needed: CUDA graphs are captured by default; --enforce-eager turns them off",
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
    ("--speculative-num-steps",): "use --num-draft-tokens",
    ("--speculative-eagle-topk",): "not supported: draft tokens are a chain, not a tree",
    ("--draft-min", "--draft-n-min", "--draft-p-min"): _ADAPTIVE,
    ("--enable-deterministic-inference",): "use --batch-invariant",
    # Processes
    ("-tp", "--tp", "--tp-size"): "use --tensor-parallel-size",
    ("-pp", "--pp", "--pp-size"): "use --pipeline-parallel-size",
    ("-dp", "--dp", "--dp-size"): "use --data-parallel-size",
    ("-ep", "--ep", "--ep-size", "--expert-parallel-size"): "use --enable-expert-parallel",
    ("--tensor-split", "-ts", "--split-mode", "-sm"): _RANKS,
    ("--main-gpu", "-mg"): _GPUS,
    ("-dev",): "use --device, which is cpu or cuda; CUDA_VISIBLE_DEVICES names GPUs",
    (
        *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa"),
        *("--data-parallel-rank", "-dpn", "--data-parallel-rpc-port", "-dpp"),
    ): "not supported: --data-parallel-size counts engines of one machine",
    ("--headless",): "not needed: machines with a --node-rank above 0 have no API",
    ("--threads", "-t", "--threads-batch", "-tb"): "use --num-threads",
    ("--threads-http",): "use --api-workers",
    ("--dist-init-addr", "--nccl-init-addr"): "use --master-addr and --master-port",
    ("--distributed-executor-backend",): "not needed; on a Ray cluster use the command 'quire ray'",
    ("--api-server-count", "--tokenizer-worker-num"): "use --api-workers",
    # The server
    ("--allowed-origins", "--cors-allow-origins"): "use --cors-origin",
    ("--forwarded-allow-ips",): "use --trusted-proxy",
    ("--allowed-methods", "--allowed-headers", "--allow-credentials"): (
        "not needed: --cors-origin allows all methods and headers, and cookies are not used"
    ),
    ("--uds",): "not supported: the server listens on --host and --port",
    ("--timeout", "-to"): "use --body-timeout-s",
    ("--ssl-cert-reqs",): "use --ssl-ca-certs, which requires certificates of clients",
    ("--webui",): "not needed: there is no page to chat on; --dashboard is the live page",
    ("--slots", "--props"): "not supported: --dashboard shows what runs",
    ("--sleep-idle-seconds",): "not supported: see --enable-sleep-mode",
    ("--enable-prompt-tokens-details", "--enable-request-id-headers"): _ALWAYS,
    ("--enable-force-include-usage",): "not supported: requests set stream_options.include_usage",
    ("--disable-fastapi-docs",): "not supported: /docs needs a key if --api-key is set",
    ("--root-path", "--api-prefix"): (
        "not needed: the proxy tells it with X-Forwarded-Prefix; see --trusted-proxy"
    ),
    ("--enable-log-requests", "--log-requests"): (
        "not needed: on by default; --disable-log-requests turns it off"
    ),
    ("--disable-uvicorn-access-log",): "use --disable-log-requests",
    ("--max-log-len", "--enable-log-outputs", "--enable-log-deltas"): _NEVER_LOGGED,
    ("--log-file", "--log-disable"): "not supported: the log goes to standard error",
    ("--verbose", "-v", "--verbosity", "-lv", "--log-verbosity"): _LOG_LEVEL,
    ("--disable-log-stats", "--enable-metrics", "--metrics"): "not needed: /metrics is always on",
    ("--enable-server-load-tracking",): "not needed: /metrics is always on",
    ("--collect-detailed-traces",): "not needed: see --otlp-traces-endpoint",
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
