"""Third-party clients against a real server, each a program in its library's own environment.

`make clients` installs them; libraries that are not installed are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import MODEL, ROOT

PROGRAMS = Path(__file__).parent / "programs"
JAVASCRIPT = Path(__file__).parent / "js"
PYTHON = Path(os.environ.get("QUIRE_CLIENTS", ROOT / ".venv-clients")) / "bin" / "python"
LIMIT_S = 300.0


@pytest.mark.parametrize("library", ["anthropic", "instructor", "langchain", "litellm", "lm_eval"])
def test_python_library(library: str, base_url: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("the client libraries are not installed: make clients")
    more = [str(ROOT / "demo" / "model")] if library == "lm_eval" else []
    program = PROGRAMS / f"{library}_client.py"
    _run([str(PYTHON), str(program), base_url, MODEL, *more], tmp_path)


def test_javascript_library(base_url: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (JAVASCRIPT / "node_modules").is_dir():
        pytest.skip("the JavaScript library is not installed: make clients")
    _run([node, str(JAVASCRIPT / "openai_client.mjs"), base_url, MODEL], tmp_path)


def _run(command: list[str], home: Path) -> None:
    """Run a program in the repository's root. It exits with 0 if all of its checks pass."""
    own = {
        "HOME": str(home),  # keeps their caches out of the user's home
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
