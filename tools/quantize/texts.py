"""Texts as windows of tokens, for calibration and for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import RequestError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tools.json_lines import numbered_lines
from tools.quantize.recipe import QuantizeError

_MAX_CHARS_PER_TOKEN = 16  # per token, on average: limits how much of a long text is read


class Windows(NamedTuple):
    """Windows of one length, all int64."""

    calibration: torch.Tensor  # [n, window]
    held_out: torch.Tensor  # [m, window], not used for calibration


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Read a file of texts.

    JSON lines have ``messages`` (and ``tools``) or ``text``; any other file is one text.

    Raises:
        QuantizeError: a line is neither; names the line.
        OSError: it cannot be read.
    """
    text = read_text(path)
    if path.suffix != ".jsonl":
        return [{"text": text}]
    found: list[dict[str, Any]] = []
    for number, line in numbered_lines(text):
        try:
            entry = json.loads(line)
        except ValueError:
            raise QuantizeError(f"{path}: line {number} is not JSON") from None
        if not isinstance(entry, dict) or not (
            isinstance(entry.get("text"), str) or isinstance(entry.get("messages"), list)
        ):
            raise QuantizeError(f"{path}: line {number} has neither 'messages' nor 'text'")
        found.append(entry)
    return found


def read_text(path: Path) -> str:
    """Read a text file. Raises QuantizeError if it is not UTF-8, and OSError."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise QuantizeError(f"{path}: is not UTF-8 text") from None


def make_windows(
    model: Path,
    texts: Iterable[dict[str, Any]],
    *,
    window: int,
    num_windows: int,
    num_held_out: int,
) -> Windows:
    """Concatenate texts in the model's own tokens, and cut them into windows.

    Args:
        model: the directory of the tokenizer and the chat template that renders messages; without a
            template, their contents are used.
        texts: as ``read_texts`` returns them. Only as many as needed are read.
        window: tokens per window.
        num_windows: the number of windows for calibration.
        num_held_out: the number of windows for evaluation, taken from the end. If the text is too
            short for both, a quarter of it.

    Raises:
        QuantizeError: the texts do not fill a window for each purpose, or one cannot be rendered.
        ModelLoadError: there is no tokenizer.
    """
    tokenizer = Tokenizer.from_dir(model)
    template = ChatTemplate.from_dir(model, tokenizer)
    wanted = (num_windows + num_held_out) * window
    tokens: list[int] = []
    try:
        for number, text in enumerate(texts, 1):
            try:
                tokens += _encode(tokenizer, template, text, wanted * _MAX_CHARS_PER_TOKEN)
            except RequestError as error:
                raise QuantizeError(f"calibration text {number}: {error}") from None
            if len(tokens) >= wanted:
                break
    finally:
        template.close()
    count = min(len(tokens), wanted) // window
    if count < (2 if num_held_out else 1):
        needed = f"two windows of {window}" if num_held_out else f"a window of {window}"
        raise QuantizeError(f"the calibration text has {len(tokens)} tokens: it must fill {needed}")
    held_out = min(num_held_out, max(1, count // 4, count - num_windows))
    cut = torch.tensor(tokens[: count * window], dtype=torch.int64).view(count, window)
    return Windows(cut[: count - held_out], cut[count - held_out :])


def _encode(
    tokenizer: Tokenizer, template: ChatTemplate, text: dict[str, Any], limit: int
) -> list[int]:
    messages = text.get("messages")
    if messages is None:
        return tokenizer.encode(text["text"][:limit], parse_special=True)
    if template.templates:
        return template.encode_chat_sync(
            messages, tools=text.get("tools"), add_generation_prompt=False
        )
    contents = [str(message.get("content") or "") for message in messages]
    return tokenizer.encode("\n".join(contents) + "\n")
