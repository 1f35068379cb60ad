"""Fields that both generating endpoints take beyond OpenAI's, as vLLM names them where it has them.

``inputs.GenerationRequest`` inherits them; what each does here is told in ``docs/parameters.md``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from server.openai.deadline import MAX_DEADLINE_MS


def _check_kept(value: int) -> int:
    if value == 0 or not -1 <= value < 2**31:
        raise ValueError("must be a number of tokens, or -1 for as many as leave room")
    return value


class ExtraFields(BaseModel):
    """A mixin: the strictness and the reading are those of the shape it is mixed into."""

    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    truncate_prompt_tokens: Annotated[int, AfterValidator(_check_kept)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
