import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from engine.errors import InvalidParameter, ModelLoadError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

SPELLINGS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<<s>>", "<|im_", "end|>", "<", "s>", "▁"]
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
# Text that tries to spell special tokens, whole, nested and in halves.
hostile_text = st.lists(st.sampled_from(SPELLINGS) | plain_text, max_size=8).map("".join)


@given(text=hostile_text)
def test_any_text_round_trips_and_never_becomes_a_special_token(
    tokenizer: Tokenizer, kind: str, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert max(ids, default=0) < tokenizer.vocab_size
    decoded = tokenizer.decode(ids)
    if kind == "byte-level":
        assert decoded == text
        return
    # A SentencePiece vocabulary has one spelling for a space and for U+2581.
    text = text.replace("▁", " ")
    if kind == "metaspace":
        assert decoded.lstrip(" ") == text.lstrip(" ")
    else:  # an additional space wherever a spelling was broken
        assert decoded.replace(" ", "") == text.replace(" ", "")


@given(texts=st.lists(hostile_text, max_size=4))
def test_guarded_texts_stay_plain_however_they_are_joined(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    joined = "".join(tokenizer.guard(text) for text in texts)
    ids = tokenizer.encode(joined, add_special_tokens=False, parse_special=True)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert joined.replace(tokenizer._guard_text, "") == "".join(texts)


@given(text=plain_text)
def test_plain_text_has_the_ids_that_the_library_gives(
    tokenizer: Tokenizer, backend: Backend, text: str
) -> None:
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode_batch([text, "x"]) == [tokenizer.encode(text), tokenizer.encode("x")]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_long_text_has_the_ids_that_the_library_gives(
    tokenizer: Tokenizer, backend: Backend, add_special_tokens: bool
) -> None:
    text = "hello, the naïve cat 你好 \U0001f408\n" * 1000
    expected = backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected
    with pytest.raises(InvalidParameter):
        tokenizer.encode(text + "\ud83d")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    ready, begun, ran = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        ready.set()
        begun.wait()
        ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that the interpreter's lock is only given up freely
    try:
        begun.set()
        tokenizer.encode("hello the cat " * 20_000)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@given(text=plain_text, data=st.data())
def test_decoding_gives_the_library_s_text(
    tokenizer: Tokenizer, backend: Backend, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    if tokenizer.rules.byte_level:  # there any ids decode alike, including broken UTF-8
        ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=20))
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    unskipped = backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == unskipped


@given(text=plain_text)
def test_token_bytes_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode() == tokenizer.decode(ids, continuation=True)


def test_a_token_s_text_marks_parts_of_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👍", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).endswith("👍".encode())
    assert "\ufffd" in tokenizer.token_text(ids[-1])
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_spellings_are_special_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>", add_special_tokens=False, parse_special=True)
    assert ids[-1:] == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


def test_an_added_token_has_the_bytes_of_its_text(chatml: Tokenizer) -> None:
    ids = chatml.encode("<tool_call>", add_special_tokens=False)
    assert [chatml.token_bytes(id_) for id_ in ids] == [b"<tool_call>"]
    assert chatml.decode(ids) == "<tool_call>"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    for call in (lambda: tokenizer.encode("a\ud800"), lambda: tokenizer.encode_batch(["\udfff"])):
        with pytest.raises(InvalidParameter, match="surrogate"):
            call()


def save(path: Path, backend: Backend, config: dict | None = None, **files: dict) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory_is_read_whole(tmp_path: Path, backend: Backend) -> None:
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "add_bos_token": True}
    generation = {"eos_token_id": [1, 0]}
    made = Tokenizer.from_dir(save(tmp_path, backend, config, generation_config=generation))
    end, begin = backend.token_to_id("</s>"), backend.token_to_id("<s>")
    assert made.eos_token_ids == (0, 1, end)
    assert made.encode("x")[0] == begin
    assert made.encode("x", add_special_tokens=False)[0] != begin
    assert made.encode("")[0] == begin


def test_add_bos_token_overrules_the_post_processor(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    for flag, expected in ((None, [0, 1]), (True, [0, 1]), (False, [1])):
        config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
        assert Tokenizer.from_dir(save(tmp_path, backend, config)).encode("a") == expected


def test_normalisation_cannot_spell_a_special_token(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"<": 0, "s": 1, ">": 2}, []))
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens(["<s>"])
    data = json.loads(backend.to_str())
    data["added_tokens"][0]["normalized"] = True
    made = Tokenizer.from_dir(save(tmp_path, Backend.from_str(json.dumps(data))))
    assert made.encode("＜s＞<s>") == [0, 1, 2, 0, 1, 2]
    assert made.encode("<s>", parse_special=True) == [3]


def test_plain_entries_that_the_config_calls_special_are_special(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    made = Tokenizer.from_dir(save(tmp_path, backend, {"eos_token": "<end>", "pad_token": "<pad>"}))
    assert made.special_ids == {1}
    assert made.encode("a<end>", parse_special=True) == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{}", "no tokenizer"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", '{"version": "1.0"}', "cannot be read"),
        ("tokenizer_config.json", "[]", "does not hold"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError, match="no model directory"):
        Tokenizer.from_dir(tmp_path / "absent")


def test_code_beside_a_tokenizer_is_not_run_even_if_somebody_types_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": named}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": named}))
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelLoadError, match="cannot be converted"):
        Tokenizer.from_dir(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", "[" * 5000, "nested too deeply"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "cannot be read: 'utf-8'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "'added_tokens_decoder' must"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": null}}', "must hold objects"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"0": {}}}', "must hold objects"),
        ("special_tokens_map.json", "[]", "does not hold"),
        ("generation_config.json", '{"eos_token_id": [0, "1"]}', "'eos_token_id' must be"),
        ("config.json", '{"eos_token_id": [[]]}', "'eos_token_id' must be"),
    ],
)
def test_files_that_say_what_cannot_be_meant_are_told_in_one_line(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    save(tmp_path, Backend(models.WordLevel({"a": 0}, unk_token="a")))
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=words) as caught:
        Tokenizer.from_dir(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["1", "[null]", "[{}]", '{"default": 1}', '[{"name": "a"}]'])
def test_templates_that_are_no_text_are_told_in_one_line(tmp_path: Path, given: str) -> None:
    save(tmp_path, Backend(models.WordLevel({"a": 0}, unk_token="a")))
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {given}}}')
    with pytest.raises(ModelLoadError, match="'chat_template' must be text, or templates by name"):
        ChatTemplate.from_dir(tmp_path, Tokenizer.from_dir(tmp_path))


def test_a_decoder_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelLoadError, match="CTC"):
        Tokenizer.from_dir(save(tmp_path, backend))


def test_the_text_layer_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.text.output, engine.text.template;"
        "heavy = {'torch', 'transformers', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
