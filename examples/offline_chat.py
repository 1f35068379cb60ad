"""Hold a conversation in which each turn sees the previous ones."""

import sys
from typing import Any

from engine import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=60)

with LLM(*sys.argv[1:]) as llm:
    history: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for question in ("What is the capital of France?", "And of Italy?"):
        history.append({"role": "user", "content": question})
        (result,) = llm.chat(history, params)
        answer = result.outputs[0].text
        history.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")

    # Several conversations at once, and the start of an answer for the model to continue.
    questions = ["What is 2 + 3?", "What is the plural of mouse?"]
    for result in llm.chat([[{"role": "user", "content": text}] for text in questions], params):
        print(result.outputs[0].text)
    opened = [
        {"role": "user", "content": "Name a planet."},
        {"role": "assistant", "content": "The planet"},
    ]
    (result,) = llm.chat(opened, params, continue_final_message=True)
    print("The planet" + result.outputs[0].text)
