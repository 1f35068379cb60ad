"""Which nodes may join an engine, and how others are rejected."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig
from engine.errors import ModelLoadError
from engine.framing import encode
from engine.parallel import handshake, node
from engine.parallel.compatibility import find_mismatch, fingerprint_node
from engine.parallel.frames import Failed, Join
from engine.parallel.rank_listener import RankListener
from engine.parallel.registration import Accepted, RegisterRank, Rejected, receive_reply
from tests.engine.parallel.thread_nodes import SECRET, of_node, with_nodes
from tests.servers import ROOT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 8192)
    return directory


def config_of(model: Path, tmp_path: Path, nodes: int = 2, **given) -> EngineConfig:
    config = EngineConfig(model=str(model), tensor_parallel_size=nodes)
    return with_nodes(config, tmp_path, nodes, **given)


def join(number: int, enlist: RegisterRank, rank: object) -> bytes:
    return encode(Join(EngineConfig(model=enlist.model), number, None, "127.0.0.1"))


@contextlib.contextmanager
def gathering(config: EngineConfig):
    waits = RankListener(config, join)
    try:
        yield waits
    finally:
        waits.close()


def place_of(config: EngineConfig) -> tuple[str, int]:
    assert config.nodes is not None
    return config.nodes.master_addr, config.nodes.master_port


def knock(config: EngineConfig) -> socket.socket:
    """A connection whose other end has proof that we know the secret."""
    connection = socket.create_connection(place_of(config), timeout=20)
    handshake.authenticate_as_dialer(connection, SECRET)
    connection.settimeout(20)
    return connection


def enlist(config: EngineConfig, rank: int = 1, place: int = 0, **given) -> RegisterRank:
    told = RegisterRank(rank, place, config.model, None, fingerprint_node(config, defaults=config))
    return msgspec.structs.replace(told, **given)


def answer_to(config: EngineConfig, told: RegisterRank) -> Accepted | Rejected:
    with knock(config) as connection:
        connection.sendall(encode(told))
        return receive_reply(connection)


def names_of(waits: RankListener) -> list[str]:
    """The names of all ranks once they have joined; they are released."""
    ranks = waits.wait()
    for rank in ranks:
        rank.end(0.0)
    return [rank.name for rank in ranks]


# ------------------------------------------------------------ the secret


def both(ours: bytes, theirs: bytes) -> list[str]:
    """The listener's and the dialer's outcome."""
    one, other = socket.socketpair()
    said = ["", ""]

    def run(place: int, side) -> None:
        try:
            side()
        except handshake.HandshakeError as error:
            said[place] = str(error)

    with one, other:
        thread = threading.Thread(
            target=run, args=(0, partial(handshake.authenticate_as_listener, one, ours))
        )
        thread.start()
        run(1, partial(handshake.authenticate_as_dialer, other, theirs))
        thread.join()
    return said


def test_who_knows_the_secret_is_admitted():
    assert both(SECRET, SECRET) == ["", ""]


def test_who_does_not_is_sent_away_and_told_so():
    assert both(SECRET, SECRET + b"!") == ["it does not know the secret", "it has another secret"]


def test_a_listener_that_does_not_know_it_is_found_out():
    """It accepts anything, and answers with what a listener could have made up."""
    one, other = socket.socketpair()
    with one, other:
        one.sendall(handshake._GREETING + bytes(32))
        one.sendall(bytes(32))
        with pytest.raises(handshake.WrongSecret):
            handshake.authenticate_as_dialer(other, SECRET)


def test_a_code_cannot_be_sent_back():
    """The dialer's proof does not prove the listener."""
    one, other = socket.socketpair()

    def reflect() -> None:
        one.sendall(handshake._GREETING + bytes(32))
        told = one.recv(64, socket.MSG_WAITALL)
        one.sendall(told[32:])

    with one, other:
        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(handshake.WrongSecret):
            handshake.authenticate_as_dialer(other, SECRET)
        thread.join()


def test_nothing_but_fixed_bytes_is_read_of_a_stranger(model, tmp_path):
    """Before the handshake, the announcement of a gigabyte frame is just 64 wrong bytes."""
    config = config_of(model, tmp_path)
    with gathering(config), socket.create_connection(place_of(config), timeout=20) as stranger:
        stranger.sendall(b"\xff" * 64)
        said = b""
        while data := stranger.recv(4096):
            said += data
        assert said[:16] == handshake._GREETING
        assert said[48:] == bytes(32)  # and then it hung up


def test_who_says_nothing_holds_nobody_up(model, tmp_path):
    config = config_of(model, tmp_path)
    with gathering(config) as waits, contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(place_of(config), timeout=20))
        with knock(config) as connection:
            connection.sendall(encode(enlist(config)))
            assert isinstance(receive_reply(connection), Accepted)
            assert len(names_of(waits)) == 1


@pytest.mark.parametrize(
    ("content", "told"), [(None, "No such file"), (b"short\n", "16 bytes or more, this one 5")]
)
def test_a_secret_that_is_none_is_refused(tmp_path, content, told):
    path = tmp_path / "its-file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"^node_secret_file .*its-file: .*{told}"):
        handshake.read_secret(str(path))


# ------------------------------------------------------------ agreement


def test_what_differs_is_named(model, tmp_path):
    config = config_of(model, tmp_path)
    other = msgspec.structs.replace(
        config, dtype="float32", cache=CacheConfig(block_size=32), num_threads=3, log_level="debug"
    )
    ours = fingerprint_node(config)
    assert find_mismatch(ours, fingerprint_node(config, defaults=config), 1) is None
    theirs = fingerprint_node(other, defaults=config)
    assert sorted(theirs.settings) == ["cache.block_size", "dtype"]  # local ones are not sent
    assert find_mismatch(ours, theirs, 1) == 'dtype is "float32" on node 1, and "auto" on node 0'
    older = msgspec.structs.replace(theirs, versions={**theirs.versions, "torch": "1.0"})
    assert "torch is 1.0 on node 1, and " in (find_mismatch(ours, older, 1) or "")


def test_what_is_not_given_is_not_compared(model, tmp_path):
    """Node 0 sends it."""
    default = EngineConfig(model="elsewhere")
    config = msgspec.structs.replace(config_of(model, tmp_path), dtype="float32")
    theirs = fingerprint_node(
        of_node(msgspec.structs.replace(config, dtype="auto"), 1), defaults=default
    )
    assert find_mismatch(fingerprint_node(config), theirs, 1) is None


@pytest.mark.parametrize("at", [0, 1 << 20, (1 << 21) - 1])
def test_other_weights_are_noticed(model, tmp_path, at):
    """Large files are compared by samples, including the beginning and the end."""
    config = config_of(model, tmp_path)
    before = fingerprint_node(config)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[at : at + 40_000] = bytes(len(content[at : at + 40_000]))  # as a different tensor would
    content[at] ^= 1
    weights.write_bytes(content)
    reason = find_mismatch(before, fingerprint_node(config), 1)
    assert reason == "the model's model.safetensors on node 1 is not that on node 0"
    weights.unlink()
    reason = find_mismatch(before, fingerprint_node(config), 1)
    assert reason == "the model has no model.safetensors on node 1, and has one on node 0"


# ------------------------------------------------------------ joining


def test_ranks_are_taken_in_and_then_nobody_listens(model, tmp_path):
    config = msgspec.structs.replace(config_of(model, tmp_path), tensor_parallel_size=4)
    with gathering(config) as waits, knock(config) as one, knock(config) as two:
        for place, connection in ((1, two), (0, one)):
            connection.sendall(encode(enlist(config, place=place)))
            assert receive_reply(connection) == Accepted(2 + place, 2)
        names = names_of(waits)
        assert names == ["rank 2 (node 1, 127.0.0.1)", "rank 3 (node 1, 127.0.0.1)"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place_of(config), timeout=20)


def test_who_disagrees_is_refused_and_who_agrees_is_taken(model, tmp_path, caplog):
    config = config_of(model, tmp_path)
    other = fingerprint_node(msgspec.structs.replace(config, dtype="float16"), defaults=config)
    with gathering(config) as waits:
        answer = answer_to(config, enlist(config, fingerprint=other))
        reason = 'dtype is "float16" on node 1, and "auto" on node 0'
        assert answer == Rejected(reason, is_final=True)
        assert f"node 1 (127.0.0.1) was refused: {reason}" in caplog.text
        assert answer_to(config, enlist(config, rank=2)) == Rejected(
            "node_rank 2 is none of those that node 0 waits for, 1 to 1", is_final=True
        )
        with knock(config) as connection:
            connection.sendall(encode(enlist(config)))
            assert isinstance(receive_reply(connection), Accepted)
            assert len(names_of(waits)) == 1


def test_two_machines_of_one_number_are_not_both_taken(model, tmp_path):
    config = config_of(model, tmp_path, nodes=3)
    with gathering(config), knock(config) as first:
        first.sendall(encode(enlist(config)))
        assert isinstance(receive_reply(first), Accepted)
        answer = answer_to(config, enlist(config))
        assert answer == Rejected("rank 1 of node 1 is there already", is_final=False)


def test_who_goes_again_may_come_again(model, tmp_path):
    config = config_of(model, tmp_path, nodes=3)
    with gathering(config) as waits:
        with knock(config) as first:
            first.sendall(encode(enlist(config)))
            assert isinstance(receive_reply(first), Accepted)
        with contextlib.ExitStack() as stack:
            for rank in (1, 2):
                deadline = time.monotonic() + 20
                while True:  # it is noticed in a moment
                    again = stack.enter_context(knock(config))
                    again.sendall(encode(enlist(config, rank=rank)))
                    if isinstance(receive_reply(again), Accepted):
                        break
                    assert time.monotonic() < deadline
            assert len(names_of(waits)) == 2


def test_what_a_rank_fails_for_is_told_before_all_are_there(model, tmp_path):
    config = config_of(model, tmp_path, nodes=3)
    with gathering(config) as waits:
        with knock(config) as first:
            first.sendall(encode(enlist(config)))
            receive_reply(first)
            first.sendall(encode(Failed("rank 1: no room")))
        with pytest.raises(ModelLoadError, match=r"^rank 1: no room$"):
            waits.wait()


def test_an_address_that_is_not_this_machines_is_refused(model, tmp_path):
    config = config_of(model, tmp_path, master_addr="192.0.2.1")
    with pytest.raises(ModelLoadError, match=r"^cannot listen on 192\.0\.2\.1:\d+: cannot assign"):
        RankListener(config, join)


# ------------------------------------------------------------ other nodes


def test_what_waits_on_another_machine_has_no_tensor_library():
    """A waiting node has not imported torch, nor the code that computes the model."""
    code = "import sys, server.cli.node; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "False\n", told.stderr


def test_a_machine_that_is_refused_ends_with_the_reason(model, tmp_path):
    config = config_of(model, tmp_path)
    theirs = msgspec.structs.replace(of_node(config, 1), dtype="float16")
    with (
        gathering(config),
        pytest.raises(ModelLoadError, match=r'refuses: dtype is "float16" on node 1'),
    ):
        node.serve_node(theirs, config)


def test_a_machine_with_another_secret_ends_with_the_reason(model, tmp_path):
    config = config_of(model, tmp_path)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"0123456789abcdef")
    with gathering(config), pytest.raises(ModelLoadError, match=r"node 0 at .* has another secret"):
        node.serve_node(of_node(config, 1, secret_file=str(wrong)), config)


def test_a_machine_does_not_wait_for_ever(model, tmp_path):
    config = config_of(model, tmp_path)
    with pytest.raises(ModelLoadError, match=r"^node 0 did not come to .* within 0.1 s .*refused"):
        node.serve_node(of_node(config, 1, timeout_s=0.1), config)
