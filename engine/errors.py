"""Every error the engine can raise, and what each one means for a client.

    EngineError
    ├── RequestError              the request is at fault: a 4xx, never retried
    │   ├── InvalidParameter      a field has a value that cannot be served (names the field)
    │   ├── ContextLengthExceeded the prompt (and what it asks for) can never fit
    │   ├── TemplateError         the chat template refused, or did not finish in time
    │   ├── ProfileRefused        no profile can be started, or none can be stopped, now: a 409
    │   └── RestRefused           the engine cannot be put to sleep, or reloaded, now: a 409
    ├── RequestFailed             this one request failed through our own fault: a 500
    │   └── OutOfMemory           it was the victim of a step that ran out of memory: a 503
    ├── EngineAsleep              it sleeps, or falls asleep, until somebody wakes it: a 503
    ├── DeadlineExceeded          the request's own deadline passed before its end: a 504
    ├── EngineDead                the engine process is gone: a 503 for everybody
    └── ModelLoadError            the model cannot be loaded: the process exits with one line

Only :class:`RequestError` carries text meant for the client. The status table lives in
``server/errors.py``; nothing here knows HTTP.
"""

from __future__ import annotations

import msgspec


class EngineError(Exception):
    """Base of everything this package raises on purpose."""


class RequestError(EngineError):
    """The request cannot be served as it was sent.

    Args:
        message: a sentence for the client; holds no path, address or traceback.
        param: the request field at fault, in the API's spelling, where one is.
        code: a machine-readable code of the OpenAI kind, where one exists.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """A single field holds a value outside what can be served."""


class ContextLengthExceeded(RequestError):
    """Prompt and output can never fit the context window or the KV cache."""

    def __init__(self, message: str, *, param: str = "prompt") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class TemplateError(RequestError):
    """The chat template raised, looped or reached for something it may not have."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="template_error")


class ProfileRefused(RequestError):
    """A profile was to be started or stopped, and this is not the moment."""


class RestRefused(RequestError):
    """The engine was to be put to sleep or given other weights, and this is not the moment."""


class RequestFailed(EngineError):
    """One request failed through a fault of ours; its batch mates are unharmed."""


class OutOfMemory(RequestFailed):
    """The step that held this request ran out of memory; trying again later may work."""


class EngineAsleep(EngineError):
    """The engine has given its memory back, or is about to; its message is for clients."""


class DeadlineExceeded(EngineError):
    """The request was given until a certain moment, and had not ended by then."""

    def __init__(self, message: str = "the deadline of the request has passed") -> None:
        super().__init__(message)


class EngineDead(EngineError):
    """The engine process ended, or never started; nothing can be served."""


class ModelLoadError(EngineError):
    """The model directory is missing, damaged or of a kind that is not supported."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the form in which it crosses the process boundary."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that stands for ``error``; foreign exceptions become ``RequestFailed``."""
        if isinstance(error, RequestError):
            kind = type(error).__name__ if type(error).__name__ in _KINDS else "RequestError"
            return cls(kind=kind, message=error.message, param=error.param, code=error.code)
        if isinstance(error, (DeadlineExceeded, EngineAsleep)):
            return cls(kind=type(error).__name__, message=str(error))
        if isinstance(error, (OutOfMemory, MemoryError)):
            return cls(kind="OutOfMemory", message="the step ran out of memory")
        return cls(kind="RequestFailed", message=f"{type(error).__name__}: {error}")

    def to_error(self) -> EngineError:
        """The exception to raise on this side of the boundary."""
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
        RestRefused,
        RequestFailed,
        OutOfMemory,
        EngineAsleep,
        DeadlineExceeded,
        EngineDead,
    )
}
