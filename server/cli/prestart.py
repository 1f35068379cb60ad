"""The first step of ``quire serve``: starts the engine process as early as possible.

Importing torch takes the engine process more than a second, whatever model it loads. So that
process is started before this one imports anything, even the code that decides what to load.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.child import Child


def serve(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    engine = Child("engine.worker", "--ahead")
    try:
        from server.cli.serve import main

        return main(argv, engine)
    finally:
        engine.kill()  # if the command did not get to use it; otherwise it has exited already
