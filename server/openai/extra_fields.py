"""Fields that both generating endpoints take beyond OpenAI's, as vLLM names them where it has them.

``inputs.GenerationRequest`` inherits them; what each does here is told in ``docs/parameters.md``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from server.openai.deadline import MAX_DEADLINE_MS


class ExtraFields(BaseModel):
    """A mixin: the strictness and the reading are those of the shape it is mixed into."""

    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
