"""A minimal HTTP client for terminal commands: JSON, and JSON over server-sent events.

It uses only the standard library, so that commands that talk to a server start in a few dozen
milliseconds.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator
from typing import Any
from urllib.parse import SplitResult, urlsplit


class ServerError(Exception):
    """The server cannot be reached, or rejected the request; one line for the user."""


class ApiClient:
    """Client of one OpenAI-compatible server.

    Args:
        url: its address, with or without ``/v1``.
        api_key: sent as a bearer token if given.
        timeout_s: seconds without any data before giving up.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        parts = _split(url)
        if parts is None:
            raise ServerError(f"{url!r} is not an address like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ServerError("the API key holds a character that no header can hold")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def first_model(self) -> str:
        """The first model that the server lists."""
        connection, response = self._request("GET", "/v1/models", None)
        try:
            listed = json.loads(response.read())
            return listed["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url} does not list its models as OpenAI's API does") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Post ``body`` with ``stream: true`` and yield the chunks as they arrive.

        Closing the generator early closes the connection, which aborts the request on the server.

        Raises:
            ServerError: no server, an error status, or an error in or truncation of the stream.
        """
        connection, response = self._request("POST", path, {**body, "stream": True})
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(str(chunk["error"].get("message", "an error")))
                yield chunk
            raise ServerError("the server ended the stream before its end")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"the stream from {self.url} broke off: {error}") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, self._parts.path + path, payload, self._headers)
            response = connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise ServerError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}); name its "
                "authorities in SSL_CERT_FILE"
            ) from None
        except ssl.SSLError as error:
            connection.close()
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise ServerError(
                f"no secure connection to {self.url} ({reason}); if it serves plain HTTP, its "
                "address begins with http://"
            ) from None
        except OSError as error:
            connection.close()
            raise ServerError(
                f"no server answers at {self.url} ({_reason(error)}); start one with: quire serve"
            ) from None
        except http.client.HTTPException:
            connection.close()
            raise ServerError(
                f"what {self.url} answers is not HTTP; if it serves TLS, its address begins with "
                "https://"
            ) from None
        if response.status >= 400:
            message = _error_message(response.read(65536))
            connection.close()
            if response.status == 401:
                message = f"{message.rstrip('.')}; give one with --api-key or QUIRE_API_KEY"
            raise ServerError(f"the server answered {response.status}: {message}")
        return connection, response


def _split(url: str) -> SplitResult | None:
    """The parts of a server's address; None if it is none."""
    if not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # from brackets, or the port
        return None
    return parts if is_address else None


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return (strerror or str(error) or type(error).__name__).lower()


def _error_message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace").strip()[:200] or "no explanation"
