"""One tenant's account: its limits and its usage.

    begin() ──► request serves ──► end()            requests a minute, and at once
       charge(prompt, most) ──► settle(actual)      tokens a minute, a day, a month

Limits per minute are token buckets (initially full, refilled evenly over a minute). A request's
tokens are taken once its prompt is known: those of the prompt, and the request's own limit of
output tokens, if it has one. Unused tokens are returned at the end. Tokens used beyond that become
a debt, which delays later requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.access.rate_limits import RateLimitStore, TenantRecord
from server.access.usage import QuotaUsage, UsageCounts
from server.errors import ApiError

_MINUTE_S = 60.0


@dataclass(frozen=True)
class Limits:
    """A tenant's limits; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


class Account:
    """One tenant's account, or that of callers without a tenant, which has no limits.

    Args:
        name: the tenant's.
        limits: from its entry in the key file.
        rate_limits: holds its buckets; None for callers without a tenant.
        get_quota_usage: returns its tokens of the day and month so far.
        on_usage: called with the usage.
        on_rejected: called with the reason of each refusal.
        clock: monotonic seconds, the same in all workers.
    """

    def __init__(
        self,
        name: str = "",
        limits: Limits | None = None,
        rate_limits: RateLimitStore | None = None,
        *,
        get_quota_usage: Callable[[str], QuotaUsage] | None = None,
        on_usage: Callable[[str, UsageCounts], None] | None = None,
        on_rejected: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self._rate_limits = rate_limits
        self._get_quota_usage = get_quota_usage
        self._on_usage = on_usage
        self._on_rejected = on_rejected
        self._clock = clock

    def begin(self) -> None:
        """Begin a request; ``end`` must be called once for it. Raises ApiError (429)."""
        self._check_quotas()
        if self._rate_limits is None:
            return
        limit, at_once = self.limits.requests_per_minute, self.limits.max_concurrent_requests
        with self._rate_limits.record(self.name) as record:
            if at_once is not None and record.num_serving >= at_once:
                raise self._refusal(f"the limit of {at_once} requests at once is reached", 1.0)
            if limit is not None:
                self._take(record, "requests", limit, 1, "request")
            record.add_serving(1)
        if self._on_usage is not None:
            self._on_usage(self.name, UsageCounts(requests=1))

    def end(self) -> None:
        """End a request, whatever its outcome."""
        if self._rate_limits is not None:
            with self._rate_limits.record(self.name) as record:
                record.add_serving(-1)

    def charge(
        self, prompt_tokens: int, max_output_tokens: int = 0, *, background: bool = False
    ) -> Charge:
        """Take a request's tokens; the charge is settled once the actual usage is known.

        Args:
            prompt_tokens: of all its prompts.
            max_output_tokens: its own limit of output tokens; 0 if it has none.
            background: the request runs in idle capacity, so only the quotas count it.

        Raises:
            ApiError: 429, too few tokens are left.
        """
        self._check_quotas()
        limit = self.limits.tokens_per_minute
        if self._rate_limits is None or limit is None or background:
            return Charge(self, 0)
        if prompt_tokens > limit:
            raise self._refusal(
                f"the prompt has {prompt_tokens} tokens, and the limit is {limit} per minute",
                _MINUTE_S,
                can_wait=False,
            )
        # A request for more than a full bucket waits for a full bucket.
        tokens = min(prompt_tokens + max_output_tokens, limit)
        with self._rate_limits.record(self.name) as record:
            self._take(record, "tokens", limit, tokens, "token")
        return Charge(self, tokens)

    def settle(self, taken: int, used: UsageCounts) -> None:
        """Return the tokens taken but not used, or record the debt."""
        limit = self.limits.tokens_per_minute
        if self._rate_limits is not None and limit is not None and taken:
            now_s = self._clock()
            with self._rate_limits.record(self.name) as record:
                lacks = record.bucket_deficit("tokens", limit / _MINUTE_S, now_s)
                record.set_bucket_deficit("tokens", max(0.0, lacks + used.tokens - taken), now_s)
        if self._on_usage is not None and used != UsageCounts():
            self._on_usage(self.name, used)

    def headers(self) -> dict[str, str]:
        """The current ``x-ratelimit-*`` headers; empty if there are no such limits."""
        limits = (
            ("requests", self.limits.requests_per_minute),
            ("tokens", self.limits.tokens_per_minute),
        )
        headers: dict[str, str] = {}
        if self._rate_limits is None or not any(limit for _, limit in limits):
            return headers
        now_s = self._clock()
        with self._rate_limits.record(self.name) as record:
            for bucket, limit in limits:
                if limit is not None:
                    lacks = record.bucket_deficit(bucket, limit / _MINUTE_S, now_s)
                    headers[f"x-ratelimit-limit-{bucket}"] = str(limit)
                    headers[f"x-ratelimit-remaining-{bucket}"] = str(max(0, int(limit - lacks)))
                    headers[f"x-ratelimit-reset-{bucket}"] = _duration(lacks / limit * _MINUTE_S)
        return headers

    def _take(self, record: TenantRecord, bucket: str, limit: int, count: int, what: str) -> None:
        """Take ``count`` from a bucket, or raise ApiError (429) that says when to retry."""
        now_s, per_s = self._clock(), limit / _MINUTE_S
        lacks = record.bucket_deficit(bucket, per_s, now_s)
        if lacks + count > limit:
            wait_s = (lacks + count - limit) / per_s
            raise self._refusal(f"the limit of {limit} {what}s a minute is reached", wait_s)
        record.set_bucket_deficit(bucket, lacks + count, now_s)

    def _check_quotas(self) -> None:
        limits = self.limits
        if self._get_quota_usage is None or (
            limits.tokens_per_day is None and limits.tokens_per_month is None
        ):
            return
        spent = self._get_quota_usage(self.name)
        for limit, used, left_s, period in (
            (limits.tokens_per_day, spent.day, spent.day_left_s, "day"),
            (limits.tokens_per_month, spent.month, spent.month_left_s, "month"),
        ):
            if limit is not None and used >= limit:
                raise self._refusal(
                    f"the quota of {limit} tokens a {period} is used up",
                    left_s,
                    code="insufficient_quota",
                    can_wait=False,
                )

    def _refusal(
        self,
        reason: str,
        wait_s: float,
        *,
        code: str = "rate_limit_exceeded",
        can_wait: bool = True,
    ) -> ApiError:
        if self._on_rejected is not None:
            self._on_rejected(code, self.name)
        headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
        if not can_wait:
            headers["x-should-retry"] = "false"  # the openai libraries obey it
        message = f"This request was refused: {reason}."
        return ApiError(429, message, code=code, headers=headers)


class Charge:
    """Tokens taken for a request whose actual usage is not known yet."""

    __slots__ = ("_account", "_taken")

    def __init__(self, account: Account, taken: int) -> None:
        self._account: Account | None = account
        self._taken = taken

    def settle(self, used: UsageCounts) -> None:
        """Settle the charge; only the first call has an effect."""
        account, self._account = self._account, None
        if account is not None:
            account.settle(self._taken, used)


def _duration(seconds: float) -> str:
    """A duration in OpenAI's format: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE_S)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(minutes)}m{text}" if minutes else text
