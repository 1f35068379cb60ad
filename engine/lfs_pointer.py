"""Files of a model that were never downloaded: git without its LFS extension leaves a note."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelLoadError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path) -> None:
    """Say so if a file that could not be read is such a note.

    Raises:
        ModelLoadError: it is; one line that names the file and what fetches it.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_BEGINNING))
    except OSError:
        return
    if beginning == _BEGINNING:
        raise ModelLoadError(
            f"{path}: is a pointer of Git LFS in place of the file; "
            "'git lfs pull' in that directory fetches it"
        )
