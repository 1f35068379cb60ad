"""The parts of the offline ``LLM`` (``engine/llm.py``), one concern each."""
