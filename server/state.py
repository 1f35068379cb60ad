"""The state shared by one application's endpoints: settings, engine, model, metrics, admission.

It belongs to one event loop, which alone writes it. ``create_app`` makes it and stores it as
``app.state.server``; nothing here is module-level.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from engine.client import EngineClient
from engine.errors import EngineDead, EngineError, ModelLoadError, TemplateError
from engine.frames import Activity
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.types import Adapter, EngineInfo
from server.access.access import Access
from server.access.admission import Admission
from server.access.caller import Caller
from server.access.rate_limits import RateLimitStore
from server.adapter_table import AdapterTable
from server.adapters import Adapters
from server.audio import AudioDecoder
from server.chat_template import read_chat_template
from server.errors import ApiError, asleep, bad_field, overloaded, unavailable
from server.grammars import GrammarValidator
from server.images import ImageDecoder
from server.media_budget import MediaBudget
from server.metrics import Metrics, MetricValues
from server.openai.defaults import read_sampling_defaults
from server.settings import Settings
from server.store.batches import BatchStore
from server.store.database import Database, default_data_dir
from server.store.files import FileStore
from server.text.answer_format import AnswerFormat
from server.tracing import Tracing
from server.videos import VideoDecoder

_log = logging.getLogger(__name__)

_SLEEP_MESSAGES: dict[Activity, str] = {
    "falling_asleep": "is being put to sleep",
    "asleep": "is asleep",
    "waking": "is being woken",
    "reloading": "is reading other weights",
}


@dataclass(frozen=True)
class Model:
    """The served model, as seen by the API."""

    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    answer_format: AnswerFormat
    names: tuple[str, ...]  # responses carry the first
    sampling_defaults: dict[str, Any]  # for fields that requests leave out
    created: int  # Unix time at which it was loaded
    adapter: Adapter | None = None  # applied to its requests; its name is then the first

    @property
    def name(self) -> str:
        """The name that responses carry."""
        return self.names[0]

    def check_generates(self) -> None:
        """Raise ApiError (400) if the model only makes embeddings, or only transcribes."""
        if not self.info.is_generative:
            message = "This model does not generate text; see /v1/embeddings and /v1/score."
            raise ApiError(400, message, param="model")
        if self.info.audio is not None and self.info.audio.transcription.speech is not None:
            message = "This model only transcribes; see /v1/audio/transcriptions."
            raise ApiError(400, message, param="model")

    def check_name(self, name: str) -> None:
        """Raise ApiError (404) unless the model is served as ``name``."""
        if name not in self.names:
            message = f"The model '{name[:200]}' does not exist here; see /v1/models."
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True)
class SharedState:
    """What a server's API workers have in common; a single process has its own."""

    rate_limits: RateLimitStore | None = None  # of limits; None: this process opens one when needed
    adapters: AdapterTable = field(default_factory=AdapterTable)


@dataclass
class ServerState:
    """One application's shared state."""

    settings: Settings
    engine: EngineClient
    metrics: Metrics
    shared: SharedState = field(default_factory=SharedState)
    requests_in_flight: int = 0  # HTTP requests that a graceful shutdown waits for
    draining: bool = False  # shutting down: not ready, and no new work
    # Collects the metrics of all API workers; None if this is the only process.
    gather_metrics: Callable[[], Awaitable[MetricValues]] | None = None
    grammars: GrammarValidator = field(default_factory=GrammarValidator)
    images: ImageDecoder = field(default_factory=ImageDecoder)
    media: MediaBudget = field(default_factory=MediaBudget)  # of requests in flight
    audio: AudioDecoder = field(default_factory=AudioDecoder)
    videos: VideoDecoder = field(default_factory=VideoDecoder)
    tracing: Tracing | None = None  # receives finished requests
    database: Database = field(init=False)  # opened when something is first stored or looked up
    adapters: Adapters = field(init=False)
    access: Access = field(init=False)  # keys, limits, usage
    admission: Admission = field(init=False)
    files: FileStore = field(init=False)
    batches: BatchStore = field(init=False)
    _failure: EngineError | None = None
    _model: Model | None = None
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        settings = self.settings
        self.database = Database(
            settings.data_dir or default_data_dir(), required=settings.data_dir is not None
        )
        self.files = FileStore(self.database)
        self.batches = BatchStore(self.database)
        self.adapters = Adapters(settings.model_names, settings.lora_dir, self.shared.adapters)
        self.access = Access(settings, self.database, self.metrics, self.shared.rate_limits)
        # This process's share of the running and waiting sequences.
        most = settings.max_num_seqs * settings.data_parallel_size + settings.max_queued_requests
        self.admission = Admission(-(-most // settings.api_workers))

    async def load(self) -> None:
        """Start the engine, and read tokenizer and template meanwhile; a failure is recorded."""
        settings = self.settings
        engine = asyncio.create_task(self.engine.start())
        text = asyncio.create_task(_load_text_processing(settings))
        try:
            # The first failure ends it: a damaged tokenizer does not wait for the weights.
            await asyncio.wait((engine, text), return_when=asyncio.FIRST_EXCEPTION)
            for task in (engine, text):
                if task.done():
                    task.result()
            info, (tokenizer, template, sampling_defaults) = engine.result(), text.result()
            await self.adapters.load_initial(self.engine, settings.adapters)
        except EngineError as error:
            self.fail(error)
            return
        except Exception:
            _log.exception("the model could not be loaded")
            self.fail(ModelLoadError("the model could not be loaded"))
            return
        finally:
            engine.cancel()
            text.cancel()
            await asyncio.gather(engine, text, return_exceptions=True)
        self._model = Model(
            info=info,
            tokenizer=tokenizer,
            template=template,
            answer_format=AnswerFormat.of(
                template.source,
                tokenizer,
                tool_call_parser=settings.tool_call_parser,
                reasoning_parser=settings.reasoning_parser,
            ),
            sampling_defaults=sampling_defaults,
            names=tuple(settings.model_names),
            created=int(time.time()),
        )
        self.metrics.set_loaded()
        self._loaded.set()

    def fail(self, error: EngineError) -> None:
        """Record that nothing can be served any more: waiters get the error, health turns red."""
        self._failure = error
        self._loaded.set()

    async def close(self) -> None:
        """Close the engine, the template and grammar processes, the threads and the database."""
        await self.engine.close()
        self.grammars.close()
        self.images.close()
        self.audio.close()
        self.videos.close()
        await self.database.close()
        if self.tracing is not None:
            await self.tracing.close()
        if self._model is not None:
            self._model.template.close()

    @property
    def failure(self) -> EngineError | None:
        """Why nothing can ever be served again; None while recovery is possible."""
        if self._failure is None and self.engine.dead:
            self._failure = EngineDead("the engine was given up")
        return self._failure

    @property
    def is_loaded(self) -> bool:
        """Whether the model has been loaded, even if the engine has failed since."""
        return self._model is not None

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served at once.

        False as well if the engine's process is stopped.
        """
        loaded = self._model is not None and self.failure is None
        engine = self.engine
        serves = engine.alive and engine.responsive and engine.activity == "serving"
        return loaded and not self.draining and serves

    @property
    def sleep_message(self) -> str | None:
        """What the engine does instead of serving, for a message; None if it serves or is gone."""
        return _SLEEP_MESSAGES.get(self.engine.activity)

    async def wait_until_loaded(self) -> None:
        """Wait until the model is loaded, or loading has failed."""
        await self._loaded.wait()

    async def model(self) -> Model:
        """The model, once it is loaded.

        Raises:
            ApiError: 503 if loading failed, or if too many requests already wait for it.
        """
        if self._model is None and self.failure is None:
            if self.requests_in_flight > self.admission.max_sequences:
                self._reject("loading")
            await self._loaded.wait()
        if self.failure is not None or self._model is None:
            raise unavailable()
        if self._model.info is not self.engine.info:  # its weights have been replaced
            self._model = replace(self._model, info=self.engine.info)
        return self._model

    async def get_model(self, name: str) -> Model:
        """The model served under ``name``: the base model, or one with an adapter.

        Raises:
            ApiError: 404 if nothing is served under the name, 503 as for ``model``.
        """
        model = await self.model()
        adapter = self.adapters.get(name)
        if adapter is None:
            model.check_name(name)
            return model
        return replace(model, names=(name,), adapter=adapter)

    async def collect_metrics(self) -> MetricValues:
        """The metrics of the whole server."""
        return self.metrics.values if self.gather_metrics is None else await self.gather_metrics()

    @property
    def num_live_sequences(self) -> int:
        """Running and waiting sequences, without those of background requests."""
        return self.admission.num_live

    def admit(
        self, num_sequences: int, caller: Caller, media_bytes: int = 0, *, param: str = "n"
    ) -> None:
        """Admit sequences, and the media that they hold, which ``media.release`` releases.

        Args:
            num_sequences: of one request.
            caller: who sent it.
            media_bytes: the size of the media.
            param: the request's field that decides how many sequences it makes.

        Raises:
            ApiError: 503, the queue is full or nothing is served; 400, there are more sequences
                than the queue can ever hold.
        """
        most = self.admission.max_sequences
        if num_sequences > most and not caller.background:
            problem = (
                f"makes this request one of {num_sequences} sequences, and the server's limit of "
                f"running and waiting sequences is {most}"
            )
            raise bad_field(param, problem)
        if self.failure is not None:
            raise unavailable()
        self._check_awake(caller)
        if not self.media.can_reserve(media_bytes):
            self.metrics.record_rejected("images", caller.tenant)
            most = self.media.max_bytes >> 20
            raise overloaded(f"{most} MiB of images, videos and audio in flight")
        if not self.admission.try_admit(num_sequences, caller):
            self._reject("queue_full", caller.tenant)
        self.media.reserve(media_bytes)

    def check_capacity(self, caller: Caller) -> None:
        """Refuse early what ``admit`` would refuse, before any work is done for it.

        Raises:
            ApiError: 503, the queue has no room for one more sequence, or the engine sleeps.
        """
        self._check_awake(caller)
        if not self.admission.can_admit(1, caller):
            self._reject("queue_full", caller.tenant)

    def release(self, num_sequences: int, caller: Caller) -> None:
        """Undo ``admit`` as sequences finish."""
        self.admission.release(num_sequences, caller)

    def _check_awake(self, caller: Caller) -> None:
        """Raise ApiError (503) while the engine sleeps or changes state: it would refuse too."""
        if self.engine.activity in ("falling_asleep", "asleep", "waking"):
            self.metrics.record_rejected("asleep", caller.tenant)
            raise asleep()

    def _reject(self, reason: str, tenant: str = "") -> NoReturn:
        self.metrics.record_rejected(reason, tenant)
        raise overloaded(f"{self.admission.max_sequences} running and waiting sequences")


async def _warn_if_invalid(template: ChatTemplate) -> None:
    """Warn about a model's own template that cannot be used.

    Not an error: the operator did not ask for it, and completions work without.
    """
    try:
        await template.check()
    except TemplateError as error:
        _log.warning("%s; chats are refused, completions are not; see --chat-template", error)


async def _load_text_processing(
    settings: Settings,
) -> tuple[Tokenizer, ChatTemplate, dict[str, Any]]:
    """Load tokenizer, template and sampling defaults. Raises ModelLoadError.

    The template is compiled while the engine still loads, in a process that stays warm.
    """
    tokenizer, template, sampling_defaults = await asyncio.to_thread(
        _load_text_processing_sync, settings
    )
    template.start()
    await _warn_if_invalid(template)
    return tokenizer, template, sampling_defaults


def _load_text_processing_sync(
    settings: Settings,
) -> tuple[Tokenizer, ChatTemplate, dict[str, Any]]:
    tokenizer = Tokenizer.from_dir(settings.tokenizer or settings.model_dir)
    template = ChatTemplate.from_dir(
        settings.model_dir, tokenizer, override=read_chat_template(settings.chat_template)
    )
    return tokenizer, template, read_sampling_defaults(settings.model_dir)
