"""Random requests that use everything the API accepts, each with exactly one correct answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

_TOPICS = ("France", "rivers", "a small ship", "bread", "the moon", "paged attention", "numbers")
_SENTENCES = (
    "The river runs past the old mill.",
    "Seven ships came into the harbour at night.",
    "Café, naïve, 東京, 🎉 and 👩‍👩‍👧 are words too.",
    "A batch of requests is computed in one step.",
    "She bought three apples, two pears and a plum.",
)
_QUESTIONS = (
    "What is the capital of France?",
    "What is the weather in Paris?",
    "Write a short story about {}.",
    "List three facts about {}.",
    "Repeat: {} and {}.",
    "What is 17 plus 25?",
)
_STOPS = ("e", " the", ".", "\n", "is", "an", "\n\n", "Paris", "é", " of a", "}")
_CITY: Body = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
_STRUCTURED_OUTPUTS: tuple[Body, ...] = (
    {"json": _CITY},
    {"json": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 5}},
    {"json": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,6}$"}]}},
    {"json_object": True},
    {"regex": r"[a-f]{3}-\d{2,4}"},
    {"regex": r"\w{1,8}@\w+\.com"},
    {"choice": ["Paris", "Paris is big", "Rome", "東京"]},
    {"grammar": 'start: "yes" | "no" | /[0-9]{2,5}/ ("," /[a-c]+/)?'},
)
_FUNCTIONS: tuple[Body, ...] = (
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
    {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
)


@dataclass(frozen=True)
class SoakRequest:
    """A request's path and body, apart from whether it is streamed."""

    path: str
    body: Body

    @property
    def can_stream(self) -> bool:
        """Whether the endpoint can stream the answer."""
        body = self.body
        is_whole = body.get("use_beam_search") or body.get("best_of", 1) > body.get("n", 1)
        return self.path != "/v1/embeddings" and not is_whole

    def __str__(self) -> str:
        return f"{self.path} {json.dumps(self.body, ensure_ascii=False)}"


class RequestGenerator:
    """Draws requests. Sampled ones carry a seed, so that every answer can be reproduced.

    Args:
        seed: the same seed draws the same requests.
        models: model names to request: the model itself, then its adapters.
        vocab: a lower bound on the size of the vocabulary.
        longest: the largest number of output tokens to request.
    """

    def __init__(self, seed: int, models: list[str], *, vocab: int, longest: int) -> None:
        self._rng = random.Random(seed)
        self._models = models
        self._vocab = vocab
        self._lengths = [1, 2, *(max(1, longest * share // 8) for share in (1, 2, 3, 5, 8))]
        rng = self._rng
        self._documents = [" ".join(rng.choices(_SENTENCES, k=rng.randint(2, 9))) for _ in range(6)]

    def generate(self) -> SoakRequest:
        """The next request."""
        kinds = (self._chat, self._completion, self._response, self._embeddings, self._beam_search)
        return self._rng.choices(kinds, (45, 45, 8, 4, 2))[0]()

    # ------------------------------------------------------------ endpoints

    def _chat(self) -> SoakRequest:
        rng = self._rng
        messages: list[Body] = []
        if self._chance(0.5):
            messages.append({"role": "system", "content": rng.choice(self._documents)})
        for _ in range(rng.choice((0, 0, 1, 2))):
            messages.append({"role": "user", "content": self._text()})
            messages.append({"role": "assistant", "content": rng.choice(_SENTENCES)})
        messages.append({"role": "user", "content": self._text()})
        body = self._body(messages=messages)
        if self._chance(0.3):
            body |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 3))}
        if self._chance(0.25):
            self._constrain_output(body)
        elif self._chance(0.3):
            self._offer_tools(body)
        if self._chance(0.15):
            body["reasoning_effort"] = rng.choice(("high", "none"))
        if self._chance(0.1):
            messages.append({"role": "assistant", "content": "The capital of"})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
            body["echo"] = self._chance(0.5)
        return SoakRequest("/v1/chat/completions", body)

    def _completion(self) -> SoakRequest:
        rng = self._rng
        prompts: dict[str, Any] = {
            "text": self._text(),
            "ids": self._ids(),
            "texts": [self._text() for _ in range(rng.randint(1, 3))],
            "lists": [self._ids() for _ in range(rng.randint(1, 3))],
        }
        body = self._body(prompt=prompts[rng.choice(("text", "text", "ids", "texts", "lists"))])
        if self._chance(0.1):
            body |= {"max_tokens": 0, "echo": True}
            body.pop("min_tokens", None)
        elif self._chance(0.2):
            self._constrain_output(body)
        elif self._chance(0.1):
            body["best_of"] = body.get("n", 1) + rng.randint(0, 2)
        if self._chance(0.1):
            body["echo"] = True
        if self._chance(0.3):
            body["logprobs"] = rng.choice((0, 1, 4))
        return SoakRequest("/v1/completions", body)

    def _response(self) -> SoakRequest:
        rng = self._rng
        body: Body = {
            **{"model": self._model(), "input": self._text(), "temperature": 0, "store": False},
            "max_output_tokens": rng.choice(self._lengths),
        }
        if self._chance(0.3):
            body["instructions"] = rng.choice(self._documents)
        if self._chance(0.3):
            body["tools"] = [{"type": "function", **function} for function in _FUNCTIONS]
            body["tool_choice"] = rng.choice(("auto", "required"))
        elif self._chance(0.3):
            held = {"type": "json_schema", "name": "city", "schema": _CITY}
            body["text"] = {"format": held}
        return SoakRequest("/v1/responses", body)

    def _embeddings(self) -> SoakRequest:
        draw = self._ids if self._chance(0.3) else self._text
        inputs = [draw() for _ in range(self._rng.randint(1, 5))]
        return SoakRequest("/v1/embeddings", {"model": self._models[0], "input": inputs})

    def _beam_search(self) -> SoakRequest:
        rng = self._rng
        width: Body = {"use_beam_search": True, "beam_width": rng.choice((2, 3)), "n": 2}
        body = {"model": self._model(), "prompt": self._text(), "max_tokens": rng.choice((4, 10))}
        return SoakRequest("/v1/completions", body | width)

    # ------------------------------------------------------------ request bodies

    def _body(self, **prompt: Any) -> Body:
        """The body of a chat or a completion: sampling, stop conditions, and what is reported."""
        rng = self._rng
        length = rng.choice(self._lengths)
        body: Body = {"model": self._model(), **prompt, "max_tokens": length}
        if self._chance(0.5):
            body["temperature"] = 0
        else:
            body |= {"temperature": rng.choice((0.3, 0.8, 1, 1.4)), "seed": rng.randrange(1000)}
        optional: dict[str, tuple[float, Any]] = {
            "top_p": (0.15, rng.choice((0.5, 0.9))),
            "top_k": (0.15, rng.choice((1, 5, 40))),
            "min_p": (0.1, rng.choice((0.02, 0.2))),
            "presence_penalty": (0.2, rng.choice((-0.5, 0.7, 1.5))),
            "frequency_penalty": (0.2, rng.choice((-0.3, 0.4, 1.1))),
            "repetition_penalty": (0.15, rng.choice((0.9, 1.2))),
            "logit_bias": (
                0.1,
                {str(id_): rng.choice((-100, -3, 4)) for id_ in self._random_ids(3)},
            ),
            "bad_words": (0.1, rng.sample(("the", "a", "Paris", "is"), 2)),
            "n": (0.35, rng.choice((2, 3, 5))),
            "stop": (0.25, rng.sample(_STOPS, rng.randint(1, 4))),
            "include_stop_str_in_output": (0.1, True),
            "stop_token_ids": (0.15, self._random_ids(60)),
            "min_tokens": (0.15, rng.randint(1, length)),
            "ignore_eos": (0.4, True),
            "prompt_logprobs": (0.15, rng.choice((0, 2))),
            "return_token_ids": (0.4, True),
            "skip_special_tokens": (0.1, False),
            "priority": (0.2, rng.randint(-3, 3)),
            "cache_salt": (0.1, rng.choice(("a", "b"))),
            "truncate_prompt_tokens": (0.1, rng.choice((5, 30))),
        }
        body |= {name: value for name, (share, value) in optional.items() if self._chance(share)}
        return body

    def _constrain_output(self, body: Body) -> None:
        """Constrain the output to a structure."""
        body["structured_outputs"] = self._rng.choice(_STRUCTURED_OUTPUTS)

    def _offer_tools(self, body: Body) -> None:
        named = {"type": "function", "function": {"name": "add"}}
        body["tools"] = [{"type": "function", "function": function} for function in _FUNCTIONS]
        body["tool_choice"] = self._rng.choice(("auto", "none", "required", named))
        body["parallel_tool_calls"] = self._chance(0.8)
        # A truncated call ends up as text, but a stream has already sent it as a call by then.
        for name in ("stop", "stop_token_ids"):
            body.pop(name, None)

    def _text(self) -> str:
        rng = self._rng
        question = rng.choice(_QUESTIONS).format(*rng.choices(_TOPICS, k=2))
        return f"{rng.choice(self._documents)} {question}" if self._chance(0.4) else question

    def _ids(self) -> list[int]:
        """A prompt that often shares a prefix with others."""
        rng = self._rng
        common = random.Random(rng.randrange(5)).choices(range(8, self._vocab), k=150)
        return common[: rng.choice((0, 17, 64, 150))] + self._random_ids(rng.choice((1, 5, 16, 40)))

    def _random_ids(self, count: int) -> list[int]:
        return self._rng.choices(range(8, self._vocab), k=count)

    def _model(self) -> str:
        return self._rng.choice(self._models) if self._chance(0.4) else self._models[0]

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share
