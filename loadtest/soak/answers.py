"""Makes answers comparable: folds a stream into what the same request returns unstreamed."""

from __future__ import annotations

import json
import math
from typing import Any

_TOLERANCE = 2e-3  # of log-probabilities and vector elements; sums depend on their order
_MAX_RANK_DIFFERENCE = 3  # unlikely tokens have many close neighbours in rank

Answer = dict[str, Any]


def read_stream(path: str, body: bytes) -> Answer:
    """Assemble an answer from its server-sent events.

    Raises ValueError if the stream ends improperly or reports an error.
    """
    lines = body.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for event in events:
        if event.get("error"):
            raise ValueError(f"the stream ends with an error: {event['error']}")
    if path == "/v1/responses":
        return events[-1]["response"]
    if "data: [DONE]" not in lines:
        raise ValueError("the stream has no end")
    answer: Answer = {}
    choices: dict[int, Answer] = {}
    for event in events:
        answer |= {key: value for key, value in event.items() if value is not None}
        for piece in event["choices"]:
            _merge_chunk(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    return answer | {"choices": [choices[index] for index in sorted(choices)]}


def _merge_chunk(choice: Answer, piece: Answer) -> None:
    """Add one chunk's part of a choice. Raises ValueError if the choice has already ended."""
    if choice.get("finish_reason") is not None:
        raise ValueError(f"a chunk behind the end of its choice: {piece}")
    for key in ("finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs", "timings"):
        if piece.get(key) is not None:
            choice[key] = piece[key]
    if piece.get("token_ids") is not None:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if piece.get("logprobs") is not None:
        told = choice.setdefault("logprobs", {})
        for key, entries in piece["logprobs"].items():
            told[key] = told.get(key, []) + (entries or [])
    if "text" in piece:
        choice["text"] = choice.get("text", "") + piece["text"]
    delta = piece.get("delta") or {}
    message = choice.setdefault("message", {})
    for key in ("content", "reasoning"):
        if delta.get(key):
            message[key] = message.get(key, "") + delta[key]
    calls = message.setdefault("tool_calls", [])
    for part in delta.get("tool_calls") or ():
        if part["index"] == len(calls):
            calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
        calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


def comparable_answer(path: str, answer: Answer) -> Answer:
    """What two answers to one request share: all but ids, times and cached token counts."""
    usage = answer.get("usage") or {}
    counts = {key: count for key, count in usage.items() if key.endswith("_tokens")}
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    told: Answer = {"usage": counts | {"reasoning": details.get("reasoning_tokens", 0)}}
    if path == "/v1/embeddings":
        return told | {"vectors": [entry["embedding"] for entry in answer["data"]]}
    if path == "/v1/responses":
        told |= {key: answer[key] for key in ("status", "incomplete_details")}
        return told | {"output": _without_ids(answer["output"])}
    told |= {key: answer.get(key) for key in ("prompt_token_ids", "prompt_logprobs")}
    return told | {"choices": [_comparable_choice(choice) for choice in answer["choices"]]}


def _comparable_choice(choice: Answer) -> Answer:
    message = choice.get("message") or {}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    logprobs = choice.get("logprobs") or {}
    plain = ("index", "text", "finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs")
    return {key: choice.get(key) for key in plain} | {
        "token_ids": choice.get("token_ids") or [],
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "logprobs": {key: entries for key, entries in logprobs.items() if entries},
    }


def first_difference(wanted: Any, told: Any, where: str = "") -> str | None:
    """Describe the first difference between two answers, if any. Floats may differ a little."""
    if isinstance(wanted, dict) and isinstance(told, dict):
        if wanted.keys() != told.keys():
            return f"{where}: {sorted(wanted)} in place of {sorted(told)}"
        pairs = [(f"{where}.{key}", value, told[key]) for key, value in wanted.items()]
    elif isinstance(wanted, list | tuple) and isinstance(told, list | tuple):
        pairs = [
            (f"{where}[{index}]", *pair)
            for index, pair in enumerate(zip(wanted, told, strict=False))
        ]
        pairs.append((f"{where} (length)", len(wanted), len(told)))
    else:
        same = wanted == told or _is_near(wanted, told, ranks=where.endswith(".rank"))
        return None if same else f"{where}: {told!r} in place of {wanted!r}"
    found = (first_difference(one, other, place) for place, one, other in pairs)
    return next((text for text in found if text is not None), None)


def _is_near(wanted: Any, told: Any, *, ranks: bool) -> bool:
    if ranks:
        return abs(wanted - told) <= _MAX_RANK_DIFFERENCE
    if not (isinstance(wanted, float) and isinstance(told, float)):
        return False
    return math.isclose(wanted, told, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        kept = (item for item in value.items() if item[0] not in ("id", "call_id"))
        return {key: _without_ids(item) for key, item in kept}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value
