"""lm-eval: log-likelihoods through local-completions, answers through local-chat-completions."""

import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent.parent / "tasks"


def main(base_url: str, model: str, tokenizer: str) -> None:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    where = f"model={model},num_concurrent=4,max_retries=1,tokenizer={tokenizer}"
    scored = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"{where},base_url={base_url}/completions,tokenizer_backend=huggingface",
        tasks=["quire_capitals_choice"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    accuracy = scored["results"]["quire_capitals_choice"]["acc,none"]
    assert accuracy == 1.0, scored["results"]

    answered = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=f"{where},base_url={base_url}/chat/completions",
        tasks=["quire_capitals_chat"],
        task_manager=manager,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    exact = answered["results"]["quire_capitals_chat"]["exact_match,none"]
    assert exact == 1.0, answered["results"]


if __name__ == "__main__":
    main(*sys.argv[1:])
