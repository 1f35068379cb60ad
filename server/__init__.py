"""The HTTP server: command line, settings and the OpenAI-compatible API."""
