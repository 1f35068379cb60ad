"""``quire serve --nnodes``: validates multi-node settings and serves the ranks of other nodes.

All nodes but the first run only ranks, without an API.
"""

from __future__ import annotations

import ipaddress

from engine.parallel.handshake import read_secret
from engine.parallel.node import serve_node
from server.settings import InvalidSettings, Settings


def check_nodes(settings: Settings) -> None:
    """Check that the nodes can serve with these settings, as far as this node can tell.

    Raises:
        InvalidSettings: it is not; one line that names the setting.
        ModelLoadError: the secret cannot be used.
    """
    nodes = settings.nnodes
    if settings.node_rank >= nodes:
        raise InvalidSettings(f"--node-rank {settings.node_rank}: must be below --nnodes, {nodes}")
    if nodes == 1:
        return
    asked = f"--nnodes {nodes}"
    if settings.master_addr is None:
        raise InvalidSettings(f"{asked} needs --master-addr, the first machine's address")
    if _is_wildcard(settings.master_addr):
        raise InvalidSettings(
            f"--master-addr {settings.master_addr}: must be the address by which the others know "
            "the first machine"
        )
    if settings.node_secret_file is None:
        raise InvalidSettings(
            f"{asked} needs --node-secret-file, so that no other process can join"
        )
    read_secret(str(settings.node_secret_file))
    if settings.data_parallel_size > 1:
        raise InvalidSettings(f"--data-parallel-size: not with {asked}, which has one engine")
    if settings.loras or settings.lora_dir is not None:
        given = "--lora" if settings.loras else "--lora-dir"
        raise InvalidSettings(f"{given}: adapters are not shared out to several machines yet")
    size, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if not settings.node_rank and size * stages % nodes:
        given = f"--tensor-parallel-size {size}"
        if stages > 1:
            given += f" times --pipeline-parallel-size {stages}"
        raise InvalidSettings(f"{asked}: {given} cannot be divided by it")


def serve_ranks(settings: Settings) -> None:
    """Serve as a node other than the first, until told to stop. Raises ModelLoadError."""
    serve_node(settings.engine_config(), Settings.from_json("{}").engine_config())


def _is_wildcard(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False  # a host name
