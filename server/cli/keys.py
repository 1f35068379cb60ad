"""``quire keys``: create, list, change and revoke the keys in a key file."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from server.access.key_file import (
    KeyEntry,
    KeyFile,
    digest_of,
    new_key,
    read_key_file,
    write_key_file,
)
from server.setting_sources import InvalidSettings
from server.validation import reason

_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
)
_DESCRIPTION = """\
Manage the API keys of a server that runs with --api-key-file FILE. A key is printed once, when it
is created; the file stores its SHA-256 only. A running server applies changes within a second.
"""


class _CommandError(Exception):
    """A command could not be executed; the message is one line."""


def main(argv: Sequence[str]) -> int:
    """Run one command. Returns the exit status."""
    options = _parser().parse_args(argv)
    if options.file is None:
        print("quire keys: name the file: --file FILE (or QUIRE_API_KEY_FILE)", file=sys.stderr)
        return 2
    try:
        options.run(options.file, options)
    except (InvalidSettings, _CommandError) as problem:
        print(f"quire keys: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"quire keys: cannot write {options.file}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _create(path: Path, options: argparse.Namespace) -> None:
    file = read_key_file(path) if path.exists() else KeyFile()
    if file.entry(options.name) is not None:
        raise _CommandError(f"there is a key named {options.name!r}; 'rotate' gives it a new one")
    given = {name: getattr(options, name) for name in (*_LIMITS, "weight", "expires")}
    fields = {name: value for name, value in given.items() if value is not None}
    if options.scopes is not None:  # an empty text is a mistake, not a wish for the default
        fields["scopes"] = options.scopes.split(",")
    key = new_key()
    try:
        entry = KeyEntry(name=options.name, sha256=[digest_of(key)], **fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise _CommandError(f"{problem['loc'][0]}: {reason(problem)}") from None
    if entry.expires is not None and entry.expires <= dt.datetime.now(dt.UTC):
        moment = entry.expires.isoformat()
        raise _CommandError(f"expires: {moment} has passed, so the key would never be accepted")
    write_key_file(path, file.with_entry(entry))
    print(key)


def _rotate(path: Path, options: argparse.Namespace) -> None:
    file = read_key_file(path)
    entry = _find_entry(file, options.name)
    key = new_key()
    kept = [] if options.revoke_old else entry.sha256[:1]  # the newest hash comes first
    changed = entry.model_copy(update={"sha256": [digest_of(key), *kept]})
    write_key_file(path, file.with_entry(changed))
    print(key)


def _list(path: Path, options: argparse.Namespace) -> None:
    del options
    for entry in read_key_file(path).keys:
        limits = [f"{name}={value}" for name in _LIMITS if (value := getattr(entry, name))]
        expires = [f"expires={entry.expires.isoformat()}"] if entry.expires else []
        words = [
            entry.name,
            f"scopes={','.join(entry.scopes)}",
            f"weight={entry.weight:g}",
            *limits,
            *expires,
            f"sha256={','.join(digest[:12] for digest in entry.sha256)}",
        ]
        print("  ".join(words))


def _revoke(path: Path, options: argparse.Namespace) -> None:
    file = read_key_file(path)
    _find_entry(file, options.name)
    write_key_file(path, file.without_entry(options.name))


def _find_entry(file: KeyFile, name: str) -> KeyEntry:
    entry = file.entry(name)
    if entry is None:
        raise _CommandError(f"there is no key named {name!r}")
    return entry


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire keys", description=_DESCRIPTION, allow_abbrev=False
    )
    default = os.environ.get("QUIRE_API_KEY_FILE") or None
    parser.add_argument(
        "--file",
        type=Path,
        default=default and Path(default),
        help="the key file: YAML, or TOML if its name ends in .toml (QUIRE_API_KEY_FILE)",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    create = commands.add_parser("create", help="create a key and print it, once")
    create.add_argument("name", metavar="NAME", help="name of the key's owner, the tenant")
    create.add_argument(
        "--scopes", help="comma-separated: inference, files, batches, metrics, admin"
    )
    create.add_argument(
        "--weight", help="share of a busy server, relative to other keys (default: 1)"
    )
    create.add_argument(
        "--expires", metavar="DATE", help="first day on which the key is refused (UTC)"
    )
    for name in _LIMITS:
        create.add_argument(f"--{name.replace('_', '-')}", metavar="N", help="such as 600 or 100k")
    create.set_defaults(run=_create)
    rotate = commands.add_parser("rotate", help="create a new key; the previous one stays valid")
    rotate.add_argument("name", metavar="NAME")
    rotate.add_argument("--revoke-old", action="store_true", help="revoke the previous key")
    rotate.set_defaults(run=_rotate)
    commands.add_parser("list", help="list names, scopes and limits of all keys").set_defaults(
        run=_list
    )
    revoke = commands.add_parser("revoke", help="revoke a key")
    revoke.add_argument("name", metavar="NAME")
    revoke.set_defaults(run=_revoke)
    return parser
