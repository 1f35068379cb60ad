"""Traces of steps: their contents, when they end, and no cost when there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.core import EngineCore
from engine.errors import InvalidParameter, ProfileRefused
from engine.profiler import MAX_PROFILE_STEPS, Spans, make_profile_directory
from engine.requests import fan_out
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, make_config, make_info
from tests.engine.traces import steps

ROOT = Path(__file__).parents[3]


def make_core(directory: Path | None, **scheduler: object) -> EngineCore:
    config = make_config(**scheduler)
    if directory is not None:
        config = msgspec.structs.replace(config, profile_dir=str(directory))
    core = EngineCore(config, FakeRunner(make_info(60, 4, 100)))
    for index in range(3):
        sampling = SamplingParams(seed=index, max_tokens=12, ignore_eos=True)
        for request in fan_out(f"r{index}", (1, 2, 3, index), sampling):
            core.add(request)
    return core


def test_a_trace_ends_with_its_last_step_and_is_told_once(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    core.step()
    core.profiler.start(3)
    for _ in range(3):
        assert list(tmp_path.iterdir()) == []
        core.step()
    (file,) = tmp_path.iterdir()
    core.step()
    trace = core.profiler.stop()
    assert (trace.path, trace.num_steps) == (str(file), 3)
    assert file.name.startswith("quire-profile-")
    assert file.name.endswith(f"-{os.getpid()}.json.gz")
    assert steps(file) == [["schedule", "output"]] * 3
    with pytest.raises(ProfileRefused) as refused:
        core.profiler.stop()
    assert refused.value.code == "profile_not_running"


def test_a_trace_can_be_ended_early_and_another_begun(tmp_path: Path) -> None:
    core = make_core(tmp_path)
    for num_steps in (2, 0, 1):
        core.profiler.start(64)
        for _ in range(num_steps):
            core.step()
        trace = core.profiler.stop()
        assert trace.num_steps == num_steps
        assert steps(trace.path) == [["schedule", "output"]] * num_steps
    assert len(list(tmp_path.iterdir())) == 3


def test_overlapped_the_first_step_launches_two(tmp_path: Path) -> None:
    core = make_core(tmp_path, overlap=True)
    core.profiler.start(3)
    while core.has_work:
        core.step()
    found = steps(core.profiler.stop().path)
    assert found == [["schedule", "schedule", "output"], *[["schedule", "output"]] * 2]


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileRefused) as refused:
        make_core(None).profiler.start(4)
    assert refused.value.code == "profiling_off"
    profiler = make_core(tmp_path).profiler
    for num_steps in (0, -1, MAX_PROFILE_STEPS + 1):
        with pytest.raises(InvalidParameter) as invalid:
            profiler.start(num_steps)
        assert invalid.value.param == "num_steps"
    profiler.start(4)
    with pytest.raises(ProfileRefused) as refused:
        profiler.start(4)
    assert refused.value.code == "profile_running"
    assert profiler.stop().num_steps == 0


def test_a_trace_that_cannot_be_written_harms_no_step(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    core = make_core(directory)
    core.profiler.start(2)
    directory.rmdir()
    while core.has_work:
        core.step()
    with pytest.raises(OSError, match="gone"):
        core.profiler.stop()
    with pytest.raises(ProfileRefused):
        core.profiler.stop()
    directory.mkdir()
    core.profiler.start(2)
    assert Path(core.profiler.stop().path).exists()


def test_without_a_trace_a_range_is_nothing_and_no_tensor_library_is_there() -> None:
    spans = Spans()
    assert spans("forward") is spans("sample"), "a range was made"
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.engine.core.test_profiler import make_core\n"
        "core = make_core(Path('.'))\n"
        "while core.has_work: core.step()\n"
        "assert core.stats.num_steps > 3\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_directory_is_made_and_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_profile_directory("a/b") == str(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_profile_directory(tmp_path / "file")
