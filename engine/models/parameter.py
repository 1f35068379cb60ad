"""A tensor of a decoder, and the parts that a checkpoint fills. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of the decoder: ``parts`` are the lengths along its first dimension.

    A part in which a checkpoint fuses several things (such as queries, keys and values) has several
    *runs*, each of which is sharded over ranks by itself.
    """

    parts: tuple[int, ...]
    trailing: tuple[int, ...] = ()  # the other dimensions
    is_norm: bool = False  # initialised near one, not zero
    is_one: bool = False  # all ones, and in no checkpoint
    is_float32: bool = False  # float32 whatever the model's dtype
    runs: tuple[tuple[int, ...], ...] = ()  # run lengths of each part; empty: one run each

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return (sum(self.parts), *self.trailing)

    def rows(self, part: int | None) -> slice:
        """Return the rows of a part in the first dimension; None: the whole parameter."""
        if part is None:
            return slice(0, sum(self.parts))
        begin = sum(self.parts[:part])
        return slice(begin, begin + self.parts[part])

    def runs_of(self, part: int) -> tuple[int, ...]:
        """Return the lengths of a part's runs."""
        return self.runs[part] if self.runs else (self.parts[part],)

    def part_shape(self, part: int | None) -> tuple[int, ...]:
        """Return the shape of what fills a part."""
        rows = self.rows(part)
        return (rows.stop - rows.start, *self.trailing)
