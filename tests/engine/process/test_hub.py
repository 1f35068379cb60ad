"""Several clients of one engine, seen from its hub: a client's requests end with it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from engine.frames import Abort, Submit, encode
from engine.hub import ClientHub
from engine.sleep_controller import ControlCall
from engine.types import EngineOutput, Request
from tests.engine.fakes import make_info

LIMIT_S = 30.0


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
