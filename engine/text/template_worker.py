"""The process that renders chat templates: standard library and jinja2 only, run as a script.

A template is code that came with a model. It runs in jinja2's immutable sandbox, in this process
of its own, which has no inherited files or environment, may not open files, has a bounded
address space and a timer that kills it; whoever started it kills it earlier.

Frames in both directions: 4 bytes of length, big-endian, then UTF-8 JSON. The first frame holds
``{"templates": {name: source}, "limit_s": s}`` and is answered by ``{"ready": true}``; each
further one ``{"template": name, "context": {...}}`` and is answered by ``{"text": ...}`` or
``{"error": ...}``, with ``"last": true`` if nothing is answered after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

_MEMORY_BYTES = 256 * 2**20  # on top of what the process has when it is ready
_MAX_ERROR_CHARS = 500


def main(module_dirs: list[str]) -> None:
    """Answer frames from standard input until it ends."""
    sys.path.extend(module_dirs)  # the interpreter runs without site-packages: it starts faster
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    first = _read(reader)
    if first is None:
        return
    renderer = _Renderer(first["templates"])
    _confine()
    _write(writer, {"ready": True})
    while (request := _read(reader)) is not None:
        signal.setitimer(signal.ITIMER_REAL, first["limit_s"])
        try:
            reply = {"text": renderer.render(request["template"], request["context"])}
        except MemoryError:
            # What is left of the memory is anyone's guess.
            _write(writer, {"error": "the chat template used too much memory", "last": True})
            return
        except Exception as error:
            reply = {"error": renderer.explain(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(writer, reply)


class _Renderer:
    """Compiled templates in an environment like that of transformers."""

    def __init__(self, sources: dict[str, str]) -> None:
        import jinja2
        import jinja2.debug  # imported by jinja2 when a template fails, when no file can be opened
        import jinja2.exceptions
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox

        class Refused(jinja2.TemplateError):
            """What a template raises with raise_exception."""

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks a model's part for training; here its body is all."""

            tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
            """jinja2's, in which reaching for what is not allowed fails at once."""

            def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
                kind = type(obj).__name__
                raise jinja2.exceptions.SecurityError(
                    f"access to attribute '{attribute}' of a '{kind}' object is unsafe"
                )

        def raise_exception(message: str) -> NoReturn:
            raise Refused(message)

        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._environment = environment
        self._sources = sources
        self._compiled: dict[str, Any] = {}
        self._refused = Refused
        # Touch the parts that jinja2, json and the clock load on first use.
        environment.from_string("{{ [strftime_now('%Y')] | tojson }}").render()
        self.explain(ValueError())

    def render(self, name: str, context: dict[str, Any]) -> str:
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return self._compiled[name].render(**context)

    def explain(self, error: Exception) -> str:
        """One line for the client: the template's own words, or what went wrong in it."""
        words = str(error) or type(error).__name__
        if not isinstance(error, self._refused):
            words = f"the chat template failed: {words}"
        return words[:_MAX_ERROR_CHARS]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _confine() -> None:
    """Take from this process what rendering does not need."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES)
    except (OSError, ValueError):
        pass  # not Linux: the timer remains
    _limit(resource.RLIMIT_NOFILE, 3)  # standard input, output and error: no file can be opened
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))


def _read(reader: BinaryIO) -> dict[str, Any] | None:
    header = reader.read(4)
    if len(header) < 4:
        return None
    return json.loads(reader.read(struct.unpack(">I", header)[0]))


def _write(writer: BinaryIO, value: dict[str, Any]) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    writer.write(struct.pack(">I", len(data)) + data)
    writer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
