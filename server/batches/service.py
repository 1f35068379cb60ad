"""The batch runner of one server, with its model, endpoints and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.batches.environment import BatchEnvironment, SharedSlots
from server.batches.handlers import handler_of
from server.batches.line_execution import LineHandler
from server.batches.runner import BatchRunner
from server.state import ServerState
from server.store.batches import StoredBatch


def make_runner(state: ServerState) -> BatchRunner:
    """The server's batch runner; run it for as long as the server serves."""
    settings = state.settings

    def answer_for(batch: StoredBatch) -> LineHandler:
        caller = replace(state.access.keys.caller_of_tenant(batch.tenant), background=True)
        handler = handler_of(batch.endpoint)

        async def answer(body: dict[str, Any]) -> Any:
            return await handler(state, caller, body)

        return answer

    share = -(-settings.max_batch_requests // settings.api_workers)
    bench = BatchEnvironment(
        files=state.files,
        batches=state.batches,
        slots=SharedSlots(share, is_busy=lambda: state.num_live_sequences > 0),
        handler_for=answer_for,
        has_model=lambda name: name in settings.model_names or name in state.adapters,
        max_line_bytes=settings.max_body_bytes,
    )
    return BatchRunner(bench, may_run=lambda: state.ready)
