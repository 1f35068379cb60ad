"""The table of adapters that API workers share, through several handles of one file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.types import Adapter
from server.adapter_table import AdapterTable, ServedAdapter


def served(name: str, created: int = 0) -> dict[str, ServedAdapter]:
    return {name: ServedAdapter(Adapter(id=f"id-{name}", name=name, path=f"/{name}"), created)}


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_put_is_there_until_it_is_removed(tmp_path: Path, shared: bool) -> None:
    table = AdapterTable(tmp_path / "table" if shared else None)
    assert not table.served
    table.put(served("a"))
    table.put(served("a", 7) | served("b"))
    assert table.served == served("a", 7) | served("b")
    table.remove("a")
    with pytest.raises(KeyError):
        table.remove("a")
    assert table.served == served("b")


def test_what_a_server_begins_with_does_not_come_back(tmp_path: Path) -> None:
    first, second = (AdapterTable(tmp_path / "table") for _ in range(2))
    first.put(served("a"), initial=True)
    second.put(served("b"), initial=True)
    assert second.served == served("a")
    second.remove("a")
    AdapterTable(tmp_path / "table").put(served("a"), initial=True)
    assert not first.served


def test_no_change_of_many_writers_is_lost_and_each_is_seen_at_once(tmp_path: Path) -> None:
    tables = [AdapterTable(tmp_path / "table") for _ in range(4)]

    def work(index: int) -> None:
        own, other = tables[index], AdapterTable(tmp_path / "table")
        for turn in range(25):
            name = f"{index}-{turn}"
            own.put(served(name))
            assert name in other.served
            if turn % 2:
                own.remove(name)
                assert name not in other.served

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    expected = {f"{index}-{turn}" for index in range(4) for turn in range(0, 25, 2)}
    assert all(table.served.keys() == expected for table in tables)


def test_a_writer_killed_before_it_counted_harms_nobody(tmp_path: Path) -> None:
    """The file is newer than the counter: no client was answered, and the next writer continues."""
    first, second = (AdapterTable(tmp_path / "table") for _ in range(2))
    first.put(served("a"))
    before = (tmp_path / "table.version").read_bytes()
    first.put(served("b"))
    (tmp_path / "table.version").write_bytes(before)
    second.put(served("c"))
    expected = served("a") | served("b") | served("c")
    assert first.served == second.served == AdapterTable(tmp_path / "table").served == expected
