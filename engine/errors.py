"""Every error the engine can raise, and what each one means for a client.

    EngineError
    ├── RequestError              the request is at fault: a 4xx, never retried
    │   ├── InvalidParameter      a field has a value that cannot be served (names the field)
    │   ├── ContextLengthExceeded prompt and output can never fit
    │   ├── TemplateError         the chat template refused, or did not finish in time
    │   ├── ProfileRefused        no profile can be started or stopped now: a 409
    │   └── SleepRefused          the engine cannot sleep, wake or reload now: a 409
    ├── RequestFailed             this request failed through the server's fault: a 500
    │   └── OutOfMemory           the request's step ran out of memory: a 503
    ├── EngineAsleep              the engine is asleep or falling asleep: a 503
    ├── DeadlineExceeded          the request's deadline passed before it ended: a 504
    ├── EngineDead                the engine process is gone: a 503 for all requests
    └── ModelLoadError            the model cannot be loaded: the process exits with one line

Only :class:`RequestError` carries text meant for the client. The status table lives in
``server/errors.py``; nothing here knows HTTP.
"""

from __future__ import annotations

import msgspec


class EngineError(Exception):
    """Base of all exceptions that this package raises deliberately."""


class RequestError(EngineError):
    """The request cannot be served as sent.

    Args:
        message: a sentence for the client, without paths, addresses or tracebacks.
        param: the request field at fault, as the API spells it, if there is one.
        code: an OpenAI-style machine-readable code, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """A field has a value that cannot be served."""


class ContextLengthExceeded(RequestError):
    """Prompt and output can never fit into the context window or the KV cache."""

    def __init__(self, message: str, *, param: str = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class TemplateError(RequestError):
    """The chat template raised an error, ran too long, or accessed something forbidden."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="template_error")


class ProfileRefused(RequestError):
    """A profile cannot be started or stopped now."""


class SleepRefused(RequestError):
    """The engine cannot be put to sleep, woken or given other weights now."""


class RequestFailed(EngineError):
    """One request failed through the server's own fault; others in its batch are unaffected."""


class OutOfMemory(RequestFailed):
    """The step of this request ran out of memory; a retry may succeed."""


class EngineAsleep(EngineError):
    """The engine has released its memory or is about to. The message is meant for clients."""


class DeadlineExceeded(EngineError):
    """The request did not end before its deadline."""

    def __init__(self, message: str = "the deadline of the request has passed") -> None:
        super().__init__(message)


class EngineDead(EngineError):
    """The engine process has died or never started; nothing can be served."""


class ModelLoadError(EngineError):
    """The model directory is missing, damaged or of an unsupported kind."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a form that can cross the process boundary."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure for ``error``; unknown exception types become ``RequestFailed``."""
        if isinstance(error, RequestError):
            kind = type(error).__name__ if type(error).__name__ in _KINDS else "RequestError"
            return cls(kind=kind, message=error.message, param=error.param, code=error.code)
        if isinstance(error, (DeadlineExceeded, EngineAsleep)):
            return cls(kind=type(error).__name__, message=str(error))
        if isinstance(error, (OutOfMemory, MemoryError)):
            return cls(kind="OutOfMemory", message="the step ran out of memory")
        return cls(kind="RequestFailed", message=f"{type(error).__name__}: {error}")

    def to_error(self) -> EngineError:
        """The exception to raise on the receiving side."""
        kind = _KINDS.get(self.kind, RequestFailed)
        if issubclass(kind, RequestError):
            error = RequestError.__new__(kind)
            RequestError.__init__(error, self.message, param=self.param, code=self.code)
            return error
        return kind(self.message)


_KINDS: dict[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        InvalidParameter,
        ContextLengthExceeded,
        TemplateError,
        ProfileRefused,
        SleepRefused,
        RequestFailed,
        OutOfMemory,
        EngineAsleep,
        DeadlineExceeded,
        EngineDead,
    )
}
