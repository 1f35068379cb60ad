"""Several clients of one engine, seen from its hub: a client's requests end with it."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from pathlib import Path

import pytest

from engine import hub as hub_module
from engine.frames import Abort, Begun, FrameReader, Message, Output, Submit, encode, receive
from engine.hub import ClientHub
from engine.sleep_controller import ControlCall
from engine.types import EngineOutput, FinishReason, Request
from tests.engine.fakes import make_info

LIMIT_S = 30.0

Row = tuple[str, tuple[int, ...], FinishReason | None]


def test_what_a_lost_client_has_asked_for_last_is_aborted_too(tmp_path: Path) -> None:
    """The loop notices the loss while the client's thread is handling one of its requests."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "engine"))
    listener.listen()
    commands: list[Submit | Abort | ControlCall] = []
    first, told, ended = threading.Event(), threading.Event(), threading.Event()

    def put(command: Submit | Abort | ControlCall) -> None:
        commands.append(command)
        if command == submits[0]:
            first.set()
            told.wait(LIMIT_S)
        if isinstance(command, Abort):
            ended.set()

    hub = ClientHub(listener, make_info(8, 4, 20))
    hub.start(put)
    submits = [Submit((Request(id=id_, prompt_token_ids=(1,)),)) for id_ in "ab"]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "engine"))
        client.recv(1)  # of its greeting: the hub knows the client
        client.sendall(b"".join(map(encode, submits)))
    assert first.wait(LIMIT_S)
    news = EngineOutput(ids=("a",), token_ids=((3,),), finish_reasons=(None,))
    loop = threading.Thread(target=hub.emit, args=(news,))
    loop.start()
    loop.join(0.1)  # as far as it gets without the client's thread
    told.set()
    loop.join(LIMIT_S)
    assert ended.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name == "engine-client-1":
            thread.join(LIMIT_S)
    listener.close()
    submitted = [one.requests[0].id for one in commands if isinstance(one, Submit)]
    aborted = [id_ for one in commands if isinstance(one, Abort) for id_ in one.ids]
    assert sorted(aborted) == sorted(submitted)
    assert isinstance(commands[-1], Abort), "asked for by nobody"


class Client:
    """A client of the hub, and the rows that it is sent."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(str(path))
        self._reader = FrameReader()
        receive(self.socket, self._reader)  # its greeting: the hub knows it

    def messages(self, count: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < count:
            found += receive(self.socket, self._reader)
        return found

    def rows(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            for message in receive(self.socket, self._reader):
                assert isinstance(message, Output)
                told = message.output
                rows += zip(told.ids, told.token_ids, told.finish_reasons, strict=True)
        return rows


def start_hub(
    directory: Path,
) -> tuple[socket.socket, ClientHub, queue.Queue[Submit | Abort | ControlCall]]:
    """A hub at ``directory / "engine"``, its listener, and the commands that it passes on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "engine"))
    listener.listen()
    commands: queue.Queue[Submit | Abort | ControlCall] = queue.Queue()
    hub = ClientHub(listener, make_info(8, 4, 20))
    hub.start(commands.put)
    return listener, hub, commands


def output(*rows: Row) -> EngineOutput:
    ids, token_ids, reasons = zip(*rows, strict=True)
    return EngineOutput(ids=ids, token_ids=token_ids, finish_reasons=reasons)


def test_who_comes_back_is_told_of_its_new_requests_alone(tmp_path: Path) -> None:
    """It asks again under the same ids while the engine is still in a step with the old ones."""
    listener, hub, commands = start_hub(tmp_path)
    submit = Submit(tuple(Request(id=id_, prompt_token_ids=(1,)) for id_ in "ab"))

    for _ in range(2):  # it is lost twice before the engine has told of any end
        client = Client(tmp_path / "engine")
        client.socket.sendall(encode(submit))
        assert commands.get(timeout=LIMIT_S) == submit
        client.socket.close()
        aborted = commands.get(timeout=LIMIT_S)
        assert isinstance(aborted, Abort)
        assert sorted(aborted.ids) == ["a", "b"]
    client = Client(tmp_path / "engine")
    client.socket.sendall(encode(submit))
    assert commands.get(timeout=LIMIT_S) == submit

    hub.emit(output(("a", (3,), None), ("b", (3,), "length")))  # of the step
    hub.emit(output(("a", (), "abort")))
    hub.emit(output(("a", (), "abort"), ("b", (), "abort"), ("a", (4,), None), ("b", (4,), None)))
    hub.emit(output(("a", (5,), None), ("b", (5,), "stop")))
    hub.emit(output(("a", (6,), "length")))
    assert client.rows(5) == [
        ("a", (4,), None),
        ("b", (4,), None),
        ("a", (5,), None),
        ("b", (5,), "stop"),
        ("a", (6,), "length"),
    ]
    client.socket.close()
    aborted = commands.get(timeout=LIMIT_S)
    assert isinstance(aborted, Abort)
    assert aborted.ids == (), "they have ended"
    listener.close()


def test_who_comes_back_before_its_loss_is_noticed_has_its_earlier_requests_aborted(
    tmp_path: Path,
) -> None:
    """Else the engine would refuse ids that are in use, and the streams would fail."""
    listener, hub, commands = start_hub(tmp_path)
    submit = Submit(tuple(Request(id=id_, prompt_token_ids=(1,)) for id_ in "ab"))
    earlier, client = Client(tmp_path / "engine"), Client(tmp_path / "engine")
    earlier.socket.sendall(encode(submit))
    assert commands.get(timeout=LIMIT_S) == submit
    again = Submit((submit.requests[1],))
    client.socket.sendall(encode(again))
    aborted = commands.get(timeout=LIMIT_S)
    assert isinstance(aborted, Abort)
    assert sorted(aborted.ids) == ["a", "b"]
    assert commands.get(timeout=LIMIT_S) == again
    assert earlier.socket.recv(1) == b""
    hub.emit(output(("a", (), "abort"), ("b", (), "abort"), ("b", (4,), "length")))
    assert client.rows(1) == [("b", (4,), "length")]
    for each in (earlier, client):
        each.socket.close()
    listener.close()


def test_each_client_is_told_which_of_its_own_requests_are_begun(tmp_path: Path) -> None:
    listener, hub, commands = start_hub(tmp_path)
    clients = [Client(tmp_path / "engine") for _ in range(2)]
    for client, names in zip(clients, ("ab", "c"), strict=True):
        submit = Submit(tuple(Request(id=id_, prompt_token_ids=(1,)) for id_ in names))
        client.socket.sendall(encode(submit))
        assert commands.get(timeout=LIMIT_S) == submit
    hub.begin(["c", "unknown", "b"], [])
    hub.begin(["a"], ["b"])
    assert clients[0].messages(2) == [Begun(("b",)), Begun(("a",), ("b",))]
    assert clients[1].messages(1) == [Begun(("c",))]
    for client in clients:
        client.socket.close()
    listener.close()


class _Short(socket.socket):
    """A listener in a process that has no descriptors left at first."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, str]:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_who_cannot_be_accepted_yet_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_ACCEPT_PAUSE_S", 0.001)
    listener = _Short(socket.AF_UNIX)
    listener.bind(str(tmp_path / "engine"))
    listener.listen()
    hub = ClientHub(listener, make_info(8, 4, 20))
    hub.start(lambda command: None)
    client = Client(tmp_path / "engine")  # it is greeted
    assert listener.num_refused == 2
    client.socket.close()
    listener.close()
