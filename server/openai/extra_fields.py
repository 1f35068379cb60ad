"""Generation fields beyond OpenAI's, with vLLM's names where vLLM has them.

``inputs.GenerationRequest`` inherits them; ``docs/parameters.md`` describes their effects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from engine.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, BeamParams, EarlyStopping
from server.openai.deadline import MAX_DEADLINE_MS

# Beam search does not sample: fields that shape the distribution, or watch the text as it is
# generated, are refused with it.
_UNSUPPORTED_WITH_BEAMS = (
    *("stream", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "min_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words"),
    *("tools", "functions", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "grammar"),
)
# Fields without effect in beam search, and the values that request nothing.
_IGNORED_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "seed": (),
}
_IGNORED_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    "beam_width": (),
    "length_penalty": (1,),
    "early_stopping": (False,),
}


def _check_truncation(value: int) -> int:
    if value == 0 or not -1 <= value < 2**31:
        raise ValueError("must be a number of tokens, or -1 for as many as leave room")
    return value


def _read_early_stopping(value: Any) -> EarlyStopping | None:
    if value is not None and not isinstance(value, bool) and value != "never":
        raise ValueError('must be true, false or "never"')
    return value


# Not a pydantic union: its errors would name the member of the union, not the field.
EarlyStoppingField = Annotated[
    EarlyStopping | None,
    PlainValidator(_read_early_stopping),
    WithJsonSchema({"enum": [True, False, "never", None]}),
]


def _is_requested(field: str, value: Any) -> bool:
    """Whether a field that is refused with beam search requests anything."""
    if field == "repetition_penalty":
        return value not in (None, 1)
    return bool(value) and getattr(value, "type", None) != "text"


class ExtraFields(BaseModel):
    """A mixin: strictness and parsing are those of the shape it is mixed into."""

    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    truncate_prompt_tokens: Annotated[int, AfterValidator(_check_truncation)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_timings: bool | None = None
    return_progress: bool | None = None

    use_beam_search: bool | None = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    length_penalty: (
        Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None
    ) = None
    early_stopping: EarlyStoppingField = None

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if not self.use_beam_search:
            return self
        for field in _UNSUPPORTED_WITH_BEAMS:
            if _is_requested(field, getattr(self, field, None)):
                raise ValueError(f"{field}: is not available with 'use_beam_search'")
        if getattr(self, "max_tokens", None) == 0:
            raise ValueError("max_tokens: must be at least 1 with 'use_beam_search'")
        if self.beam_width is not None and (getattr(self, "n", None) or 1) > self.beam_width:
            raise ValueError("n: must be at most 'beam_width'")
        return self

    @property
    def beams(self) -> BeamParams | None:
        """The beam search that is requested, if any; its width defaults to ``n``.

        Raises:
            InvalidParameter: ``n`` is not a valid width.
        """
        if not self.use_beam_search:
            return None
        width = self.beam_width or getattr(self, "n", None) or 1
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamParams(
            width=width, length_penalty=penalty, early_stopping=self.early_stopping or False
        )

    @property
    def count_param(self) -> str:
        """The field that decides how many continuations of a prompt are generated."""
        if self.use_beam_search and self.beam_width:
            return "beam_width"
        best_of, n = getattr(self, "best_of", None), getattr(self, "n", None)
        return "best_of" if best_of and best_of > (n or 1) else "n"

    def ignored_extra_fields(self) -> list[str]:
        """Names of fields that request something but have no effect next to the others."""
        idle = dict(_IGNORED_WITH_BEAMS if self.use_beam_search else _IGNORED_WITHOUT_BEAMS)
        if self.truncate_prompt_tokens is None:
            idle["truncation_side"] = ()
        if getattr(self, "logprobs", None) in (None, False):
            idle["return_tokens_as_token_ids"] = (False,)
        if not getattr(self, "stream", None):
            idle["return_progress"] = (False,)
        given = {name: getattr(self, name, None) for name in idle}
        return [
            name for name, value in given.items() if value is not None and value not in idle[name]
        ]
