"""Prefill progress, in chunks of a stream that requested it."""

from __future__ import annotations

from server.openai.choice import Choice
from server.openai.outputs import PromptProgressReport


def progress_of(choice: Choice) -> PromptProgressReport | None:
    """The newest progress of a choice's prompt; None if the step reported none."""
    progress = choice.progress
    if progress is None:
        return None
    return PromptProgressReport(
        index=choice.prompt_index,
        total=progress.total,
        cache=progress.cached,
        processed=progress.processed,
        time_ms=round(progress.elapsed_s * 1e3),
        queue_position=progress.queue_position,
    )
