"""Other nodes as threads of the test's process; they connect over TCP with the real handshake."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine.config import EngineConfig, NodesConfig
from engine.parallel import node
from tests.engine.parallel.thread_ranks import ThreadRank

SECRET = b"a secret that nobody else has"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def with_nodes(config: EngineConfig, directory: Path, size: int = 2, **given) -> EngineConfig:
    """The config of node 0."""
    secret = directory / "secret"
    secret.write_bytes(SECRET + b"\n")
    nodes = NodesConfig(
        size=size,
        rank=0,
        master_addr="127.0.0.1",
        master_port=free_port(),
        secret_file=str(secret),
        timeout_s=60.0,
    )
    return msgspec.structs.replace(config, nodes=msgspec.structs.replace(nodes, **given))


def of_node(config: EngineConfig, rank: int, **given) -> EngineConfig:
    """The config of another node."""
    nodes = msgspec.structs.replace(config.nodes, rank=rank, **given)
    return msgspec.structs.replace(config, nodes=nodes)


class ThreadFollower(ThreadRank):
    """A rank of such a node, in place of ``engine.child.Child``."""

    def __init__(self, module: str, option: str, leader: str, pass_fds: Sequence[int]) -> None:
        assert (option, list(pass_fds)) == ("--leader", [int(leader)])
        self._leader = socket.socket(fileno=os.dup(int(leader)))
        super().__init__(module)

    def _run(self, connection: socket.socket) -> None:
        super()._run(self._leader)  # closes the connection
        connection.close()


@contextlib.contextmanager
def serving(*configs: EngineConfig) -> Iterator[None]:
    """Run these nodes, each with its ranks of one engine."""
    node.Child, child = ThreadFollower, node.Child
    threads = [
        threading.Thread(target=node._Node(config, config).serve_once, daemon=True)
        for config in configs
    ]
    try:
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node goes on without its engine"
    finally:
        node.Child = child
