"""How much memory is free within control groups, whichever of them has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import memory

GIB = 2**30
UNLIMITED = 2**63 - 1


def group(directory: Path, *, limit: str, used: int, files: dict[str, int]) -> None:
    """A control group of version 2 as the kernel shows it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in files.items()))


def left(root: Path, membership: str) -> int:
    told = root / "membership"
    told.write_text(membership)
    return memory._control_group_bytes(root, told)


def test_pages_of_files_that_were_read_are_free(tmp_path: Path) -> None:
    """Loading reads a checkpoint through the page cache, which fills the container."""
    files = {"anon": 5 * GIB, "inactive_file": 2 * GIB, "active_file": GIB, "file_mapped": GIB // 2}
    group(tmp_path, limit=str(8 * GIB), used=8 * GIB, files=files)
    assert left(tmp_path, "0::/\n") == 2 * GIB + GIB // 2


@pytest.mark.parametrize("tight", ["system.slice/quire.service", "system.slice"])
def test_a_limit_of_a_service_or_its_slice_counts(tmp_path: Path, tight: str) -> None:
    """The root group of a machine has no limit, and none of these files."""
    for path in ("system.slice/quire.service", "system.slice"):
        limit = str(4 * GIB) if path == tight else "max"
        group(tmp_path / path, limit=limit, used=GIB, files={"anon": GIB})
    assert left(tmp_path, "0::/system.slice/quire.service\n") == 3 * GIB
    assert left(tmp_path, "0::/system.slice/other.service\n") == (
        3 * GIB if tight == "system.slice" else UNLIMITED
    )


@pytest.mark.parametrize("seen", ["", "docker/1234"], ids=["in the container", "from outside"])
def test_limits_of_version_1_count(tmp_path: Path, seen: str) -> None:
    directory = tmp_path / "memory" / seen
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (directory / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {GIB}\n")
    membership = "5:devices:/docker/1234\n4:memory:/docker/1234\n0::/\n"
    assert left(tmp_path, membership) == 2 * GIB


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory._control_group_bytes(tmp_path, tmp_path / "missing") == UNLIMITED
    assert 0 < memory.free_host_bytes() < UNLIMITED
