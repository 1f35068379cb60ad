"""Embeddings and scores: find the text that is closest to a question."""

import sys

from engine import LLM

QUESTION = "What is the capital of France?"
TEXTS = ["Paris is the capital of France.", "Bread is made of flour.", "The sun is a star."]

with LLM(*sys.argv[1:]) as llm:
    result = llm.embed(QUESTION)[0]
    print(f"{len(result.embedding)} numbers for {len(result.prompt_token_ids)} tokens")
    scores = llm.score(QUESTION, TEXTS)
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:6.3f}  {text}")
