"""What the engine loop knows of a runner: a plan goes in, a result comes out.

The scheduler decides and the runner obeys. It keeps a *row* for each sequence it has been told
of (block table, tokens so far, sampling state) and nothing else about requests: no queue, no
order, no limit. It neither reorders nor drops rows.

**The row contract.** One plan is applied in this order:

1. ``removed``: forget these rows. Ids that are not known are skipped. This comes first, because
   a preempted sequence may be in ``removed`` and in ``added`` of the same plan.
2. ``added``: make a row of the request and its output so far, with an empty block table. Every
   added sequence has a row in the same plan.
3. ``rows[i].new_block_ids``: appended to the row's block table. The token at position ``p`` lives
   in slot ``table[p // block_size] * block_size + p % block_size``. Where ``EngineInfo.window`` is
   told, blocks that lie wholly before a row's window may belong to others by now.
4. ``offloads``: whole blocks, to slots of the host's memory, as they are before this step writes
   anything; ``loads``: from slots that earlier offloads have filled, to blocks, after that.
5. ``copies``: whole blocks, sources unchanged by anything before; all before the step's writes.
6. ``restores``, where the model keeps a state of each row: rows that begin behind their first token
   begin with the state that lies in a line of snapshots, which an earlier step has saved there. All
   others go on from their own, or at position 0 from none.
7. The rows' tokens, at positions ``[start, start + len(token_ids))``: their keys and values are
   written, and each attends to positions ``0 .. p`` of its own sequence. A token sampled by an
   earlier step comes back as (part of) a later row's ``token_ids``, or as ``PENDING_TOKEN``: the
   token that this row sampled last, which the scheduler has not seen yet. No two rows write one
   slot, and no row writes a block that another sequence references, unless with what it holds: a
   row that is run again from its first token.
8. Rows with ``samples``: the next token, a function of the row's logits, its sampling parameters,
   its output so far, and its seed and position alone; never of the batch around it.
9. Rows with ``num_passes`` above 1: the token that was chosen is computed at the next position and
   the next one chosen, until the row has computed ``num_passes`` tokens. Its blocks have room for
   them. A runner may do fewer, but the first; what it tells is as many tokens as it has done.
10. ``saves``: what rows have come to goes to lines of snapshots.

**Prompt log-probabilities.** A row over positions ``[s, e)`` of a request with
``prompt_logprobs`` yields those of the prompt tokens at positions ``s + 1 .. min(e, P - 1)``,
where ``P`` is the prompt's length: each is judged by the logits of the position before it.

**Pooling.** A row of a request with ``pooling`` never samples. It yields what its tokens add to
the request's vector: for ``mean`` the sum of their hidden states, for ``max`` the greatest values,
for ``cls`` the state of position 0 and for ``last`` (and ``scores``) that of the prompt's last
position, where the row holds it. Nothing of this is kept by the runner.

**Overlap.** ``launch`` may return before the step is computed; steps are computed in the order in
which they were launched, each as if the ones before it were done. So the next step can be planned
and launched while this one runs. A row may then turn out to be one too many, since the result that
ends its sequence came later: it is computed like any other, and its token passed over.

**Faults.** A row whose own numbers are at fault (logits that are not finite) is reported in
``StepResult.errors`` and harms nobody else. When a step raises, at its launch or at its result,
the caller cannot know how far it came; it runs parts of the same step again to find the rows to
blame, and each such plan *reintroduces* its rows: they are in ``removed`` and in ``added``, with
their whole block table. Where the model keeps states, plans before it compute each row's tokens
from the first one on, the first of which reintroduces the row. Before all of these comes a plan
with the step's loads alone; what the step was to offload or to save is never asked for. A runner
therefore needs no undo: it must only accept such plans after it has raised, and give the result
that the first run would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Protocol, runtime_checkable

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.images.nouns import Image
from engine.profiler import Spans
from engine.types import Adapter, EngineInfo, StepPlan, StepResult


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """What came of it; waits until it is computed. Called once.

        Every row with ``samples`` is in the result, as an id with tokens, in the order of the
        plan's rows, or as an error.

        Raises:
            OutOfMemory: the step did not fit the device's memory (``MemoryError`` counts too).
            EngineDead: the device is lost, and no later call can work; the engine ends.
            Exception: anything else; the rows to blame are searched for as told above.
        """
        ...


class LoadRunner(Protocol):
    """Loads a model and puts a runner of it together."""

    def __call__(self, config: EngineConfig, on_progress: LoadProgress | None = None) -> Runner:
        """See ``engine.runner.load_runner``. Raises ModelLoadError."""
        ...


class Runner(Protocol):
    """Turns plans into tokens. All calls come from one thread."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded; ``info.memory`` says how many KV blocks of what size there are."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step (see the row contract above). Raises what ``Launched.result`` may."""
        ...

    def mark(self, spans: Spans) -> None:
        """Mark ``inputs``, ``forward`` and ``sample`` of each step with ``spans`` from now on."""
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """Have an adapter ready for rows that name it; quick where it is already.

        Raises:
            InvalidParameter: it cannot be used with this model, or the runner takes none.
        """
        ...

    def prepare(self) -> bool:
        """Do a piece of work that makes later steps quicker, such as capturing a CUDA graph.

        Called now and then once the first answers are out, so that no start waits for it; returns
        whether there is more to do.
        """
        ...

    def rest(self, level: int) -> Resting:
        """End this runner between two steps; it must not be used again.

        What it leaves behind can become a runner once more. At level 0 weights stay where they are,
        at level 1 those of a GPU move to the host's memory, at level 2 none are kept.

        Raises:
            RestRefused: this runner cannot rest; it goes on.
        """
        ...


class Resting(Protocol):
    """What a runner has left behind. Every call raises EngineDead where a part of the model is
    lost."""

    def release(self) -> None:
        """Give the memory back that is not kept; called once nobody holds the runner itself."""
        ...

    def wake(self) -> Runner:
        """A runner with an empty KV cache; this is not used again.

        Raises:
            ModelLoadError: there is no memory, or weights cannot be read; it may be tried again.
        """
        ...

    def exchanged(self, model: str) -> Resting:
        """The same model with the weights in the directory ``model``, read beside those that rest
        here; both lie in memory until this is dropped.

        Raises:
            ModelLoadError: they cannot be read, or are those of another model. This is as it was.
        """
        ...


@runtime_checkable
class Losable(Runner, Protocol):
    """A runner parts of whose model may be lost between steps."""

    def on_loss(self, act: Callable[[str], None]) -> None:
        """Have ``act`` called with the reason, in a thread of its own, when that happens. Without
        it the next step raises EngineDead."""
        ...


class ImagesAhead(Protocol):
    """Reads images before the steps that compute their tokens, so that these need not."""

    @property
    def room(self) -> int:
        """Cells that are kept at once, unless more are to be kept."""
        ...

    def num_cells(self, image: Image) -> int:
        """Of an image."""
        ...

    def has(self, image: Image) -> bool:
        """Whether it is kept."""
        ...

    def keep(self, digests: Set[bytes]) -> None:
        """Keep these images, once they are read, until this is called again."""
        ...

    def read_ahead(self, image: Image) -> Iterator[None]:
        """Read an image, a piece with each step of the iterator; at its end it is kept.

        Raises:
            RequestFailed: the numbers that come of it are not finite.
            Exception: as ``Launched.result``.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """What a runner is, besides, that may read images between steps."""

    @property
    def images_ahead(self) -> ImagesAhead | None:
        """What reads them; None: steps do."""
        ...


class Computed:
    """A step that was computed when it was launched."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """See ``Launched``."""
        return self._result
