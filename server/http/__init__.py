"""The HTTP connection: hardened protocol, request context, and the server loop."""

from server.http.serve import serve

__all__ = ["serve"]
