"""Every example runs, offline on the embedded model and over HTTP against a real server."""

import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OFFLINE = sorted(path.name for path in EXAMPLES.glob("offline_*.py"))
HTTP = sorted(path.name for path in EXAMPLES.glob("openai_*.py"))

SAYS = {
    "offline_generate.py": "'The capital of France is' -> ' Paris' (stop)",
    "offline_stream.py": "\n[",
    "offline_chat.py": "> And of Italy?\n",
    "offline_logprobs.py": "likeliest",
    "offline_choices.py": "the same again: True",
    "offline_beams.py": "Paris",
    "offline_embeddings.py": " numbers for ",
    "offline_prefix_sharing.py": "The third planet from the Sun is Earth.  [",
    "offline_stops.py": "frequency penalty 1.5: ",
    "openai_chat.py": "stop, ",
    "openai_stream.py": " tokens]",
    "openai_async.py": "\n",
    "openai_embeddings.py": "relevance_score",
    "openai_batch.py": "France -> ",
    "openai_tools.py": "21 degrees",
    "openai_conversation.py": "assistant: The capital of Italy",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def run(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SAYS[name] in run(name, capsys)


@pytest.mark.parametrize("name", HTTP)
def test_sdk_examples_run(name: str, base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SAYS[name] in run(name, capsys, base_url)


@pytest.mark.parametrize("name", HTTP)
def test_sdk_examples_say_in_one_line_that_no_server_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the address from the environment, as for the SDK itself."""

    async def skip(delay_s: float) -> None:
        """Before the SDK tries again."""

    monkeypatch.setattr("time.sleep", lambda delay_s: None)
    monkeypatch.setattr("anyio.sleep", skip)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        with pytest.raises(SystemExit) as caught:
            run(name, capsys)
    assert caught.value.code == f"no server answers at {url}; start one with: quire serve"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_example_runs(base_url: str) -> None:
    command = ["sh", str(EXAMPLES / "curl.sh"), base_url]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert '"object":"list"' in out.replace(" ", "")
    assert "data: [DONE]" in out
    assert '"text_completion"' in out


def test_the_list_of_examples_is_complete() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in listed
