"""The native kernels' threads: the number of helpers changes no result, and idle ones sleep."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import operations
from kernels.cpu.native import build
from kernels.cpu.program import Recorder, Workspace

pytestmark = pytest.mark.skipif(
    build.load() is None or len(os.sched_getaffinity(0)) < 2,
    reason="no native kernels, or one core",
)
ROWS, WIDTH = 512, 512  # enough for several threads
WEIGHT = torch.linspace(0.5, 1.5, WIDTH)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def norms(x: torch.Tensor, count: int = 20) -> torch.Tensor:
    """Chained norms: each reads what all threads have written."""
    for _ in range(count):
        x = operations.rms_norm(x, WEIGHT, 1e-5)
    return x


def expected(x: torch.Tensor) -> torch.Tensor:
    """The same on one thread."""
    torch.set_num_threads(1)
    found = norms(x)
    torch.set_num_threads(2)
    return found


def test_operations_of_several_threads_at_once() -> None:
    """One of them gets the team, the others compute alone, and results do not mix."""
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(4)]
    wanted = [expected(x) for x in inputs]
    found: list[list[torch.Tensor]] = [[] for _ in inputs]

    def compute(index: int) -> None:
        torch.set_num_threads(2)
        found[index] += [norms(inputs[index]) for _ in range(10)]

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, results in zip(wanted, found, strict=True):
        assert len(results) == 10
        assert all(torch.equal(want, result) for result in results)


def test_a_program_after_a_pause_and_without_one() -> None:
    """Helpers may be asleep, or awake."""
    x = torch.zeros(ROWS, WIDTH)
    program, result = Recorder(Workspace())(lambda: norms(x))
    for pause_s in (0.0, 0.0, 0.02, 0.0, 0.02):
        time.sleep(pause_s)
        x.copy_(torch.randn(x.shape))
        program()
        assert torch.equal(result, expected(x))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_computes_without_helpers() -> None:
    x = torch.randn(ROWS, WIDTH)
    wanted = expected(x).numpy().tobytes()
    assert norms(x).numpy().tobytes() == wanted  # there is a helper now, but not in the child
    child = os.fork()
    if child == 0:
        os._exit(0 if norms(x).numpy().tobytes() == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nobody_is_awake_when_there_is_nothing_to_do() -> None:
    norms(torch.randn(ROWS, WIDTH))
    wait_until_asleep()
    x = torch.randn(ROWS, WIDTH)
    program, _ = Recorder(Workspace())(lambda: norms(x))
    program()
    wait_until_asleep()


def test_no_order_of_memory_is_taken_for_granted(tmp_path: Path) -> None:
    """ThreadSanitizer detects dependence on this processor's memory order."""
    compiler, fixed = shutil.which("g++") or shutil.which("c++"), shutil.which("setarch")
    if compiler is None or fixed is None:  # it needs addresses without randomisation
        pytest.skip("no C++ compiler, or no setarch")
    program = tmp_path / "races"
    sources = (Path(__file__).with_name("team_races.cpp"), build._HERE / "team.cpp")
    flags = ("-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{build._HERE}")
    made = subprocess.run((compiler, *flags, *sources, "-o", program), capture_output=True)
    if made.returncode != 0 and b"tsan" in made.stderr:
        pytest.skip("no ThreadSanitizer")
    assert made.returncode == 0, made.stderr.decode()
    ran = subprocess.run(
        (fixed, "-R", program),
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unexpected memory mapping" in ran.stderr or "personality" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run here")
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr


def wait_until_asleep() -> None:
    """Wait until all other threads of this process are blocked."""
    own = threading.get_native_id()
    for _ in range(1000):
        tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        if all(state == "S" for state in states):
            return
        time.sleep(0.005)
    pytest.fail(f"threads are at work with nothing to do: {states}")
