"""The OpenAI-compatible endpoints: JSON requests in, SSE chunks or one JSON object out."""
