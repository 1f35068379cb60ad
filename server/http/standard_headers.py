"""The headers of every response."""

from __future__ import annotations

import time
import uuid

API_VERSION = "2020-10-01"  # the version string that OpenAI's API has sent from the start


def new_request_id() -> str:
    """A new unique id for a request."""
    return f"req_{uuid.uuid4().hex}"


def standard_headers(request_id: str, started_s: float) -> dict[str, str]:
    """The headers of the response to a request that began at ``started_s`` (``perf_counter``)."""
    elapsed_ms = (time.perf_counter() - started_s) * 1000
    return {
        "x-request-id": request_id,
        "openai-processing-ms": str(round(elapsed_ms)),
        "openai-version": API_VERSION,
    }
