"""Run plans on an encoder: whole texts in, vectors out, nothing kept between steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import Failure, InvalidParameter
from engine.models.dense import DenseLayers
from engine.models.encoder.model import Encoder
from engine.plan_rows import PlanRows
from engine.profiler import Spans
from engine.runner.device_errors import translated_errors
from engine.runner.outcome import record_pooled
from engine.runner.pooling import PooledRow, pool_rows
from engine.runner.protocol import CompletedStep, LaunchedStep, SleepingRunner
from engine.types import Adapter, EngineInfo, Request, StepPlan, StepResult


class EncoderRunner:
    """An encoder and the requests that have been added. All calls come from one thread.

    The block ids of plans are ignored; a block stands for a place in the engine.

    Args:
        info: what was loaded.
        model: the encoder.
        dense: the layers that its pooled vectors go through; None: there are none.
        make_sleeping: makes what the runner leaves behind when it sleeps at a level.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Encoder,
        dense: DenseLayers | None,
        make_sleeping: Callable[[int], SleepingRunner],
    ) -> None:
        self._info = info
        self._model = model
        self._dense = dense
        self._make_sleeping = make_sleeping
        self._requests: dict[str, Request] = {}
        self._spans = Spans()

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def set_spans(self, spans: Spans) -> None:
        """See ``Runner.set_spans``."""
        self._spans = spans

    def load_adapter(self, adapter: Adapter) -> None:
        """Raise InvalidParameter: encoders take no adapters."""
        raise InvalidParameter("an encoder takes no adapters", param="model")

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def sleep(self, level: int) -> SleepingRunner:
        """See ``Runner.sleep``."""
        return self._make_sleeping(level)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute one step. Raises as ``LaunchedStep.result`` does."""
        for request_id in plan.removed:
            self._requests.pop(request_id, None)
        for added in plan.added:
            self._requests[added.request.id] = added.request
        if not plan.rows:
            return CompletedStep(StepResult())
        with translated_errors(), torch.inference_mode():
            return CompletedStep(self._compute(plan.rows))

    def _compute(self, rows: PlanRows) -> StepResult:
        requests = [self._requests[row_id] for row_id in rows.ids]
        lengths = [len(token_ids) for token_ids in rows.token_ids]
        with self._spans("inputs"):
            token_ids = torch.tensor([token for token_ids in rows.token_ids for token in token_ids])
            kinds = torch.cat([_token_types(request) for request in requests])
            device = self._model.device
            token_ids, kinds = token_ids.to(device), kinds.to(device)
        with self._spans("forward"):
            hidden = self._model.forward(token_ids, kinds, lengths)
            bounds = [0]
            for length in lengths:
                bounds.append(bounds[-1] + length)
            scored = self._model.spec.head.pooling
            parts = list(
                pool_rows(rows, requests, bounds, hidden, self._model.score, scored=scored)
            )
            if self._dense is not None:  # texts are whole, so the parts are their pooled states
                vectors = self._dense(torch.stack([row.part for row in parts]))
                parts = [PooledRow(row.id, v) for row, v in zip(parts, vectors, strict=True)]
        pooled: dict[str, bytes] = {}
        errors: dict[str, Failure] = {}
        for row in parts:
            record_pooled(row.id, row.part.cpu(), pooled, errors)
        return StepResult(pooled=pooled, errors=errors)


def _token_types(request: Request) -> torch.Tensor:
    """[tokens] int64: 0 for the first of two texts, 1 for the second."""
    types = torch.zeros(len(request.prompt_token_ids), dtype=torch.int64)
    second = request.pooling.second_start if request.pooling is not None else None
    if second is not None:
        types[second:] = 1
    return types
