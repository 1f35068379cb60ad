"""One setting: the values it accepts, and its row of the table."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Field, field_validator
from pydantic_settings import BaseSettings

_ENV_PREFIX = "QUIRE_"
_MAX_INT = 2**63 - 1


def setting(default: Any, group: str, help: str, *, name: str = "", **limits: Any) -> Any:
    """A field of the table. ``name`` is its public name if that differs from the field's."""
    return Field(
        default,
        description=help,
        json_schema_extra={"group": group, "name": name},
        **limits,
    )


class SettingsPart(BaseSettings):
    """A part of the table.

    Rejects numbers that are infinite or do not fit in the 64 bits of the engine's messages.
    """

    @field_validator("*")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number")
        if isinstance(value, int) and not -_MAX_INT <= value <= _MAX_INT:
            raise ValueError(f"must be at most {_MAX_INT}")
        return value


class Setting(NamedTuple):
    """One row of the table, as used by flags, environment, YAML and documentation."""

    field: str
    name: str  # the public name: the YAML key, and the stem of the flag and the variable
    group: str
    help: str
    default: Any
    choices: tuple[str, ...]
    kind: Literal["flag", "list", "value"]  # given alone, repeatable, or with one value

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return _ENV_PREFIX + self.name.upper()


def table_of(model: type[BaseModel]) -> list[Setting]:
    """One row for each field made by ``setting``, in order."""
    rows = []
    for field, info in model.model_fields.items():
        extra = info.json_schema_extra
        assert isinstance(extra, dict)
        rows.append(
            Setting(
                field=field,
                name=str(extra["name"]) or field,
                group=str(extra["group"]),
                help=info.description or "",
                default=info.default,
                choices=_choices(info.annotation),
                kind=_kind(info.annotation),
            )
        )
    return rows


def _kind(annotation: Any) -> Literal["flag", "list", "value"]:
    if annotation is bool or bool in get_args(annotation):
        return "flag"
    return "list" if get_origin(annotation) is list else "value"


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for arm in get_args(annotation) for choice in _choices(arm))
    return ()
