"""``quire serve``, as it begins: what takes longest is set going first.

Importing the tensor library takes the engine's process more than a second, whatever it is to load.
So that process is started before this one imports anything that could tell it.
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
        engine.kill()  # where the command has not come to using it; else it has ended already
