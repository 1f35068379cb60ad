"""Resolution of a model's name, or an adapter's, to the directory or file that holds it.

    ./directory              in Hugging Face format, or with one GGUF model in it
    ./model.gguf             a GGUF file
    org/name                 on the Hugging Face Hub, its newest revision
    org/name@revision        a branch, tag or commit
    org/name:Q4_K_M          the GGUF file there that has this in its name

The Hub's own variables apply: ``HF_TOKEN`` for gated and private models, ``HF_HUB_OFFLINE=1`` to
use only what was downloaded before, ``HF_HOME`` for the cache's location, ``HF_ENDPOINT`` for a
mirror.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.config import LoadFormat
from engine.errors import ModelLoadError
from engine.gguf.file import find_gguf, is_gguf
from engine.lora.files import CONFIG, WEIGHTS
from engine.model_download import download

# Called with the model's name, and as :data:`engine.model_download.ByteProgress`.
DownloadProgress = Callable[[str, int, int], None]

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?(?::([\w.-]+))?")
_ALLOW_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_PATTERNS: dict[LoadFormat, tuple[str, ...]] = {
    "auto": ("*.safetensors",),
    "bin": ("*.bin",),
    "dummy": (),
    "stub": (),
}


def is_hub_name(name: str) -> bool:
    """Whether ``name``, if it is nothing on disk, is looked for on the Hub."""
    return _HUB_NAME.fullmatch(name) is not None


def resolve_tokenizer(name: str, on_progress: DownloadProgress | None = None) -> str:
    """As ``resolve_model``, without the weights of models that are no GGUF files."""
    return resolve_model(name, "dummy", on_progress)


def resolve_adapter(name: str, on_progress: DownloadProgress | None = None) -> str:
    """As ``resolve_model``, for a directory in PEFT format: of a repository, the files of that."""
    named = _HUB_NAME.fullmatch(name)
    if os.path.exists(name) or named is None or named[3] is not None:
        return name
    return _fetch(name, named[1], named[2], [CONFIG, WEIGHTS], on_progress)


def resolve_model(
    name: str, load_format: LoadFormat = "auto", on_progress: DownloadProgress | None = None
) -> str:
    """The local path of ``name``: itself if it exists, otherwise downloaded from the Hub.

    Args:
        name: see above.
        load_format: "auto" downloads safetensors, "bin" PyTorch's own files, others no weights.
        on_progress: called as a download proceeds, in place of the Hub's own progress bars.

    Raises:
        ModelLoadError: there is no such model, or the Hub denies it; one line.
    """
    if os.path.isdir(name) or is_gguf(name):
        return name
    if os.path.exists(name):
        raise ModelLoadError(
            f"{name} is not a GGUF file; other models are directories in Hugging Face format"
        )
    named = _HUB_NAME.fullmatch(name)
    if named is None:
        kind = "GGUF file" if name.endswith(".gguf") else "model directory"
        raise ModelLoadError(f"there is no {kind} {name}")
    repository, revision, quantised = named.groups()
    if quantised is None:
        wanted = [*_ALLOW_PATTERNS, *_WEIGHT_PATTERNS[load_format]]
        return _fetch(name, repository, revision, wanted, on_progress)
    forms = {quantised, quantised.lower(), quantised.upper()}
    wanted = [f"*{form}*.gguf" for form in sorted(forms)]
    return str(_select_gguf(name, Path(_fetch(name, repository, revision, wanted, on_progress))))


def _fetch(
    name: str,
    repository: str,
    revision: str | None,
    wanted: list[str],
    on_progress: DownloadProgress | None,
) -> str:
    from huggingface_hub import errors  # slow to import; needed only here

    report = None if on_progress is None else partial(on_progress, name)
    try:
        return download(repository, revision, wanted, report)
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on its page and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision}"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such model, or HF_TOKEN is needed to see it"
    except errors.LocalEntryNotFoundError:
        reason = "the Hub cannot be reached, and the model is not in the cache"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = "HF_HUB_OFFLINE is set, and the model is not in the cache"
    except Exception as error:  # its other errors come from several libraries and vary by version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"the Hub refused the download: {lines[0][:200]}"
    raise ModelLoadError(f"there is no directory {name}, and no model of the Hub: {reason}")


def _select_gguf(name: str, snapshot: Path) -> Path:
    """The downloaded file; the first one if the model is split into several."""
    quantised = name.rpartition(":")[2].lower()
    found = {
        path
        for file in snapshot.rglob("*.gguf")
        if quantised in file.name.lower() and (path := find_gguf(file)) is not None
    }
    if len(found) == 1:
        return found.pop()
    if not found:
        raise ModelLoadError(f"{name}: the model has no GGUF file with that in its name")
    names = ", ".join(sorted(path.name for path in found)[:4])
    raise ModelLoadError(f"{name}: several files have that in their names: {names}")
