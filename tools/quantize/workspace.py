"""The working directory of a run, from which an interrupted run is resumed.

OUT.partial/
  state.json        the job, and how many layers are done
  parts/            a file for each finished layer
  streams/          activations before the next layer
  model/            the result, once all layers are done; becomes OUT by one rename
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tools.quantize.recipe import QuantizeError


class Workspace:
    """The working directory of a run.

    Args:
        output: the directory to create.
        job: a description of the job; a run is only resumed for the same job.

    Raises:
        QuantizeError: the output exists already, or there is an unfinished run of another job.
        OSError: the directory cannot be written.
    """

    def __init__(self, output: Path, job: dict[str, Any]) -> None:
        self.output = output
        self.root = output.with_name(f"{output.name}.partial")
        if output.exists():
            raise QuantizeError(f"{output} is there already; choose another name, or remove it")
        self._state = self.root / "state.json"
        self._job = json.loads(json.dumps(job))
        self.reports: list[dict[str, Any]] = []
        if self._state.is_file():
            self._resume()
        elif self.root.exists() and any(self.root.iterdir()):
            raise QuantizeError(f"{self.root} is there and is no run of quire quantize; remove it")
        for directory in (self.parts, self.streams):
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def parts(self) -> Path:
        """The directory of the layers' files."""
        return self.root / "parts"

    @property
    def streams(self) -> Path:
        """The directory of the activations."""
        return self.root / "streams"

    @property
    def model(self) -> Path:
        """The directory of the result."""
        return self.root / "model"

    @property
    def num_done(self) -> int:
        """The number of finished layers."""
        return len(self.reports)

    def part(self, layer: int) -> Path:
        """The file of a layer."""
        return self.parts / f"layer-{layer:05}.safetensors"

    def commit(self, report: dict[str, Any]) -> None:
        """Mark the next layer as done, once its part and its activations are written."""
        self.reports.append(report)
        self._write()

    def start(self) -> None:
        """Start over with no layer done."""
        self._write()

    def finish(self) -> None:
        """Move the complete result to its place and remove the rest."""
        try:
            self.model.rename(self.output)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.output)) from None
        shutil.rmtree(self.root)

    def _resume(self) -> None:
        try:
            state = json.loads(self._state.read_text("utf-8"))
            job, reports = state["job"], state["reports"]
        except (ValueError, KeyError, TypeError):
            raise QuantizeError(f"{self._state}: is damaged; remove {self.root}") from None
        if job != self._job:
            differs = [key for key in self._job if job.get(key) != self._job[key]]
            raise QuantizeError(
                f"{self.root} holds an unfinished run with another {' and '.join(differs)}; "
                "use the same settings to continue it, or remove it"
            )
        self.reports = reports

    def _write(self) -> None:
        unfinished = self._state.with_name("state.json.unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({"job": self._job, "reports": self.reports}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._state)
