"""Who takes part: Quire in its variants, and each peer whose command is given.

A peer is found by a flag or an environment variable that holds its command line, with whatever
``env NAME=VALUE`` it needs in front; nothing of a peer belongs to this repository.
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

MODEL_NAME = "model"  # under which every side serves it
EARLIER = "quire, earlier"
MAX_MODEL_LEN = 4096
MAX_SEQUENCES = 64
PROGRAMS = {"vllm": "QUIRE_BENCH_VLLM", "llama": "QUIRE_BENCH_LLAMA_SERVER"}
_PEER_READY_S = 400.0


@dataclass(frozen=True)
class Peer:
    """Another server on the same weights; ``name`` is its program and its number format."""

    name: str

    @property
    def program(self) -> str:
        """Key of :data:`PROGRAMS`."""
        return self.name.split()[0]

    def command(self, program: Sequence[str], model: Path, max_sequences: int) -> list[str]:
        """The command line that serves ``model``, which is converted where that is needed."""
        kind = self.name.split()[1]
        if self.program == "vllm":
            directory = ensure_w8a8(model) if kind == "w8a8" else model
            limits = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(max_sequences)]
            names = ["--served-model-name", MODEL_NAME, "--dtype", "bfloat16"]
            return [*program, "serve", str(directory), *names, *limits]
        # One pool of cells for all slots, as large as a full batch of the loads here can need.
        cells = max(2 * MAX_MODEL_LEN, max_sequences * 512)
        limits = ["--parallel", str(max_sequences), "--kv-unified", "--ctx-size", str(cells)]
        return [*program, "--model", str(ensure_gguf(model, kind)), *limits]


@contextlib.contextmanager
def running_quire(
    model: Path, flags: Sequence[str], command: Sequence[str]
) -> Iterator[RunningServer]:
    """Quire on ``model``, with its defaults but for ``flags``; raises as :func:`running_server`."""
    arguments = [str(model), "--served-model-name", MODEL_NAME, *flags]
    with running_server(arguments, command=command) as server:
        yield server


@contextlib.contextmanager
def running_earlier(
    model: Path, flags: Sequence[str], command: Sequence[str]
) -> Iterator[dict[str, RunningServer]]:
    """Another version of Quire, ready and then paused; nothing where no command is given.

    Raises:
        RuntimeError: it did not start; holds the end of its output.
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
    """Those of ``peers`` whose program is given, each ready and then paused.

    Raises:
        RuntimeError: one did not start; holds the end of its output.
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
