"""Rate limits, quotas and the bound of the queue, without a server, on simulated clocks."""

from __future__ import annotations

import asyncio
import datetime as dt
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.access.account import Account, Limits
from server.access.admission import Admission
from server.access.caller import Caller
from server.access.rate_limits import RateLimitStore
from server.access.usage import SCHEMA, UsageCounts, UsageTracker
from server.errors import ApiError
from server.store.database import Database, StoreError
from tests.servers import ROOT


class Clock:
    """A clock that a test advances."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def account(clock: Clock, store: RateLimitStore | None = None, **limits: int) -> Account:
    return Account("anna", Limits(**limits), store or RateLimitStore(), clock=clock)


def refused(call: object, *arguments: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    assert caught.value.status == 429
    return caught.value


# ---------------------------------------------------------------- buckets


def test_a_bucket_is_full_at_first_and_fills_evenly() -> None:
    clock = Clock()
    anna = account(clock, requests_per_minute=60)
    for _ in range(60):
        anna.begin()
    assert refused(anna.begin).headers["retry-after"] == "1"
    clock.now_s += 0.5
    refused(anna.begin)
    clock.now_s += 0.5
    anna.begin()
    refused(anna.begin)
    assert anna.headers()["x-ratelimit-reset-requests"] == "1m0s"
    clock.now_s += 58.5
    assert anna.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "1.5s",
    }
    clock.now_s += 1.0
    assert anna.headers()["x-ratelimit-reset-requests"] == "500ms"


def test_tokens_are_taken_before_and_settled_after() -> None:
    clock = Clock()
    anna = account(clock, tokens_per_minute=100)

    def left() -> str:
        return anna.headers()["x-ratelimit-remaining-tokens"]

    charge = anna.charge(20, 50)
    assert left() == "30"
    assert int(refused(anna.charge, 40).headers["retry-after"]) == 6
    charge.settle(UsageCounts(prompt_tokens=20, output_tokens=5))
    # A second settlement has no effect.
    charge.settle(UsageCounts(prompt_tokens=20, output_tokens=5))
    assert left() == "75"
    # A request of unstated size may use more than is available, and goes into debt.
    anna.charge(70).settle(UsageCounts(prompt_tokens=70, output_tokens=65))
    assert left() == "0"
    assert int(refused(anna.charge, 1).headers["retry-after"]) == 37
    # A request larger than a full bucket waits for a full one.
    clock.now_s += 200
    anna.charge(10, 1000)
    assert left() == "0"
    error = refused(anna.charge, 101)
    assert error.headers["x-should-retry"] == "false"
    anna.charge(50, 50, background=True)  # a batch's line is limited only by quotas


def test_requests_at_once_are_counted_until_they_end() -> None:
    anna = account(Clock(), max_concurrent_requests=2)
    anna.begin()
    anna.begin()
    assert refused(anna.begin).code == "rate_limit_exceeded"
    anna.end()
    anna.begin()


def test_nobody_in_particular_has_no_limits() -> None:
    nobody = Account()
    nobody.begin()
    nobody.charge(10**9, 10**9).settle(UsageCounts(prompt_tokens=10**9))
    nobody.end()
    assert nobody.headers() == {}


# ---------------------------------------------------------------- several workers


def test_workers_share_what_is_left(tmp_path: Path) -> None:
    clock = Clock()
    limits = {"requests_per_minute": 5, "max_concurrent_requests": 3}
    one, two = (account(clock, RateLimitStore(tmp_path / "l", n, 2), **limits) for n in (0, 1))
    one.begin()
    two.begin()
    two.begin()
    refused(one.begin)
    two.end()
    one.begin()
    # The second worker dies, and its replacement serves none of its requests.
    again = account(clock, RateLimitStore(tmp_path / "l", 1, 2), **limits)
    again.begin()
    refused(again.begin)  # three at once: two of the first worker's, and this one


def test_a_dead_workers_requests_are_forgotten_for_every_name(tmp_path: Path) -> None:
    """Of 2,000 names, some have records whose first byte is 0."""
    names = [f"t{number}" for number in range(2000)]
    died = RateLimitStore(tmp_path / "l", 1, 2)
    for name in names:
        with died.record(name) as record:
            record.set_serving(2)
    other = RateLimitStore(tmp_path / "l", 0, 2)
    RateLimitStore(tmp_path / "l", 1, 2)
    for name in names:
        with other.record(name) as record:
            assert record.num_serving == 0


def test_a_bucket_is_exact_however_many_take_from_it(tmp_path: Path) -> None:
    work = """
import sys
from pathlib import Path
from server.access.account import Account, Limits
from server.access.rate_limits import RateLimitStore
from server.errors import ApiError
store = RateLimitStore(Path(sys.argv[1]), int(sys.argv[2]), 4)
anna, taken = Account("anna", Limits(tokens_per_minute=1000), store, clock=lambda: 5.0), 0
for _ in range(2000):
    try:
        anna.charge(1)
    except ApiError:
        break
    taken += 1
print(taken)
"""
    command = [sys.executable, "-c", work, str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, cwd=ROOT) for n in range(4)
    ]
    assert sum(int(worker.communicate(timeout=60)[0]) for worker in workers) == 1000


# ---------------------------------------------------------------- quotas and usage


def unix_s(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path)
    yield database
    await database.close()


async def test_usage_outlives_the_process_and_quotas_the_day(database: Database) -> None:
    clock = Clock(unix_s("2026-01-30T23:00"))
    book = UsageTracker(database.tables(SCHEMA), clock=clock)
    await book.load()
    limits = Limits(tokens_per_day=100, tokens_per_month=250)
    anna = Account(
        "anna", limits, RateLimitStore(), get_quota_usage=book.quota_usage, on_usage=book.add
    )
    anna.charge(60).settle(UsageCounts(prompt_tokens=60, cached_tokens=16, output_tokens=60))
    error = refused(anna.begin)
    assert (error.code, error.headers["retry-after"]) == ("insufficient_quota", "3600")
    await book.flush()

    clock.now_s = unix_s("2026-01-31T01:00")
    book = UsageTracker(database.tables(SCHEMA), clock=clock)  # after a restart
    await book.load()
    anna = Account(
        "anna", limits, RateLimitStore(), get_quota_usage=book.quota_usage, on_usage=book.add
    )
    anna.begin()
    anna.charge(90).settle(UsageCounts(prompt_tokens=90, output_tokens=9))
    assert (book.quota_usage("anna").day, book.quota_usage("anna").month) == (99, 219)
    anna.charge(40).settle(UsageCounts(prompt_tokens=40))
    assert "a day" in refused(anna.charge, 1).message
    other = Account(
        "berta", limits, RateLimitStore(), get_quota_usage=book.quota_usage, on_usage=book.add
    )
    other.charge(1)

    days = await book.daily_usage("anna", "2026-01-01", "2026-01-31")
    assert [(day.day, day.counts.tokens, day.counts.requests) for day in days] == [
        ("2026-01-30", 120, 0),
        ("2026-01-31", 139, 1),
    ]
    assert days[0].counts.cached_tokens == 16
    clock.now_s = unix_s("2026-02-01T00:00")
    assert (book.quota_usage("anna").day, book.quota_usage("anna").month) == (0, 0)
    anna.begin()


async def test_a_quota_counts_what_other_processes_have_written(
    database: Database, tmp_path: Path
) -> None:
    clock = Clock(unix_s("2026-01-30T23:00"))
    elsewhere = Database(tmp_path)
    there = UsageTracker(elsewhere.tables(SCHEMA), clock=clock)
    here = UsageTracker(database.tables(SCHEMA), clock=clock)
    await here.load()
    there.add("anna", UsageCounts(prompt_tokens=60, output_tokens=40))
    await there.flush()
    assert await here.daily_usage("anna", "2026-01-30", "2026-01-30")
    assert here.quota_usage("anna").day == 100

    clock.now_s = unix_s("2026-01-31T23:00")
    there.add("anna", UsageCounts(prompt_tokens=7))
    await there.flush()
    here.add("anna", UsageCounts(prompt_tokens=1))
    await here.load()
    assert (here.quota_usage("anna").day, here.quota_usage("anna").month) == (8, 108)
    await elsewhere.close()


async def test_what_cannot_be_written_is_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = UsageTracker(database.tables(SCHEMA), clock=Clock(unix_s("2026-01-30T23:00")))
    book.add("anna", UsageCounts(requests=1, prompt_tokens=3))

    async def full(*_: object) -> None:
        raise StoreError("disk full") from sqlite3.OperationalError()

    with monkeypatch.context() as patch:
        patch.setattr(Database, "run", full)
        with pytest.raises(StoreError):
            await book.flush()
    assert book.quota_usage("anna").day == 3
    book.add("anna", UsageCounts(requests=1, prompt_tokens=4))
    (day,) = await book.daily_usage(None, "2026-01-01", "2026-01-31")
    assert day.counts == UsageCounts(requests=2, prompt_tokens=7)
    assert book.quota_usage("anna").day == 7


async def test_a_write_that_is_cancelled_counts_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = UsageTracker(database.tables(SCHEMA), clock=Clock(unix_s("2026-01-30T23:00")))
    await book.load()
    transact = Database._transact
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert may_go_on.wait(60)
        return transact(*arguments)

    book.add("anna", UsageCounts(requests=1, prompt_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(Database, "_transact", slow)
        writing = asyncio.create_task(book.flush())
        assert await asyncio.to_thread(begun.wait, 60)
    writing.cancel()  # as a server does that shuts down
    with pytest.raises(asyncio.CancelledError):
        await writing
    book.add("anna", UsageCounts(requests=1, prompt_tokens=4))
    may_go_on.set()
    (day,) = await book.daily_usage("anna", "2026-01-01", "2026-01-31")
    assert day.counts == UsageCounts(requests=2, prompt_tokens=7)
    assert book.quota_usage("anna").day == 7


# ---------------------------------------------------------------- the queue


def test_a_full_queue_turns_away_who_filled_it() -> None:
    queue = Admission(100)
    noisy, quiet, third = Caller("noisy"), Caller("quiet"), Caller("third", weight=2.0)
    assert queue.try_admit(100, noisy), "one alone may have all of it"
    assert not queue.try_admit(1, noisy)
    assert queue.try_admit(50, quiet)
    assert not queue.try_admit(1, quiet)
    assert queue.try_admit(50, third), "half of all, by weight"
    assert not queue.try_admit(1, third)
    assert queue.num_live == 200 <= 100 * (1 + 1 / 2 + 1 / 2)
    queue.release(50, quiet)
    queue.release(60, noisy)
    assert queue.num_live == 90
    assert queue.try_admit(10, noisy), "there is room again, for anybody"
    assert not queue.try_admit(1, noisy)
    assert queue.try_admit(1000, Caller("noisy", background=True)), "bounded by who sends them"
    assert queue.num_live == 100


def test_who_has_no_key_file_has_one_queue() -> None:
    queue = Admission(3)
    assert queue.try_admit(3, Caller())
    assert not queue.try_admit(1, Caller())
    queue.release(1, Caller())
    assert queue.try_admit(1, Caller())
