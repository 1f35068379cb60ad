"""``quire run-batch``: processes a file of requests into a file of results, without a server.

The lines have the format of /v1/batches and go through the same code; the engine runs in this
process. Results are written as requests finish, so that ``--resume`` continues an interrupted run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import logs
from engine.config import LogFormat
from engine.errors import EngineError, ModelLoadError
from server.cli.flags import add_settings, parse
from server.cli.serve import with_model_directories
from server.settings import InvalidSettings, Settings

if TYPE_CHECKING:
    from engine.client import EngineClient
    from server.store.batches import LineResult

logger = logging.getLogger(__name__)

_LOG_PERIOD_S = 10.0  # between two records of progress without a terminal
_DESCRIPTION = """\
Process a file of requests without a server. The input has one JSON object per line, as for
/v1/batches:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

OUTPUT gets one line per request, in the order in which they finish; for a failed request it
contains the error. Exit status: 0 if all succeeded, 1 if one failed or the input is invalid.
"""


def main(argv: Sequence[str]) -> int:
    """Process a file. Returns the exit status."""
    source, output, resume, overwrite, given = _parse(argv)
    try:
        settings = with_model_directories(Settings.load(given))
        if settings.data_parallel_size > 1:
            raise InvalidSettings("--data-parallel-size: there is one engine, in this process")
        if settings.nnodes > 1:
            raise InvalidSettings("--nnodes: the engine is in this process, on this machine")
        logs.configure(settings.log_level, settings.log_format)
        if output.exists() and source.exists() and output.samefile(source):
            return _print_error(f"{output} is the input; name another file for the results")
        if output.is_dir():
            return _print_error(f"{output} is a directory; name a file for the results")
        if output.exists() and output.stat().st_size and not (resume or overwrite):
            return _print_error(
                f"{output} already exists; --resume continues it, --overwrite replaces it"
            )
        with _rereadable(source) as contents:
            return asyncio.run(_run(settings, source, contents, output, resume))
    except OSError as error:
        return _print_error(f"{error.filename or output}: {error.strerror or error}")
    except (InvalidSettings, ModelLoadError, EngineError) as error:
        return _print_error(" ".join(str(error).split()))


@contextlib.contextmanager
def _rereadable(source: Path) -> Iterator[Path]:
    """Yield ``source``, or a copy of a pipe: the input is checked first, and then read again."""
    if source.is_file():
        yield source
        return
    with source.open("rb") as pipe, tempfile.NamedTemporaryFile(prefix="quire-batch-") as copy:
        shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield Path(copy.name)


async def _run(settings: Settings, source: Path, contents: Path, output: Path, resume: bool) -> int:
    from server.batches.offline import prune_output, run_file, validate_file

    found = await validate_file(contents, settings)
    for error in found.errors:
        place = "" if error.line is None else f"line {error.line}: "
        _print_error(f"{source}: {place}{error.message}")
    if found.errors:
        return 1
    done = prune_output(output, discard_all=not resume)
    if found.ids <= done:
        logger.info("all %d requests are done already; see %s", found.num_lines, output)
        return 0
    display = _Display(found.num_lines, len(found.ids & done), settings.log_format)
    try:
        engine = _engine(settings)
        await run_file(settings, engine, contents, output, done, display.add_result)
    finally:
        display.close()
    if display.num_failed:
        _print_error(f"{display.num_failed} of {found.num_lines} requests failed; see {output}")
    return 1 if display.num_failed else 0


def _engine(settings: Settings) -> EngineClient:
    """An engine in this process that shows its loading."""
    from engine.client import LoadProgress
    from engine.inline import InlineClient
    from engine.types import EngineInfo
    from server.cli.progress import LoadDisplay

    class Shown(InlineClient):
        async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
            display = LoadDisplay(settings.log_format)
            try:
                return await super().start(on_progress or display)
            finally:
                display.clear()

    return Shown(settings.engine_config())


class _Display:
    """Counts results: a progress bar on a terminal, otherwise an occasional record of the log."""

    def __init__(self, num_lines: int, num_done: int, form: LogFormat) -> None:
        from tqdm import tqdm

        self.num_failed = 0
        self._num_lines, self._num_done = num_lines, num_done
        self._num_tokens = 0
        self._started_s = self._logged_s = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and form == "text":
            self._bar = tqdm(total=num_lines, initial=num_done, unit="request", file=sys.stderr)

    def add_result(self, result: LineResult) -> None:
        """Count a result."""
        self.num_failed += not result.ok
        self._num_done += 1
        self._num_tokens += result.output_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._summary(), refresh=False)
            self._bar.update()
        elif time.monotonic() >= self._logged_s + _LOG_PERIOD_S:
            self._log()

    def close(self) -> None:
        """Leave the bar as it is, or log the end."""
        if self._bar is not None:
            self._bar.close()
        else:
            self._log()

    def _log(self) -> None:
        self._logged_s = time.monotonic()
        logger.info("%d/%d requests, %s", self._num_done, self._num_lines, self._summary())

    def _summary(self) -> str:
        """The rate of output tokens, and the failures if any."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"{self._num_tokens / elapsed_s:,.0f} tokens/s{failed}"


def _parse(argv: Sequence[str]) -> tuple[Path, Path, bool, bool, dict[str, Any]]:
    """Input, output, whether to resume or overwrite, and the settings. Exits with 2 if invalid."""
    parser = argparse.ArgumentParser(
        prog="quire run-batch",
        usage="quire run-batch INPUT -o OUTPUT [--model MODEL] [options]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("positional", metavar="INPUT", nargs="?", help="file of requests")
    parser.add_argument("-i", "--input-file", metavar="INPUT", help="same as INPUT")
    parser.add_argument(
        "-o", "--output-file", metavar="OUTPUT", required=True, help="file of results"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="keep the results in OUTPUT and run the remaining requests",
    )
    choice.add_argument(
        "--overwrite", action="store_true", default=False, help="discard the results in OUTPUT"
    )
    add_settings(parser)
    given = parse(parser, argv)
    inputs = [given.pop(name, None) for name in ("positional", "input_file")]
    source = inputs[0] or inputs[1]
    if source is None or None not in inputs:
        parser.error("give one INPUT")
    output = Path(given.pop("output_file"))
    return Path(source), output, given.pop("resume"), given.pop("overwrite"), given


def _print_error(text: str) -> int:
    """Print an error in one line; returns the exit status of a failure."""
    print(f"quire run-batch: {text}", file=sys.stderr)
    return 1
