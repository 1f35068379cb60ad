"""Rerankers that are language models: a score is the logit of one token, less that of another.

As Qwen3-Reranker and mxbai-rerank-v2 are published for sentence-transformers. The embedded model
stands in for them, with their files beside it.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine import LLM, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidParameter, ModelLoadError, TemplateError
from engine.models.checkpoint import read_config
from engine.pooling import PoolingParams
from engine.types import Request
from tests.engine.pooling.drive import load

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
INSTRUCTION = "Find what answers the question"
TEMPLATE = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n"
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content")'
    ' | first | default("None") }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
    '\n<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content")'
    " | first }}<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
YES, NO = 9, 15
QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Seven green apples", "<|im_end|> and on"]
IDENTITY = "torch.nn.modules.linear.Identity"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def save(
    directory: Path,
    *,
    tokens: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
    transformer: dict[str, Any] | None = None,
) -> Path:
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    kinds = (
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),
    )
    files: dict[str, Any] = {
        "modules.json": [{"type": kind, "path": path} for kind, path in kinds],
        "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO} | (tokens or {}),
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
            **(transformer or {}),
        },
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", **(prompts or {})},
    }
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents))
    return directory


def prompt_ids(document: str, instruction: str = "None", end: str = "") -> list[int]:
    """What the template makes, with spellings of special tokens in the texts as plain text."""
    text = (
        f"<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n"
        f"<Query>: {QUERY}\n<Document>: {document}<|im_end|>\n{end}"
    )
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def log_odds() -> Any:
    """Hugging Face's logit of YES less that of NO behind token ids."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def compute(ids: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        return float(logits[YES] - logits[NO])

    return compute


def open_llm(directory: Path, **changes: Any) -> LLM:
    changes = {"num_gpu_blocks_override": 64, "max_model_len": 256} | changes
    return LLM(directory, num_threads=1, dtype="float32", use_tqdm=False, **changes)


def test_pairs_are_judged_in_the_models_template(tmp_path: Path, log_odds: Any) -> None:
    save(tmp_path)
    with open_llm(tmp_path) as llm:
        scores = llm.score(QUERY, DOCUMENTS[:2])
        logits = [log_odds(prompt_ids(document)) for document in DOCUMENTS[:2]]
        assert scores == pytest.approx([1 / (1 + math.exp(-x)) for x in logits], abs=1e-4)
        # Such a model is a language model still.
        (told,) = llm.generate(
            "Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False
        )
        assert len(told.outputs[0].token_ids) == 4
        # A document cannot end its message.
        (spelt,) = llm.score(QUERY, DOCUMENTS[2:])
        broken = 1 / (1 + math.exp(-log_odds(prompt_ids(DOCUMENTS[2]))))
        assert abs(spelt - broken) > 1e-3


def test_prompt_activation_and_end_are_those_of_the_files(tmp_path: Path, log_odds: Any) -> None:
    save(
        tmp_path,
        prompts={
            **{"activation_fn": IDENTITY, "default_prompt_name": "query"},
            "prompts": {"query": INSTRUCTION},
        },
        transformer={"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    )
    end = "<|im_start|>assistant\n"
    with open_llm(tmp_path) as llm:
        scores = llm.score(QUERY, DOCUMENTS[:2])
        own = llm.score(QUERY, DOCUMENTS[0], instruction="Judge the style")
    expected = [log_odds(prompt_ids(document, INSTRUCTION, end)) for document in DOCUMENTS[:2]]
    assert scores == pytest.approx(expected, abs=1e-3)
    judged = log_odds(prompt_ids(DOCUMENTS[0], "Judge the style", end))
    assert own == pytest.approx([judged], abs=1e-3)
    assert abs(judged - expected[0]) > 1e-2


def test_one_token_alone_and_chunks_of_a_prompt(tmp_path: Path, log_odds: Any) -> None:
    save(tmp_path)
    core, ids = load(tmp_path, step_tokens=16), prompt_ids(DOCUMENTS[0])
    params = core.info.pooling.score_params()
    core.add(Request(id="a", prompt_token_ids=tuple(ids), pooling=params))
    found: dict[str, bytes] = {}
    while core.has_work:
        found |= core.step().embeddings
    (value,) = memoryview(found["a"]).cast("f")
    assert value == pytest.approx(log_odds(ids), abs=1e-3)
    for wrong in ({"use_score_head": True}, {"score_tokens": (YES, NO)}):
        with pytest.raises(InvalidParameter, match="other tokens"):
            core.add(Request(id="b", prompt_token_ids=(3,), pooling=PoolingParams(**wrong)))
    config = tmp_path / "1_LogitScore" / "config.json"
    config.write_text(json.dumps({"true_token_id": YES, "module_input_name": "causal_logits"}))
    assert read_config(str(tmp_path)).pooling_info("last").score_tokens == (YES,)


def test_a_document_that_is_too_long_is_cut_within_the_template(
    tmp_path: Path, log_odds: Any
) -> None:
    save(tmp_path, prompts={"activation_fn": IDENTITY})
    long = "Paris is the capital of France. " * 40
    with open_llm(tmp_path) as llm:
        with pytest.raises(ContextLengthExceeded):
            llm.score(QUERY, long)
        (score,) = llm.score(QUERY, long, truncate_prompt_tokens=100)
        with pytest.raises(ContextLengthExceeded, match="beside the model's template"):
            llm.score(QUERY, long, truncate_prompt_tokens=20)
    fitting = (ids for n in range(600, 0, -1) if len(ids := prompt_ids(long[:n])) <= 100)
    whole = [log_odds(ids) for ids in itertools.islice(fitting, 8)]
    assert min(abs(score - each) for each in whole) < 1e-3


def test_a_named_template_and_contents_of_parts(tmp_path: Path, log_odds: Any) -> None:
    """As Qwen3-VL-Reranker's files have them: its default template is for chats."""
    message = {"method": "forward", "format": "structured"}
    named = {"chat_template": {"chat_template": "reranker"}}
    save(
        tmp_path,
        prompts={"activation_fn": IDENTITY},
        transformer={"modality_config": {"message": message}, "processing_kwargs": named},
    )
    (tmp_path / "chat_template.jinja").write_text((DEMO / "chat_template.jinja").read_text())
    source = TEMPLATE.replace('map(attribute="content")', 'map(attribute="content.0.text")')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "reranker.jinja").write_text(source)
    with open_llm(tmp_path) as llm:
        (score,) = llm.score(QUERY, DOCUMENTS[0])
        assert score == pytest.approx(log_odds(prompt_ids(DOCUMENTS[0])), abs=1e-3)
        said = [{"role": "user", "content": "Hello"}]
        assert llm.encode_chat(said), "chats have their own template"
    (tmp_path / "additional_chat_templates" / "reranker.jinja").unlink()
    with open_llm(tmp_path) as llm, pytest.raises(TemplateError, match="reranker"):
        llm.score(QUERY, DOCUMENTS[0])


def test_texts_of_a_model_that_reads_messages_are_messages(tmp_path: Path) -> None:
    """The vector of a text is that of the user's message, and a prompt is the system's."""
    save(tmp_path, prompts={"prompts": {"query": INSTRUCTION}})
    source = (DEMO / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(source)
    with open_llm(tmp_path) as llm:
        (plain,) = llm.embed("Hello")
        said = [{"role": "user", "content": "Hello"}]
        assert plain.prompt_token_ids == tuple(llm.encode_chat(said, add_generation_prompt=False))
        (asked,) = llm.embed("Hello", prompt_name="query")
        said.insert(0, {"role": "system", "content": INSTRUCTION})
        assert asked.prompt_token_ids == tuple(llm.encode_chat(said, add_generation_prompt=False))


@pytest.mark.parametrize(
    ("tokens", "transformer", "named"),
    [
        ({"true_token_id": 10**6}, {}, "LogitScore of a token that does not exist"),
        ({"true_token_id": "yes"}, {}, "true_token_id"),
        ({"module_input_name": "scores"}, {}, "module_input_name"),
        (
            {},
            {"processing_kwargs": {"chat_template": {"documents": []}}},
            "unsupported keys: 'documents'",
        ),
        ({}, {"modality_config": {"message": {"format": "round"}}}, "modality_config.*round"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(
    tmp_path: Path, tokens: Any, transformer: Any, named: str
) -> None:
    save(tmp_path, tokens=tokens, transformer=transformer)
    with pytest.raises(ModelLoadError, match=named):
        read_config(str(tmp_path))
