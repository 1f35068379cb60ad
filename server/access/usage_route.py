"""GET /v1/usage: a key owner's usage, and what is left of its quotas."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from msgspec import Struct
from starlette.responses import Response

from server.access.account import Account
from server.access.caller import caller_of
from server.access.usage import UsageTracker
from server.errors import ApiError, bad_field
from server.openai.endpoint import json_response, state_of
from server.openai.openapi_schema import describe

router = APIRouter()
_DEFAULT_DAYS = 31


class DayUsage(Struct, kw_only=True):
    """One tenant's usage on one day (UTC)."""

    object: Literal["usage.day"] = "usage.day"
    tenant: str
    date: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class QuotaLeft(Struct):
    """What is left of a quota."""

    limit: int
    remaining: int
    resets_in_s: int


class UsageList(Struct, kw_only=True):
    """The response of /v1/usage."""

    object: Literal["list"] = "list"
    data: list[DayUsage]
    tokens_per_day: QuotaLeft | None = None  # the caller's own
    tokens_per_month: QuotaLeft | None = None


@router.get(
    "/v1/usage",
    summary="Usage by day",
    openapi_extra=describe(None, UsageList),
)
async def read_usage(
    request: Request,
    start_date: Annotated[str | None, Query(description="First day, as 2026-01-31.")] = None,
    end_date: Annotated[str | None, Query(description="Last day; today when left out.")] = None,
    tenant: Annotated[
        str | None, Query(description="Whose, or * for everybody's; others' for admins only.")
    ] = None,
) -> Response:
    """Requests and tokens per day, of the key's owner or, with the scope admin, of any tenant.

    Requires a key file: other keys have no owners.
    """
    book = state_of(request).access.usage
    if book is None:
        raise ApiError(404, "Usage is counted by key, with --api-key-file only.")
    caller = caller_of(request)
    wanted = tenant if tenant is not None else (caller.tenant or "*")
    if wanted != caller.tenant and "admin" not in caller.scopes:
        raise ApiError(403, "Only keys with the scope 'admin' may see the usage of others.")
    last = _read_day("end_date", end_date) or dt.datetime.now(dt.UTC).date()
    days_before = min(_DEFAULT_DAYS, last.toordinal()) - 1  # there is no day before 0001-01-01
    first = _read_day("start_date", start_date) or last - dt.timedelta(days=days_before)
    days = await book.daily_usage(None if wanted == "*" else wanted, f"{first}", f"{last}")
    own = _quotas(book, caller.account)
    rows = [
        DayUsage(
            tenant=day.tenant,
            date=day.day,
            requests=day.counts.requests,
            prompt_tokens=day.counts.prompt_tokens,
            cached_tokens=day.counts.cached_tokens,
            completion_tokens=day.counts.output_tokens,
        )
        for day in days
    ]
    return json_response(UsageList(data=rows, tokens_per_day=own[0], tokens_per_month=own[1]))


def _quotas(book: UsageTracker, account: Account) -> tuple[QuotaLeft | None, QuotaLeft | None]:
    """What is left of the quotas of a day and of a month."""
    limits, spent = account.limits, book.quota_usage(account.name)
    return (
        _quota_left(limits.tokens_per_day, spent.day, spent.day_left_s),
        _quota_left(limits.tokens_per_month, spent.month, spent.month_left_s),
    )


def _quota_left(limit: int | None, used: int, left_s: float) -> QuotaLeft | None:
    return None if limit is None else QuotaLeft(limit, max(0, limit - used), int(left_s))


def _read_day(param: str, text: str | None) -> dt.date | None:
    try:
        return None if text is None else dt.date.fromisoformat(text)
    except ValueError:
        raise bad_field(param, "must be a day, as in 2026-01-31") from None
