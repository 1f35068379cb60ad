"""The ``quire`` command.

Nothing heavy is imported here. Each command's module is imported once it has been chosen, and
``quire serve`` starts its engine process before it imports anything else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from server.cli.output import CheckedOutput, OutputFailed

_HELP = """\
Quire serves large language models over an OpenAI-compatible HTTP API.

Usage: quire COMMAND [options]        (quire COMMAND --help lists the options)

  quire serve                     Serve the embedded model on port 8000
  quire serve MODEL               Serve a model: a directory in Hugging Face format, a GGUF
                                  file, or org/name on the Hub
  quire ray MODEL --nnodes N      Serve a model from several machines of a Ray cluster
  quire chat                      Chat with a model on a running server
  quire complete PROMPT           Complete a text with a running server
  quire run-batch IN -o OUT       Process a file of requests without a server
  quire quantize MODEL -o OUT     Quantise a model: RTN, GPTQ or AWQ
  quire distill TEACHER -o OUT    Train a small model to imitate a large one
  quire bench                     Benchmark a running server: throughput, latencies, a report
  quire plan                      Estimate how many replicas some traffic needs
  quire keys COMMAND              Create, list, rotate and revoke API keys
  quire version                   Print the version

Start with:

  quire serve
  quire chat                      (in a second terminal)
"""

_OWN_PACKAGES = ("demo", "engine", "kernels", "loadtest", "server", "tools")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 success, 1 failure, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed: nothing can be written, nor fail
        return _run(arguments)
    output = CheckedOutput(sys.stdout)
    try:
        with contextlib.redirect_stdout(output):
            try:
                return _run(arguments)
            finally:
                output.flush()  # here, where what fails can be told
    except OutputFailed as failure:
        output.discard()
        if failure.reason is None:
            return 0
        command = " ".join(("quire", *arguments[:1]))
        print(f"{command}: cannot write to standard output: {failure.reason}", file=sys.stderr)
        return 1


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    command, rest = arguments[0], arguments[1:]
    try:
        match command:
            case "serve":
                from server.cli.prestart import serve as run
            case "ray":
                from server.cli.ray_cluster import main as run
            case "chat":
                from server.cli.chat import chat_main as run
            case "complete":
                from server.cli.chat import complete_main as run
            case "run-batch":
                from server.cli.run_batch import main as run
            case "quantize":
                from server.cli.quantize import main as run
            case "bench":
                from loadtest.cli import main as run
            case "plan":
                from tools.plan.cli import main as run
            case "distill":
                from tools.distill.cli import main as run
            case "keys":
                from server.cli.keys import main as run
            case "version" | "--version":
                from server.cli.version import main as run
            case _:
                print(f"quire: there is no command '{command}'\n\n{_HELP}", file=sys.stderr, end="")
                return 2
        return run(rest)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN_PACKAGES:
            raise
        print(
            f"quire {command}: the package '{error.name}' is not installed for {sys.executable}; "
            "'make install' puts all of them into .venv, with the command .venv/bin/quire",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
