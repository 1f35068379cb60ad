"""Values of settings by the names of vLLM and SGLang: what a refusal of one recommends here."""

from __future__ import annotations

_DETECTED = "auto, the default, detects the format"

TOOL_CALL_PARSERS = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": "harmony",
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "qwen3_xml",
    "minimax-m2": "minimax_m2",
}
REASONING_PARSERS = {
    "deepseek-r1": "think",
    "deepseek-v3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "gpt-oss": "harmony",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
    "qwen3": "think",
    "seed_oss": "seed",
}


def value_advice(name: str, value: object) -> str | None:
    """What to give the setting ``name`` instead of a refused ``value``; None if unknown."""
    text = str(value)
    match name:
        case "quantization":
            return "leave it out for a quantised checkpoint, whose format is detected"
        case "load_format" if text == "gguf":
            return "leave it out: a GGUF file given as MODEL is recognised"
        case "load_format" if text == "pt":
            return "bin reads such files"
        case "tool_call_parser":
            return _parser_advice(TOOL_CALL_PARSERS, text)
        case "reasoning_parser":
            return _parser_advice(REASONING_PARSERS, text)
    return None


def _parser_advice(names: dict[str, str], value: str) -> str:
    """The parser of that name elsewhere; ``auto`` finds most, so it is recommended always."""
    ours = names.get(value)
    return f"here it is {ours}, and {_DETECTED}" if ours else _DETECTED
