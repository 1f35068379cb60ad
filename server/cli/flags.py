"""Generates flags from the table of settings, and turns parsed flags into :class:`Settings`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from server.cli.foreign_flags import foreign_advice
from server.settings import Setting, Settings, settings_table

_DESCRIPTION = """\
Serve a model over an OpenAI-compatible HTTP API.

Without MODEL it serves the embedded model, which needs no download. Every option can also be set
in the environment (--max-num-seqs is QUIRE_MAX_NUM_SEQS) or in a YAML file (max_num_seqs: 64).
Options override the environment, which overrides the file.
"""

_EXAMPLES = """\
examples:
  quire serve
  quire serve ./my-model --port 9000 --api-key secret
  quire serve configs/cpu.yaml
  quire serve org/name --max-model-len 8K --kv-cache-memory-bytes 2GiB
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire serve``. Values stay text; :class:`Settings` validates them."""
    parser = argparse.ArgumentParser(
        prog="quire serve",
        usage="quire serve [MODEL | FILE.yaml] [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional",
        metavar="MODEL",
        nargs="?",
        help="a directory in Hugging Face format, a GGUF file, a name on the Hub (org/name), or a "
        "YAML file of settings",
    )
    add_settings(parser)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, by groups; destinations are named like the fields."""
    groups: dict[str, Any] = {}
    for row in settings_table():
        if row.group not in groups:
            groups[row.group] = parser.add_argument_group(row.group)
        groups[row.group].add_argument(row.flag, dest=row.field, **_argument(row))


def parse_settings(argv: Sequence[str]) -> Settings:
    """The settings given on a command line. Exits with 2 if it cannot be parsed.

    Raises:
        InvalidSettings: a value cannot be used.
    """
    parser = build_parser()
    given = parse(parser, argv)
    positional = given.pop("positional", None)
    if positional is not None:
        field = "config" if positional.endswith((".yaml", ".yml")) else "model"
        if field in given:
            parser.error(f"'{positional}' and --{field} {given[field]} are both given")
        given[field] = positional
    return Settings.load(given)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Parse ``argv`` into values by name. Exits with 2 on an unknown flag, with what to use."""
    # argparse takes the letters behind a flag without a value, -h, for other such flags.
    unknown = [word for word in argv if word.startswith("-h") and word != "-h"]
    given = argparse.Namespace()
    if not unknown:
        given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hints(argv, unknown)}")
    return vars(given)


def _hints(argv: Sequence[str], unknown: Sequence[str]) -> str:
    """What was probably meant: of one flag in the same line, of several in a line each."""
    flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-"))
    hints = {flag: hint for flag in flags if (hint := foreign_advice(flag) or _nearest(flag))}
    if len(flags) > 1:
        return "".join(f"\n  {flag}: {hint}" for flag, hint in hints.items())
    hint = next(iter(hints.values()), "") if flags else _repeat_hint(argv, unknown[0])
    return f"; {hint}" if hint else ""


def _nearest(flag: str) -> str | None:
    """A question with the setting whose flag is nearly spelt so."""
    if not flag.startswith("--"):
        return None  # too short to resemble anything
    known = [row.flag for row in settings_table()]
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else None


def _repeat_hint(argv: Sequence[str], value: str) -> str:
    """For a second value after the flag of a list; other servers take several there."""
    lists = {row.flag for row in settings_table() if row.kind == "list"}
    before = [word for word in argv[: list(argv).index(value)] if word.startswith("-")]
    flag = before[-1].partition("=")[0] if before else ""
    return f"repeat {flag} before each value" if flag in lists else ""


def _argument(row: Setting) -> dict[str, Any]:
    """The keyword arguments of ``add_argument`` for a setting."""
    help = row.help.replace("%", "%%") + _default(row)
    if row.kind == "flag":
        return {"action": argparse.BooleanOptionalAction, "help": help}
    if row.kind == "list":
        return {"action": "append", "metavar": row.name.split("_")[-1].upper(), "help": help}
    if row.choices:
        return {"metavar": "{" + ",".join(row.choices) + "}", "help": help}
    return {"metavar": row.name.split("_")[-1].upper(), "help": help}


def _default(row: Setting) -> str:
    if row.default is None or row.default == []:
        return ""
    if row.kind == "flag":
        return f" (default: {'on' if row.default else 'off'})"
    return f" (default: {row.default})"
