import pytest

from tests.matrix_units import matrix_units  # noqa: F401
from tests.program_order import run_last_programs_first


@pytest.fixture(autouse=True)
def last_programs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run_last_programs_first(monkeypatch)
