"""Downloading a model from the Hugging Face Hub, with its progress reported in bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# Called with the bytes that are there, and with how many are to be downloaded (0: unknown). The
# first call precedes the download, and there is none if everything is in the cache; the others come
# from the download's threads.
ByteProgress = Callable[[int, int], None]

# Copies of the model in the formats of other libraries.
_IGNORE_PATTERNS = ("original/*", "onnx/*", "openvino/*", "*consolidated*", "flax_*", "tf_*")


def download(
    repository: str,
    revision: str | None,
    wanted: Sequence[str],
    on_progress: ByteProgress | None = None,
) -> str:
    """Download what is not in the cache yet; returns the directory of the revision.

    Args:
        repository: ``org/name``.
        revision: a branch, tag or commit; None is the newest.
        wanted: patterns of the files' names.
        on_progress: see ``ByteProgress``.

    Raises what ``huggingface_hub.snapshot_download`` raises.
    """
    from huggingface_hub import snapshot_download  # slow to import; needed only here

    fetch = partial(
        snapshot_download,
        repository,
        revision=revision,
        allow_patterns=[*wanted],
        ignore_patterns=[*_IGNORE_PATTERNS],
    )
    if on_progress is None:
        return fetch()
    total = _count_missing_bytes(fetch)
    if total == 0:
        return fetch()
    on_progress(0, total or 0)
    return fetch(tqdm_class=_reporting_bar(lambda done: on_progress(done, total or 0)))


def _count_missing_bytes(fetch: Callable[..., Any]) -> int | None:
    """Bytes that ``fetch`` would download; None if that cannot be told."""
    try:
        files = fetch(dry_run=True, tqdm_class=_reporting_bar(lambda done: None))
        return sum(file.file_size for file in files if file.will_download)
    except Exception:  # the download itself will say what is wrong
        return None


def _reporting_bar(report: Callable[[int], None]) -> type:
    """A class of progress bars that show nothing and report the bytes they count.

    There are several bars at a time: of bytes received, of bytes written, of files. The most that
    any of them has counted is reported.
    """
    from tqdm import tqdm

    most = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"file": io.StringIO(), "disable": False}
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            nonlocal most
            if self.unit == "B" and self.n > most:
                most = int(self.n)
                report(most)

    return Bar
