"""Where requests wait for their images, outside the scheduler's queue and its steps.

    arrive ──► held ──their images are read──► ahead ──their tokens are computed──► forgotten
         └────── they are kept already ────────┘

On a CPU an image takes seconds. Read within a step it would hold up every text that runs, so it is
read before, in pieces between steps. What has been read stays until its tokens are computed: no
more is read ahead than there is room for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from engine.config import Policy
from engine.errors import DeadlineExceeded, EngineDead, Failure
from engine.images.nouns import Image
from engine.runner.protocol import ImagesAhead
from engine.types import Request

logger = logging.getLogger(__name__)

# Of reading between two steps, give or take a piece: who runs waits for so long for its next
# token, and who comes meanwhile for its first.
_TURN_S = 0.1


class Passed(NamedTuple):
    """A request whose wait is over."""

    request: Request
    failure: Failure | None = None


class _Reading(NamedTuple):
    """An image that is being read."""

    digest: bytes
    pieces: Iterator[None]


class ImageGate:
    """Holds requests until their images are read. Called by the engine's thread alone, between
    steps.

    Work in the background comes after all other. Apart from that images are read in the order in
    which requests come, or by their priority or their tenants' shares, where that is the policy of
    the queue. Nobody waits for images that only others show.

    Args:
        policy: of the scheduler.
        find: how many tokens of a request's prompt are in the prefix cache now.
        is_computed: whether a request that was let in needs its images no more.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        policy: Policy,
        find: Callable[[Request], int],
        is_computed: Callable[[Request], bool],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._find = find
        self._is_computed = is_computed
        self._clock = clock
        self._reader: ImagesAhead | None = None
        self._held: dict[str, Request] = {}  # in the order of their arrival
        self._ahead: dict[str, Request] = {}  # let in, with tokens of images to be computed
        self._head: Request | None = None  # whose images are read
        self._reading: _Reading | None = None
        self._is_full = False
        self._given: Counter[str] = Counter()  # cells read by tenant, while anybody waits
        self._passed: list[Passed] = []  # by this turn

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def is_open(self) -> bool:
        """Whether there is something to read."""
        return bool(self._held) and not self._is_full

    @property
    def is_busy(self) -> bool:
        """Whether ``turn`` has something to do."""
        return bool(self._held or self._ahead)

    def seat(self, reader: ImagesAhead | None) -> None:
        """From now on ``reader`` reads; None: steps do, and nobody waits. Nobody is held."""
        self._reader = reader
        self._ahead.clear()

    def requests(self) -> Iterable[Request]:
        """Those that are held, the longest first."""
        return self._held.values()

    def holds(self, request: Request) -> bool:
        """Hold a request that comes, if it has images that must be read; whether that is so. Raises
        what ``find`` raises."""
        reader = self._reader
        if reader is None or not request.images:
            return False
        if self._missing(reader, request):
            self._held[request.id] = request
            return True
        self._ahead[request.id] = request
        self._keep(reader)
        return False

    def turn(self) -> list[Passed]:
        """Read for a moment; those whose wait is over by then, in their order.

        Raises:
            EngineDead: the device is lost.
        """
        reader = self._reader
        if reader is None:
            return []
        now_s = self._clock()
        ahead = self._ahead.values()
        self._ahead = {each.id: each for each in ahead if not self._is_computed(each)}
        self._expire(now_s)
        while self._begin(reader):
            self._go_on(reader)
            if self._clock() >= now_s + _TURN_S:
                break
        self._keep(reader)
        passed, self._passed = self._passed, []
        return passed

    def discard(self, request_id: str) -> bool:
        """Let a request go that is not wanted any more; whether it was held."""
        was_held = self._held.pop(request_id, None) is not None
        if was_held:
            self._drop_unwanted()
        return was_held

    def clear(self) -> list[str]:
        """Let all go; their ids."""
        ids = list(self._held)
        self._held.clear()
        self._drop_unwanted()
        return ids

    # ------------------------------------------------------------ helpers

    def _begin(self, reader: ImagesAhead) -> bool:
        """See to it that an image is being read; whether one is."""
        self._is_full = False
        while self._reading is None and self._held:
            head = min(self._held.values(), key=self._order)
            if not self._has_room(reader, head):
                self._is_full = True
                return False
            missing = self._missing(reader, head)
            if not missing:
                self._let_in(head)
                continue
            image, self._head = missing[0], head
            self._given[head.tenant] += reader.num_cells(image)
            self._keep(reader)
            self._reading = _Reading(image.digest, reader.read_ahead(image))
        return self._reading is not None

    def _go_on(self, reader: ImagesAhead) -> None:
        """Read a piece of the image that is being read."""
        assert self._reading is not None
        digest, pieces = self._reading
        try:
            is_done = next(pieces, True)
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("an image could not be read")
            message = f"an image could not be read: {str(error) or type(error).__name__}"
            self._fail(digest, Failure(kind=Failure.of(error).kind, message=message))
            return
        if is_done:
            self._reading = None
            for request in list(self._held.values()):
                if all(reader.has(image) for image in request.images):
                    self._let_in(request)

    def _missing(self, reader: ImagesAhead, request: Request) -> list[Image]:
        """Images of a request that steps would have to read."""
        missing = [image for image in request.images if not reader.has(image)]
        if not missing:
            return []
        num_found = self._find(request)
        return [image for image in missing if image.start + image.num_tokens > num_found]

    def _order(self, request: Request) -> tuple[float, ...]:
        """By which the first is the next whose images are read. Who has begun goes on, unless
        somebody more urgent has come."""
        given = 0.0
        if self._policy == "fair":
            given = self._given[request.tenant] / request.weight
        return (*self._urgency(request), request is not self._head, given)

    def _urgency(self, request: Request) -> tuple[float, ...]:
        return (request.background, request.priority if self._policy == "priority" else 0)

    def _has_room(self, reader: ImagesAhead, head: Request) -> bool:
        """Whether the images of ``head`` have room beside those that are read ahead for others.
        Those of the less urgent are not counted: they may wait for the end of all others."""
        urgency = self._urgency(head)
        others = [each for each in self._ahead.values() if self._urgency(each) <= urgency]
        images = {image.digest: image for each in (*others, head) for image in each.images}
        num_cells = sum(reader.num_cells(image) for image in images.values())
        return not others or num_cells <= reader.room

    def _keep(self, reader: ImagesAhead) -> None:
        """Have what is read ahead kept until it is used."""
        head = self._head
        wanted = [*self._ahead.values(), *([] if head is None else [head])]
        reader.keep({image.digest for each in wanted for image in each.images})

    def _let_in(self, request: Request) -> None:
        self._ahead[request.id] = request
        self._end(request, None)

    def _fail(self, digest: bytes, failure: Failure) -> None:
        """An image cannot be read: all that show it fail."""
        for request in list(self._held.values()):
            if any(image.digest == digest for image in request.images):
                self._end(request, failure)

    def _expire(self, now_s: float) -> None:
        for request in list(self._held.values()):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._end(request, Failure.of(DeadlineExceeded()))

    def _end(self, request: Request, failure: Failure | None) -> None:
        """The wait of a request is over."""
        del self._held[request.id]
        self._passed.append(Passed(request, failure))
        self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        """Somebody waits no more: what is read for nobody is read no further."""
        if self._head is not None and self._head.id not in self._held:
            self._head = None
        reading = self._reading
        if reading is not None and not any(
            image.digest == reading.digest
            for request in self._held.values()
            for image in request.images
        ):
            self._reading = None
        if not self._held:
            self._given.clear()
