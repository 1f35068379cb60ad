"""One table of settings, four sources, and a one-line error for a value that cannot be used."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import get_args

import pytest

from engine.errors import ModelLoadError
from server.cli.flags import build_parser, parse_settings
from server.cli.foreign_flags import FOREIGN_FLAGS, foreign_advice
from server.cli.serve import with_model_directories
from server.foreign_values import REASONING_PARSERS, TOOL_CALL_PARSERS
from server.setting_sources import misspelt_variables
from server.settings import DEMO_MODEL_NAME, InvalidSettings, Settings, settings_table
from server.text.answer_format import ReasoningParser, ToolCallParser

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for row in settings_table():
        monkeypatch.delenv(row.variable, raising=False)


@pytest.mark.parametrize(
    "given", list(itertools.product([False, True], repeat=3)), ids=lambda given: str(given)
)
def test_flags_win_over_environment_over_yaml_over_defaults(given, tmp_path, monkeypatch):
    in_flags, in_environment, in_yaml = given
    config = tmp_path / "x.yaml"
    config.write_text("max-num-seqs: 2\nport: 9\n" if in_yaml else "port: 9\n")
    if in_environment:
        monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "3")
    flags = ["--max-num-seqs", "4"] if in_flags else []
    settings = parse_settings([str(config), *flags])
    expected = 4 if in_flags else 3 if in_environment else 2 if in_yaml else 256
    assert settings.max_num_seqs == expected
    assert settings.engine_config().scheduler.max_num_seqs == expected
    assert settings.port == 9


def test_every_setting_has_a_flag_a_variable_and_a_yaml_key(tmp_path, monkeypatch):
    samples = {
        "model": "m",
        "tokenizer": "t",
        "chat_template": "c.jinja",
        "attention_backend": "reference",
        "host": "::1",
        "metrics_prefix": "vllm",
        "served_model_name": "name",
        "api_key": "key",
        "gpu_memory_utilization": "0.5",
        "profile": "traces",
        "data_dir": "kept",
        "draft_model": "d",
        "lora": "tone=adapters/tone",
        "lora_dir": "adapters",
        "weights_dir": "checkpoints",
        "otlp_traces_endpoint": "http://collector:4318",
        "api_key_file": "keys.yaml",
        "cors_origin": "https://app.example",
        "trusted_proxy": "10.0.0.0/8",
        "ssl_certfile": "cert.pem",
        "ssl_keyfile": "key.pem",
        "ssl_ca_certs": "ca.pem",
        "master_addr": "10.0.0.1",
        "node_secret_file": "secret",
    }
    for row in settings_table():
        if row.name == "config":
            continue
        value = samples.get(row.name, row.choices[-1] if row.choices else "7")
        by_flag = [row.flag, value]
        if row.kind == "flag":
            value = str(not row.default).lower()
            by_flag = [row.flag if not row.default else "--no-" + row.flag[2:]]
        config = tmp_path / "one.yaml"
        config.write_text(f"{row.name}: {value}\n")
        from_flag = getattr(parse_settings(by_flag), row.field)
        from_yaml = getattr(parse_settings(["--config", str(config)]), row.field)
        with monkeypatch.context() as patch:
            patch.setenv(row.variable, value)
            from_environment = getattr(Settings.load({}), row.field)
        assert from_flag == from_environment == from_yaml != row.default, row.name


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("2GiB", 2**31), ("1.5GB", 15 * 10**8)],
)
def test_sizes_as_people_write_them(text, number):
    assert parse_settings(["--kv-cache-memory-bytes", text]).kv_cache_memory_bytes == number


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--kv-offload-bytes", "9" * 23, "must be at most 9223372036854775807"),
        ("--kv-cache-memory-bytes", "9" * 400, "must be at most"),
        ("--max-num-seqs", "9" * 23, "must be at most"),
        ("--step-timeout-s", "inf", "must be a finite number"),
        ("--otlp-traces-endpoint", "localhost:4318", "must be a URL"),
        ("--otlp-traces-endpoint", "http://[::1", "must be a URL"),
        ("--otlp-traces-endpoint", "http://a:http", "must be a URL"),
        ("--otlp-traces-endpoint", "http://a:99999", "must be a URL"),
        ("--otlp-traces-endpoint", "http://:4318", "must be a URL"),
        ("--host", "", "must be an address, such as 127.0.0.1"),
        ("--served-model-name", "", "must be a name of 1 to 256 printable characters"),
        ("--served-model-name", "a\n", "must be a name"),
        ("--served-model-name", "a" * 257, "must be a name"),
        ("--trusted-proxy", "proxy.example", "must be an address such as 10.0.0.2, a network"),
        ("--cors-origin", "app.example", "must be an origin, such as https://app.example, or \\*"),
        ("--metrics-prefix", "a b", "must be letters, digits and underscores"),
        ("--max-model-len", "8q", "must be a number such as 4096, 8K or 2GiB, not '8q'$"),
        ("--max-model-len", "0", "must be greater than or equal to 1, not '0'$"),
        ("--quantization", "awq", "must be .*, not 'awq'; leave it out for a quantised checkpoint"),
        ("--load-format", "gguf", ".*; leave it out: a GGUF file"),
        ("--tool-call-parser", "llama3_json", ".*; here it is llama3, and auto, the default"),
        ("--tool-call-parser", "mine", ".*, not 'mine'; auto, the default, detects"),
        ("--reasoning-parser", "deepseek_r1", ".*; here it is think, and auto, the default"),
        ("--max-num-seqs", "0", "must be greater than or equal to 1, not '0'$"),
    ],
)
def test_what_can_never_be_meant_is_refused(flag, value, told):
    with pytest.raises(InvalidSettings, match=f"^{flag}: {told}"):
        parse_settings([flag, value])


@pytest.mark.parametrize(
    ("flag", "value", "field", "read"),
    [
        ("--dtype", "half", "dtype", "float16"),
        ("--dtype", "float", "dtype", "float32"),
        ("--max-model-len", "auto", "max_model_len", None),
        ("--max-model-len", "-1", "max_model_len", None),
        ("--max-model-len", "8k", "max_model_len", 8000),
    ],
)
def test_values_that_vllm_takes(flag, value, field, read):
    assert getattr(parse_settings([flag, value]), field) == read


def test_parsers_of_other_servers_are_told_by_names_that_exist():
    for ours, parsers in (
        (get_args(ToolCallParser), TOOL_CALL_PARSERS),
        (get_args(ReasoningParser), REASONING_PARSERS),
    ):
        assert set(parsers.values()) <= set(ours)
        assert not set(parsers) & set(ours)


def test_lists_come_from_repeated_flags_and_from_commas(monkeypatch):
    assert parse_settings(["--api-key", "a", "--api-key", "b"]).api_keys == ["a", "b"]
    monkeypatch.setenv("QUIRE_API_KEY", "hunter2, hunter3")
    assert Settings.load({}).api_keys == ["hunter2", "hunter3"]
    assert "hunter" not in repr(Settings.load({}))  # keys do not appear in logged settings


@pytest.mark.parametrize("key", ["", " ", "two words", "clé"])
def test_a_key_that_no_client_can_send_is_refused(key, tmp_path):
    """Above all an empty one, of a variable that was not set: everybody would be let in."""
    with pytest.raises(InvalidSettings, match=r"^--api-key: must be visible ASCII"):
        parse_settings(["--api-key", "good", "--api-key", key])
    config = tmp_path / "one.yaml"
    config.write_text(f"api_key: '{key}'\n")
    with pytest.raises(InvalidSettings, match=r"^'api_key' in the YAML file: must "):
        parse_settings([str(config)])


@pytest.mark.parametrize(
    ("yaml", "told"),
    [
        ("max_num_seq: 3", "there is no setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("config: other.yaml", "cannot name another"),
        ("port: [", "is not valid YAML"),
        ("port: 2027-02-30", "is not valid YAML: day is out of range"),
        ("- port", "must hold settings"),
        ("port: 99999", "'port' in the YAML file: must be less than or equal to 65535"),
        ("api_key: {a: hunter2}", "'api_key' in the YAML file"),
    ],
)
def test_a_bad_file_is_told_in_one_line(yaml, told, tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text(yaml)
    with pytest.raises(InvalidSettings) as caught:
        Settings.load({"config": config})
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert "hunter2" not in message


def test_the_source_of_a_bad_value_is_named(monkeypatch):
    with pytest.raises(InvalidSettings, match=r"^--dtype: .*, not 'int3'$"):
        parse_settings(["--dtype", "int3"])
    monkeypatch.setenv("QUIRE_DTYPE", "int4")
    with pytest.raises(InvalidSettings, match=r"^QUIRE_DTYPE: .*, not 'int4'$"):
        parse_settings([])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-num-seq", "4"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["--prot=9"], "--prot=9; did you mean --port?"),
        (["--xyzzy"], "unrecognized arguments: --xyzzy\n"),
        (["-xyzzy"], "unrecognized arguments: -xyzzy\n"),
        (["--enable-blora", "x"], "--enable-blora\n"),  # nothing is near enough
        (["m", "--ctx-size", "8192"], "--ctx-size 8192; use --max-model-len\n"),
        (["m", "-tp", "2"], "-tp 2; use --tensor-parallel-size\n"),
        (["m", "-ngl=99"], "-ngl=99; not supported: the whole model"),
        (["-hf", "org/name:Q4_K_M"], "arguments: -hf; give the model as MODEL, without a flag\n"),
        (["--port", "1", "-hff=x"], "-hff=x; write a part of the file's name after the model's"),
        (["--max-log-len", "9"], "--max-log-len; not needed: prompts and answers are never"),
        (["m", "--draft-min", "1"], "--draft-min 1; not needed: as many tokens are drafted as pay"),
        (["m", "--generation-config", "vllm"], "own generation_config.json is used; change it"),
        (["m", "--no-mmap"], "--no-mmap; not supported: weights are read into memory"),
        (["--trust_remote_code"], "--trust_remote_code; not needed: models are built in"),
        (["--no-enable-chunked-prefill"], "; not needed: prompts are always computed in chunks"),
        (["--task", "embed", "--prot=9"], "9\n  --task: not needed: the model's architecture"),
        (["--task", "embed", "--prot=9"], "\n  --prot: did you mean --port?\n"),
        (["m", "--served-model-name", "a", "b"], "b; repeat --served-model-name before each value"),
        (["m", "--port", "1", "b"], "unrecognized arguments: b\n"),
    ],
)
def test_a_flag_that_is_none_is_told_with_its_nearest(flags, told, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_settings(flags)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_what_is_advised_for_flags_of_others_exists():
    known = {name for action in build_parser()._actions for name in action.option_strings}
    assert len(FOREIGN_FLAGS) == len(set(FOREIGN_FLAGS))
    for flag in FOREIGN_FLAGS:
        assert flag not in known
        advice = foreign_advice(flag)
        assert advice
        assert set(re.findall(r"--[a-z-]+", advice)) <= known, flag


def test_a_variable_that_is_nearly_a_setting_is_told():
    environ = {"QUIRE_PROT": "1", "QUIRE_PORT": "1", "QUIRE_URL": "x", "QUIRE_HTTP": "y"}
    told = misspelt_variables(settings_table(), environ)
    assert told == ["QUIRE_PROT is no setting; did you mean QUIRE_PORT?"]


def test_what_kubernetes_sets_for_a_service_of_that_name_is_not_the_port(monkeypatch):
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.43.7.1:8000")
    assert Settings.load({}).port == 8000


def test_names_that_clients_may_use():
    assert Settings.load({}).model_names == [DEMO_MODEL_NAME]
    assert Settings.load({"model": "some/dir/mine/"}).model_names == ["mine"]
    assert Settings.load({"served_model_names": ["a", "b"]}).model_names == ["a", "b"]


def test_a_model_given_as_the_current_directory_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert Settings.load({"model": "."}).model_names == ["mine"]


def test_a_model_of_the_hub_is_also_served_under_its_name_there(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("server.cli.serve.resolve_model", lambda *arguments: str(tmp_path))
    given = {"model": "org/tiny@v2", "draft_model": "org/draft"}
    found = with_model_directories(Settings.load(given))
    assert found.model == found.draft_model == str(tmp_path)
    assert found.model_names == ["tiny", "org/tiny"]
    named = Settings.load({"model": "org/tiny", "served_model_names": ["a"]})
    assert with_model_directories(named).model_names == ["a"]


def test_a_tokenizer_and_adapters_may_be_named_as_on_the_hub(tmp_path, monkeypatch):
    def fetched(name, *_):
        if name == "org/none":
            raise ModelLoadError("there is no such thing")
        return f"{tmp_path}/{name}"

    for function in ("resolve_adapter", "resolve_tokenizer"):
        monkeypatch.setattr(f"server.cli.serve.{function}", fetched)
    given = {"tokenizer": "org/text", "loras": ["a=org/one@v2", "b=org/two"]}
    found = with_model_directories(Settings.load(given))
    assert found.tokenizer == f"{tmp_path}/org/text"
    assert found.adapters == {"a": f"{tmp_path}/org/one@v2", "b": f"{tmp_path}/org/two"}
    for wrong, flag in (
        ({"tokenizer": "org/none"}, "--tokenizer"),
        ({"loras": ["a=org/none"]}, "--lora a"),
    ):
        with pytest.raises(ModelLoadError, match=f"^{flag}: there is no such thing"):
            with_model_directories(Settings.load(wrong))


def test_two_models_on_one_command_line_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_settings(["one", "--model", "two"])
    assert caught.value.code == 2
    assert "are both given" in capsys.readouterr().err


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_presets_are_settings(preset):
    lines = [line for line in preset.read_text().splitlines() if line and line[0] not in "#"]
    settings = parse_settings([str(preset)])
    fields = {row.name: row.field for row in settings_table()}
    set_fields = {fields[line.partition(":")[0]] for line in lines}
    assert set_fields | {"config"} == settings.model_fields_set
    assert f"configs/{preset.name}" in preset.read_text()  # its first lines show how to use it


def test_help_tells_every_setting_and_every_choice():
    help = build_parser().format_help()
    for row in settings_table():
        assert row.flag in help
        assert all(choice in help for choice in row.choices)
