"""The servers that are compared: Quire in its variants, and each peer whose command is given.

A peer's command line comes from a flag or an environment variable, prefixed with ``env NAME=VALUE``
if it needs any. Nothing of a peer is part of this repository.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.cpu.checkpoints.gguf import ensure_gguf
from loadtest.cpu.checkpoints.w8a8 import ensure_w8a8
from loadtest.process import RunningServer, running_command, running_server

MODEL_NAME = "model"  # the name under which every side serves it
EARLIER = "quire, earlier"
MAX_MODEL_LEN = 4096
MAX_SEQUENCES = 64
PROGRAMS = {"vllm": "QUIRE_BENCH_VLLM", "llama": "QUIRE_BENCH_LLAMA_SERVER"}
_PEER_READY_S = 400.0


@dataclass(frozen=True)
class Peer:
    """Another server with the same weights; ``name`` is its program and its number format."""

    name: str

    @property
    def program(self) -> str:
        """The peer's key in :data:`PROGRAMS`."""
        return self.name.split()[0]

    def command(self, program: Sequence[str], model: Path, max_sequences: int) -> list[str]:
        """The command line that serves ``model``, converted first if the peer needs that."""
        kind = self.name.split()[1]
        if self.program == "vllm":
            directory = ensure_w8a8(model) if kind == "w8a8" else model
            limits = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(max_sequences)]
            names = ["--served-model-name", MODEL_NAME, "--dtype", "bfloat16"]
            return [*program, "serve", str(directory), *names, *limits]
        # One pool of cells for all slots, large enough for a full batch of the loads here.
        cells = max(2 * MAX_MODEL_LEN, max_sequences * 512)
        limits = ["--parallel", str(max_sequences), "--kv-unified", "--ctx-size", str(cells)]
        return [*program, "--model", str(ensure_gguf(model, kind)), *limits]


@contextlib.contextmanager
def running_quire(
    model: Path, flags: Sequence[str], command: Sequence[str]
) -> Iterator[RunningServer]:
    """Run Quire on ``model`` with defaults except ``flags``. Raises as :func:`running_server`."""
    arguments = [str(model), "--served-model-name", MODEL_NAME, *flags]
    with running_server(arguments, command=command) as server:
        yield server


@contextlib.contextmanager
def running_earlier(
    model: Path, flags: Sequence[str], command: Sequence[str]
) -> Iterator[dict[str, RunningServer]]:
    """Start another version of Quire and pause it once ready; yield nothing without a command.

    Raises:
        RuntimeError: it did not start; the message holds the end of its output.
    """
    if not command:
        yield {}
        return
    with running_quire(model, flags, command) as server:
        server.pause()
        yield {EARLIER: server}


@contextlib.contextmanager
def running_peers(
    peers: Sequence[Peer], programs: Mapping[str, str], model: Path, max_sequences: int
) -> Iterator[dict[str, RunningServer]]:
    """Start those of ``peers`` whose program is given, and pause each once it is ready.

    Raises:
        RuntimeError: one did not start; the message holds the end of its output.
    """
    with contextlib.ExitStack() as stack:
        running: dict[str, RunningServer] = {}
        for peer in peers:
            given = programs.get(peer.program)
            if given:
                command = peer.command(shlex.split(given), model, max_sequences)
                server = running_command(command, ready_path="/health", ready_s=_PEER_READY_S)
                running[peer.name] = stack.enter_context(server)
                running[peer.name].pause()
        yield running
