"""Pagination, the same for all listing routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Protocol, TypeVar

from fastapi import Query

PageT = TypeVar("PageT")

# Parameters of routes that list what is stored.
Limit = Annotated[int, Query(ge=1, le=100, description="Entries of a page.")]
After = Annotated[str | None, Query(description="The id of the entry before the page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


def make_page(page: Callable[..., PageT], data: Sequence[_HasId], *, has_more: bool) -> PageT:
    """A page of the given type, with the ids from which its neighbours begin.

    Args:
        page: made from ``data``, ``first_id``, ``last_id`` and ``has_more``.
        data: the items of the page.
        has_more: whether more items follow.
    """
    return page(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=has_more,
    )
