"""The key file: the accepted keys and their rights, as YAML or TOML.

    keys:
      - name: alice
        sha256: [5f2c…]              # of the key; the key itself is not stored
        scopes: [inference, files]   # default: all but admin and metrics
        weight: 2                    # of its share against the others'
        expires: 2027-01-01          # the first moment (UTC) at which it is not accepted
        requests_per_minute: 600
        tokens_per_minute: 100k
        max_concurrent_requests: 16
        tokens_per_day: 2M
        tokens_per_month: 30M

A plain SHA-256 suffices, and a slow hash would be wrong: keys are 256 random bits, which cannot be
guessed, while a password hash such as scrypt would cost each request tens of milliseconds.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import secrets
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from server.access.caller import Scope
from server.setting_sources import InvalidSettings
from server.setting_values import ScaledInt
from server.validation import reason

KEY_PREFIX = "sk-quire-"
MAX_ENTRIES = 4096
_KEY_BYTES = 32
# The library's parser in C, if it was built with it, takes a tenth of the time.
_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_USER_SCOPES: tuple[Scope, ...] = ("inference", "files", "batches")
_HEADER = "# Written by quire keys; comments are not kept. Keys themselves are nowhere in here.\n"


def _read_digests(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _read_moment(value: Any) -> Any:
    """Parse a moment: a date is its first moment, and a time without a zone is UTC."""
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("must be a date or a time, as in 2027-01-31") from None
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime(value.year, value.month, value.day)
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=dt.UTC)
    return value


Digests = Annotated[
    list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]],
    BeforeValidator(_read_digests),
    Field(min_length=1, max_length=8),
]
Moment = Annotated[dt.datetime, BeforeValidator(_read_moment)]
Limit = Annotated[ScaledInt, Field(ge=1, le=2**53)]


class KeyEntry(BaseModel):
    """One tenant: its keys (several during a rotation), rights and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Digests  # of each key
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)] = _USER_SCOPES
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    expires: Moment | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent_requests: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None


class KeyFile(BaseModel):
    """All entries of a key file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: Annotated[list[KeyEntry], Field(max_length=MAX_ENTRIES)] = []

    @model_validator(mode="after")
    def _check_unique(self) -> KeyFile:
        names = [entry.name for entry in self.keys]
        digests = [digest for entry in self.keys for digest in entry.sha256]
        for values in (names, digests):
            if len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise ValueError(f"{twice!r} appears twice")
        return self

    def entry(self, name: str) -> KeyEntry | None:
        """The entry of that name."""
        return next((entry for entry in self.keys if entry.name == name), None)

    def with_entry(self, entry: KeyEntry) -> KeyFile:
        """A copy in which ``entry`` replaces the one of the same name, or is appended."""
        names = [known.name for known in self.keys]
        keys = [entry if known.name == entry.name else known for known in self.keys]
        return KeyFile(keys=keys if entry.name in names else [*keys, entry])

    def without_entry(self, name: str) -> KeyFile:
        """A copy without the entry of that name."""
        return KeyFile(keys=[entry for entry in self.keys if entry.name != name])


def read_key_file(path: Path) -> KeyFile:
    """The entries in ``path``.

    Raises:
        InvalidSettings: the file cannot be read, or an entry is invalid; one line.
    """
    try:
        content = _parse(path, path.read_text("utf-8"))
    except OSError as error:
        raise InvalidSettings(f"cannot read the key file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2027-02-30 is a ValueError
        reason = " ".join(str(error).split())
        raise InvalidSettings(f"the key file {path} cannot be parsed: {reason}") from None
    try:
        return KeyFile.model_validate({} if content is None else content)
    except ValidationError as error:
        raise InvalidSettings(f"the key file {path}: {_explain(error, content)}") from None


def write_key_file(path: Path, file: KeyFile) -> None:
    """Replace ``path`` atomically, readable by its owner only. Raises OSError."""
    entries = [entry.model_dump(mode="json", exclude_defaults=True) for entry in file.keys]
    text = _to_toml(entries) if path.suffix == ".toml" else _to_yaml(entries)
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            output.write(_HEADER + text)
            output.flush()
            os.fsync(output.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def new_key() -> str:
    """A new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> str:
    """The digest of a key, as stored in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return yaml.load(text, Loader=_YamlLoader)


def _explain(error: ValidationError, content: Any) -> str:
    """The first problem, with the name of its entry."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where, loc = "", problem["loc"]
    if len(loc) > 1 and loc[0] == "keys":
        entry = content["keys"][loc[1]]
        name = entry.get("name") if isinstance(entry, Mapping) else None
        where = f"entry {name or int(loc[1]) + 1}: "
        loc = loc[2:]
    field = f"'{loc[0]}' " if loc else ""
    return f"{where}{field}{reason(problem)}"


def _to_yaml(entries: list[dict[str, Any]]) -> str:
    return yaml.safe_dump({"keys": entries}, sort_keys=False, default_flow_style=False)


def _to_toml(entries: list[dict[str, Any]]) -> str:
    tables = ("\n[[keys]]\n" + "".join(map(_toml_line, entry.items())) for entry in entries)
    return "".join(tables)


def _toml_line(item: tuple[str, Any]) -> str:
    # Names, digests, scopes and moments have no characters that TOML requires to be escaped.
    name, value = item
    if isinstance(value, list):
        return f"{name} = [{', '.join(map(_toml_value, value))}]\n"
    return f"{name} = {_toml_value(value)}\n"


def _toml_value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
