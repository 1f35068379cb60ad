"""Requests wait here for their images, outside the scheduler's queue and its steps.

    arrive ──► held ──their images are read──► ahead ──their tokens are computed──► forgotten
         └────── they are kept already ────────┘

On a CPU, embedding an image takes seconds. Within a step it would stall every running sequence, so
it is done before, in pieces between steps. The embeddings stay until the image's tokens are
computed: no more is read ahead than there is room for. Audio waits here as well: what is called an
image below may be a clip.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from engine.config import Policy
from engine.errors import DeadlineExceeded, EngineDead, Failure
from engine.images.types import Image
from engine.media import Media
from engine.runner.protocol import ImagePrefetcher
from engine.types import Request

logger = logging.getLogger(__name__)

# Time to read between two steps, give or take a piece. It is added to the running sequences' next
# token, and to the first token of new requests.
_SLICE_S = 0.1


class ReadyRequest(NamedTuple):
    """A request that has finished waiting."""

    request: Request
    failure: Failure | None = None


class _Reading(NamedTuple):
    """An image that is being read."""

    digest: bytes
    noun: str
    pieces: Iterator[None]


class ImageWaitQueue:
    """Holds requests until their images are read. Called only by the engine's thread, between
    steps.

    Background requests come last. Otherwise images are read in order of the requests' arrival, or
    by priority or tenants' fair shares, as the queue's policy says. A request waits only for its
    own images.

    Args:
        policy: of the scheduler.
        num_cached_tokens: the number of a request's prompt tokens in the prefix cache now.
        is_computed: whether an admitted request no longer needs its images.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: Policy,
        num_cached_tokens: Callable[[Request], int],
        is_computed: Callable[[Request], bool],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._num_cached_tokens = num_cached_tokens
        self._is_computed = is_computed
        self._clock = clock
        self._reader: ImagePrefetcher | None = None
        self._held: dict[str, Request] = {}  # in arrival order
        self._prefetched: dict[str, Request] = {}  # admitted, with image tokens yet to be computed
        self._head: Request | None = None  # the request whose images are being read
        self._reading: _Reading | None = None
        self._is_full = False
        self._cells_by_tenant: Counter[str] = Counter()  # read while any request waits
        self._ready: list[ReadyRequest] = []  # during this turn

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def can_prefetch(self) -> bool:
        """Whether requests are held and there is room to read their images, or has come since."""
        if not self._held:
            return False
        return not self._is_full or any(map(self._is_computed, self._prefetched.values()))

    @property
    def is_busy(self) -> bool:
        """Whether ``run_slice`` has something to do."""
        return bool(self._held or self._prefetched)

    def attach_prefetcher(self, reader: ImagePrefetcher | None) -> None:
        """Set the reader; None: steps read images and no request waits. No request may be held."""
        self._reader = reader
        self._prefetched.clear()

    def requests(self) -> Iterable[Request]:
        """The held requests, longest waiting first."""
        return self._held.values()

    def try_hold(self, request: Request) -> bool:
        """Hold an arriving request if it has images to read first; return whether it is held.

        Raises what ``num_cached_tokens`` raises.
        """
        reader = self._reader
        if reader is None or not request.media:
            return False
        if self._missing(reader, request):
            self._held[request.id] = request
            return True
        self._prefetched[request.id] = request
        self._pin_wanted(reader)
        return False

    def run_slice(self) -> list[ReadyRequest]:
        """Read for a short time; return the requests that have finished waiting, in order.

        Raises:
            EngineDead: the device is lost.
        """
        reader = self._reader
        if reader is None:
            return []
        now_s = self._clock()
        ahead = self._prefetched.values()
        self._prefetched = {each.id: each for each in ahead if not self._is_computed(each)}
        self._expire(now_s)
        while self._begin(reader):
            self._read_piece(reader)
            if self._clock() >= now_s + _SLICE_S:
                break
        self._pin_wanted(reader)
        passed, self._ready = self._ready, []
        return passed

    def discard(self, request_id: str) -> bool:
        """Drop a request that is no longer wanted; return whether it was held."""
        was_held = self._held.pop(request_id, None) is not None
        if was_held:
            self._drop_unwanted()
        return was_held

    def clear(self) -> list[str]:
        """Drop all requests; return their ids."""
        ids = list(self._held)
        self._held.clear()
        self._drop_unwanted()
        return ids

    # ------------------------------------------------------------ helpers

    def _begin(self, reader: ImagePrefetcher) -> bool:
        """Begin reading an image if none is being read; return whether one is."""
        self._is_full = False
        while self._reading is None and self._held:
            head = min(self._held.values(), key=self._order)
            if not self._has_room(reader, head):
                self._is_full = True
                return False
            missing = self._missing(reader, head)
            if not missing:
                self._admit(head)
                continue
            image, self._head = missing[0], head
            self._cells_by_tenant[head.tenant] += reader.num_cells(image)
            self._pin_wanted(reader)
            self._reading = _Reading(image.digest, _noun(image), reader.prefetch(image))
        return self._reading is not None

    def _read_piece(self, reader: ImagePrefetcher) -> None:
        """Read the next piece of the current image."""
        assert self._reading is not None
        digest, noun, pieces = self._reading
        try:
            is_done = next(pieces, True)
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("%s could not be read", noun)
            message = f"{noun} could not be read: {str(error) or type(error).__name__}"
            self._fail(digest, Failure(kind=Failure.of(error).kind, message=message))
            return
        if is_done:
            self._reading = None
            for request in list(self._held.values()):
                if all(reader.is_cached(image) for image in request.media):
                    self._admit(request)

    def _missing(self, reader: ImagePrefetcher, request: Request) -> list[Media]:
        """Return the images of a request that are not read yet."""
        missing = [image for image in request.media if not reader.is_cached(image)]
        if not missing:
            return []
        num_found = self._num_cached_tokens(request)
        return [image for image in missing if image.start + image.num_tokens > num_found]

    def _order(self, request: Request) -> tuple[float, ...]:
        """Return a sort key whose minimum is read next. A request that has begun continues
        unless a more urgent one arrives."""
        given = 0.0
        if self._policy == "fair":
            given = self._cells_by_tenant[request.tenant] / request.weight
        return (*self._urgency(request), request is not self._head, given)

    def _urgency(self, request: Request) -> tuple[float, ...]:
        return (request.background, request.priority if self._policy == "priority" else 0)

    def _has_room(self, reader: ImagePrefetcher, head: Request) -> bool:
        """Return whether the images of ``head`` fit beside those read ahead for others.

        Those of less urgent requests are not counted, because these may wait for all others.
        """
        urgency = self._urgency(head)
        others = [each for each in self._prefetched.values() if self._urgency(each) <= urgency]
        images = {image.digest: image for each in (*others, head) for image in each.media}
        num_cells = sum(reader.num_cells(image) for image in images.values())
        return not others or num_cells <= reader.capacity

    def _pin_wanted(self, reader: ImagePrefetcher) -> None:
        """Protect what is read ahead from eviction until it is used."""
        head = self._head
        wanted = [*self._prefetched.values(), *([] if head is None else [head])]
        reader.pin({image.digest for each in wanted for image in each.media})

    def _admit(self, request: Request) -> None:
        self._prefetched[request.id] = request
        self._end(request, None)

    def _fail(self, digest: bytes, failure: Failure) -> None:
        """Fail all requests with an image that cannot be read."""
        for request in list(self._held.values()):
            if any(image.digest == digest for image in request.media):
                self._end(request, failure)

    def _expire(self, now_s: float) -> None:
        for request in list(self._held.values()):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._end(request, Failure.of(DeadlineExceeded()))

    def _end(self, request: Request, failure: Failure | None) -> None:
        """End the wait of a request."""
        del self._held[request.id]
        self._ready.append(ReadyRequest(request, failure))
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Stop reading an image that no request waits for."""
        if self._head is not None and self._head.id not in self._held:
            self._head = None
        reading = self._reading
        if reading is not None and not any(
            image.digest == reading.digest
            for request in self._held.values()
            for image in request.media
        ):
            self._reading = None
        if not self._held:
            self._cells_by_tenant.clear()


def _noun(image: Media) -> str:
    if not isinstance(image, Image):
        return "an audio clip"
    return "an image" if image.video is None else "a video"
