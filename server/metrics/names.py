"""The API's metrics: names, help, labels and buckets.

They are those that dashboards know from other inference servers.
"""

from __future__ import annotations

from collections.abc import Sequence

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_ITERATION = (1.0, *(float(2**e) for e in range(3, 15)))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Time between two tokens of a sequence.", _PER_TOKEN),
    "request_time_per_output_token_seconds": (
        "Mean time per output token of a sequence, after the first.",
        _PER_TOKEN,
    ),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _LATENCY),
    "request_queue_time_seconds": ("From arrival to the first step.", _LATENCY),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY),
    "request_inference_time_seconds": ("From the first step to the last token.", _LATENCY),
    "request_prompt_tokens": ("Tokens of a sequence's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens a finished sequence generated.", _TOKENS),
    "request_params_max_tokens": ("The max_tokens requested per sequence.", _TOKENS),
    "request_params_n": ("The n requested per request.", _CHOICES),
    "iteration_tokens_total": ("Tokens computed by one step.", _ITERATION),
}
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "prompt_images": "Images in processed prompts.",
    "prompt_audio_clips": "Audio clips in processed prompts.",
    "prompt_videos": "Videos in processed prompts.",
    "generation_tokens": "Tokens generated.",
}
LABELLED_COUNTERS: dict[str, tuple[str, str]] = {
    "request_success": ("finished_reason", "Sequences that finished successfully."),
    "request_failed": ("reason", "Sequences that failed."),
    "request_aborted": ("phase", "Sequences aborted by their client, by phase."),
    "admission_rejections": ("reason", "Requests refused before reaching the engine."),
    "tenant_requests": ("tenant", "Requests by the owner of their key, with a key file."),
    "tenant_prompt_tokens": ("tenant", "Prompt tokens processed, by owner."),
    "tenant_generation_tokens": ("tenant", "Tokens generated, by owner."),
    "tenant_rejections": ("tenant", "Requests beyond a limit, a quota or the queue, by owner."),
}
# Labels that are known beforehand, whose counters begin at 0: Prometheus sees no increase in a
# counter that appears as 1, so that an alert would miss the first failure.
KNOWN_LABELS: dict[str, Sequence[str]] = {
    "request_success": ("stop", "length"),
    "request_failed": (
        *("asleep", "deadline", "engine_dead", "failed", "internal", "out_of_memory", "refused"),
        "worker_died",
    ),
    "request_aborted": ("waiting", "decoding"),
    "admission_rejections": (
        *("asleep", "images", "insufficient_quota", "queue_full", "rate_limit_exceeded"),
    ),
}
