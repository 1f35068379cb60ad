"""The vector of a pooling request, accumulated over the chunks of its prompt."""

from __future__ import annotations

import numpy as np

from engine.pooling import PoolingParams

_LITTLE = np.dtype("<f4")
_MIN_NORM = 1e-12  # lower bound of the norm when normalising


class PoolingAccumulator:
    """A request's vector so far; see the runner's row contract.

    Sums are float64, so one chunk and many give the same vector, except for the last bit.
    """

    __slots__ = ("_params", "_vector")

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self._vector: np.ndarray | None = None

    def add(self, part: bytes) -> None:
        """Add the contribution of one step's tokens."""
        vector = np.frombuffer(part, _LITTLE).astype(np.float64)
        if self._vector is None or self._params.kind in ("last", "cls"):
            self._vector = vector
        elif self._params.kind == "mean":
            self._vector += vector
        else:
            np.maximum(self._vector, vector, out=self._vector)

    def finish(self) -> bytes | None:
        """The whole prompt's vector as float32 bytes; None if nothing was added."""
        params, vector = self._params, self._vector
        if vector is None:
            return None
        if not params.use_score_head:
            if params.dimensions is not None:
                vector = vector[: params.dimensions]
            if params.normalize:
                vector = vector / max(float(np.linalg.norm(vector)), _MIN_NORM)
        return vector.astype(_LITTLE).tobytes()
