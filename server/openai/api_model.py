"""What all request bodies have in common: strict types, and errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from server.errors import ApiError, bad_field, shorten
from server.openai.unsupported import ignored_params, refuse_unsupported
from server.validation import field_path, reason

MAX_MODEL_NAME = 256


class ApiModel(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, body: dict[str, Any], at: str = "") -> Self:
        """Parse ``body``. Raises ApiError (400) that names the first invalid field.

        ``at`` is the path of ``body`` within the request, such as ``input.3.``.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _to_api_error(error, at) from None
        except RecursionError:
            message = "The body is nested too deeply."
            raise ApiError(400, message, code="invalid_json") from None

    def ignored(self) -> list[str]:
        """Names of fields that request something but have no effect."""
        return ignored_params(self.model_extra)

    @classmethod
    def unread(cls, body: Mapping[str, Any]) -> list[str]:
        """Paths of such fields in the history of ``body``, which is valid.

        They are found there because a message keeps only what is read of it.
        """
        return []


class FeatureRequest(ApiModel):
    """A request that may ask for unsupported features, and is then refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if isinstance(body, dict):
            refuse_unsupported(body)
        return body


class ModelRequest(FeatureRequest):
    """A request that names a model."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]


def _to_api_error(error: ValidationError, at: str) -> ApiError:
    """The first problem, with the field's name as the API spells it."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = at + field_path(problem["loc"])
    message = reason(problem)
    if problem["type"] == "value_error" and _has_field_prefix(message):
        # A check across several fields names the invalid one itself.
        field, _, message = message.partition(": ")
        param = f"{param.rstrip('.')}.{field}" if param else field
    return bad_field(shorten(param.rstrip(".") or "body"), message)


def _has_field_prefix(message: str) -> bool:
    head, colon, _ = message.partition(": ")
    return bool(colon) and head.isidentifier()
