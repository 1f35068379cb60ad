"""What a text attends to besides itself, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

# Block sizes that divide this are served. A text begins at a whole block.
PLACES_ALIGNMENT = 64


@dataclass(frozen=True)
class SourceSpec:
    """The output of an encoder, which every text of an encoder-decoder model attends to.

    A sequence's first ``num_places`` places are its source's, of which ``num_positions`` hold
    something; the text follows. Positions of a text are counted from its own beginning.
    """

    num_positions: int

    @property
    def num_places(self) -> int:
        """Places of the source in a sequence: whole blocks."""
        return -(-self.num_positions // PLACES_ALIGNMENT) * PLACES_ALIGNMENT
