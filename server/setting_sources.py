"""The sources of settings, environment and YAML, and the errors for invalid ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from server.foreign_values import value_advice
from server.setting import Setting
from server.validation import reason


class InvalidSettings(ValueError):
    """An invalid setting; the message is one line that names where it was given."""


def read_environment(rows: Sequence[Setting], environ: Mapping[str, str]) -> dict[str, str]:
    """The non-empty QUIRE_* variables that are settings, by field name.

    Kubernetes sets QUIRE_PORT=tcp://... in every container if a service is named quire; that value
    is skipped.
    """
    given = ((row.field, environ.get(row.variable, "")) for row in rows)
    return {
        field: value
        for field, value in given
        if value and not (field == "port" and value.startswith("tcp://"))
    }


def misspelt_variables(rows: Sequence[Setting], environ: Mapping[str, str]) -> list[str]:
    """A line for each QUIRE_* variable that is not a setting but nearly spells one.

    Other variables with the prefix may belong to other programs and are not reported.
    """
    known = {row.variable for row in rows}
    suggestions = []
    for name in sorted(environ):
        if name.startswith("QUIRE_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            suggestions += [f"{name} is no setting; did you mean {close[0]}?" for _ in close]
    return suggestions


def read_yaml(rows: Sequence[Setting], path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, by field name.

    Raises:
        InvalidSettings: the file cannot be read, or has a key that is not a setting.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2027-02-30 is a ValueError
        reason = " ".join(str(error).split())
        raise InvalidSettings(f"{path} is not valid YAML: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidSettings(f"{path} must hold settings, one 'name: value' a line")
    fields = {row.name: row.field for row in rows}
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    if "config" in named:
        raise InvalidSettings(f"{path}: a YAML file cannot name another ('config')")
    unknown = [name for name in named if name not in fields]
    if unknown:
        close = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise InvalidSettings(f"{path}: there is no setting '{unknown[0]}'{hint}")
    return {fields[name]: value for name, value in named.items()}


def explain(rows: Sequence[Setting], error: ValidationError, flags: Mapping[str, Any]) -> str:
    """The first problem in one line, under the name by which the value was given."""
    problem = error.errors(include_url=False)[0]
    field = str(problem["loc"][0])
    row = next((row for row in rows if row.field == field), None)
    if row is None:
        return f"there is no setting '{field}'"
    if field in flags:
        where = row.flag
    elif os.environ.get(row.variable):
        where = row.variable
    else:
        where = f"'{row.name}' in the YAML file"
    value = problem["input"]
    shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    given = "" if row.name == "api_key" else f", not {shown[:80]!r}"
    advice = value_advice(row.name, value)
    return f"{where}: {reason(problem)}{given}" + (f"; {advice}" if advice else "")
