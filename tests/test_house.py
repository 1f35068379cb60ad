"""House rules: import directions, packaging, and the contents of the deployment files."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from engine.stats import EngineStats
from server.cli.reference import update
from server.metrics import Metrics
from server.settings import Settings
from tests.thinned import ONE_IN

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("server", "engine", "kernels", "tools", "loadtest")


def git_files(*patterns: str) -> list[Path]:
    """Files of the repository, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_imports_run_one_way():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_every_room_is_under_the_rules():
    packages = {path.parent for path in git_files("*/__init__.py")}
    rooms = {path.name for path in packages if path.parent == ROOT} - {"tests"}
    assert rooms - {"demo"} <= set(PROJECT["tool"]["pyright"]["include"])
    assert rooms == set(PROJECT["tool"]["importlinter"]["root_packages"])


def test_a_wrong_import_would_be_seen(tmp_path):
    """The contract is not vacuous: an engine that imports the server breaks it."""
    for room in PROJECT["tool"]["importlinter"]["root_packages"]:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
    (tmp_path / "engine" / "wrong.py").write_text("import server\n")
    (tmp_path / "loadtest" / "wrong.py").write_text("import engine\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "2 broken" in done.stdout


def test_files_stay_short_enough_to_read():
    for path in git_files(*(f"{room}/*.py" for room in ROOMS)):
        lines = len(path.read_text().splitlines())
        assert lines <= 450, f"{path.relative_to(ROOT)} has {lines} lines"


def test_kernels_is_an_empty_package():
    """transformers probes for a package of that name; ours must not be found."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_the_console_script_resolves():
    module, _, function = PROJECT["project"]["scripts"]["quire"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_every_requirement_is_pinned():
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["test"]]:
        name = re.split(r"[<>=!~;\[ ]", requirement)[0].lower()
        assert name in pinned, f"{name} is not in constraints.txt"


def test_the_wheel_holds_the_demo_model_and_nothing_made(tmp_path):
    tree = tmp_path / "tree"
    for path in git_files():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name in ("loadtest/out/models/x/config.json", "demo/_work/x.json"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("{}")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*build, "-w", tmp_path, tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    model = {f"demo/model/{name.name}" for name in (ROOT / "demo" / "model").iterdir()}
    assert {"demo/model/model.safetensors", "demo/model/tokenizer.json"} <= model <= names
    assert {"server/cli/__init__.py", "engine/core.py", "loadtest/cli.py"} <= names
    made = re.compile(r"/out/|/_work/|^tests/")
    assert not [name for name in names if made.search(name)]


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert update(page) == page, "run: python -m server.cli.reference docs/cli.md"


# ---------------------------------------------------------------- deployment files


class IdleEngine:
    """The engine attributes that the metrics read."""

    stats = EngineStats()
    alive = True

    @property
    def members(self):
        return (self,)

    def on_output(self, listener):
        pass


def test_the_dashboard_asks_for_metrics_that_exist():
    metrics = Metrics(IdleEngine(), prefix="quire", model_name="m")
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    exist = {
        family.name + suffix
        for family in metrics.exposition(metrics.values).collect()
        for suffix in suffixes.get(family.type, ())
    }
    dashboard = json.loads((ROOT / "configs/grafana/dashboards/quire.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        expressions = [target["expr"] for target in panel["targets"]]
        assert expressions, panel["title"]
        asked |= {name for text in expressions for name in re.findall(r"quire:\w+", text)}
    assert len(asked) > 15
    assert asked <= exist
    source = yaml.safe_load(
        (ROOT / "configs/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_compose_names_what_exists():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            exists = (ROOT / source).exists() if "/" in source else source in compose["volumes"]
            assert exists, mount
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= set(services)
    scrape = yaml.safe_load((ROOT / "configs/prometheus.yml").read_text())
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    datasource = (ROOT / "configs/grafana/provisioning/datasources/prometheus.yml").read_text()
    assert "http://prometheus:9090" in datasource
    overlay = yaml.safe_load((ROOT / "configs/docker-compose.gpu.yml").read_text())
    assert set(overlay["services"]) <= set(services)
    mounts = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    provider = yaml.safe_load(
        (ROOT / "configs/grafana/provisioning/dashboards/quire.yml").read_text()
    )
    assert provider["providers"][0]["options"]["path"] in mounts


def test_compose_leaves_requests_the_time_to_finish():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    grace = re.fullmatch(r"(\d+)s", compose["services"]["quire"]["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) > Settings.model_fields["shutdown_timeout_s"].default


def test_the_dashboard_knows_how_often_metrics_are_read():
    scrape = yaml.safe_load((ROOT / "configs/prometheus.yml").read_text())
    (source,) = yaml.safe_load(
        (ROOT / "configs/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines]


def test_the_image_copies_what_exists_and_what_the_builder_is_sent():
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = set()
    for instruction, arguments in dockerfile():
        if instruction == "COPY" and "--from" not in arguments:
            *sources, _ = arguments.split()
            copied |= set(sources)
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
    packages = {
        name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert {name for name in packages if (ROOT / name / "__init__.py").exists()} <= copied


def test_the_image_is_safe_to_run():
    steps = dockerfile()
    last_stage = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    final = dict(steps[last_stage:])
    assert final["USER"] not in ("root", "0")
    assert "/health" in final["HEALTHCHECK"]
    assert json.loads(final["ENTRYPOINT"])[:2] == ["quire", "serve"]
    assert "--host" in final["ENTRYPOINT"]
    assert final["EXPOSE"] == "8000"
    for name, arguments in steps:
        if name == "FROM":  # what a tag without a release stands for changes under a build
            assert re.fullmatch(r"python:\$\{PYTHON\}-slim-\$\{DEBIAN\}( AS build)?", arguments)


def test_a_change_of_our_own_does_not_fetch_torch_again():
    names = [arguments for name, arguments in dockerfile() if name in ("COPY", "RUN")]
    torch = next(i for i, arguments in enumerate(names) if arguments.endswith(" torch"))
    assert names[:torch]
    assert all("pyproject" not in arguments for arguments in names[:torch])


def test_the_image_can_link_kernels_to_a_driver():
    """Triton calls a C compiler on first use."""
    steps = dockerfile()
    last_stage = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    installed = " ".join(told for name, told in steps[last_stage:] if name == "RUN").split()
    assert {"gcc", "libc6-dev", "/home/quire/.triton"} <= set(installed)


def test_continuous_integration_checks_and_tests():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (\w+)$", script, re.MULTILINE) == ["check", "clients", "test"]


def test_make_tells_its_targets():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    told = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    targets = (
        "install",
        "serve",
        "test",
        "test-slow",
        "check",
        "bench",
        "bench-cpu",
        "gpu-check",
        "clean",
    )
    assert all(f"make {target} " in told for target in targets)


def test_what_is_thinned_exists():
    for file, functions in ONE_IN.items():
        text = (ROOT / file).read_text()
        assert [name for name in functions if f"def {name}(" not in text] == []
