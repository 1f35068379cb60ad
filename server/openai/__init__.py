"""The OpenAI-compatible endpoints: request shapes in, SSE chunks or one JSON object out."""
