"""The committed model: small enough, in Hugging Face format, and right on reserved phrasings."""

import json
import subprocess
import sys

import pytest

from demo.evaluate import MODEL, evaluate, load_heldout, prompt

FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}


def test_the_folder_holds_these_files_and_at_most_20_mb() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) == FILES
    assert sum(files.values()) <= 20_000_000


def test_the_config_is_a_small_llama() -> None:
    config = _read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] % 64 == 0
    assert config["tie_word_embeddings"] is True


def test_the_weights_are_bf16_and_number_3_to_8_million() -> None:
    raw = (MODEL / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    bytes_ = sum(t["data_offsets"][1] - t["data_offsets"][0] for t in header.values())
    assert 3_000_000 <= bytes_ // 2 <= 8_000_000


def test_the_stop_tokens_agree() -> None:
    added = _read("tokenizer_config.json")["added_tokens_decoder"]
    assert added[str(_read("config.json")["eos_token_id"])]["content"] == "<|im_end|>"
    names = [added[str(i)]["content"] for i in _read("generation_config.json")["eos_token_id"]]
    assert names == ["<|im_end|>", "<|endoftext|>"]


def test_the_card_tells_the_measured_accuracy() -> None:
    record = _read("training.json")
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert f"{record['evaluation']['right']} of {record['evaluation']['total']}" in card
    assert record["evaluation"]["accuracy"] >= 0.9


def test_importing_demo_is_light() -> None:
    code = "import sys, demo, demo.evaluate; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_evaluate_counts_by_category() -> None:
    entries = load_heldout()
    wanted = {prompt(entry): entry["expected"] for entry in entries}
    perfect = evaluate(lambda prompts: [wanted[p] for p in prompts], entries)
    assert perfect["accuracy"] == 1.0
    assert perfect["failures"] == []
    none = evaluate(lambda prompts: ["" for _ in prompts], entries)
    assert none["right"] == 0
    assert len(none["failures"]) == 300


@pytest.mark.slow
def test_nine_of_ten_reserved_phrasings_are_answered_exactly() -> None:
    from demo.evaluate import transformers_answers

    result = evaluate(transformers_answers(MODEL), load_heldout())
    assert result["accuracy"] >= 0.9, result["failures"]


def _read(name: str) -> dict:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))
