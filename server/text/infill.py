"""Fill-in-the-middle prompts, for models trained to write between two texts.

Such models have three special tokens; each family orders the two texts around them differently:

    Qwen, CodeGemma, StarCoder   <prefix> before <suffix> after <middle>
    DeepSeek                     <begin>  before <hole>   after <end>
    Codestral                    <suffix> after  <prefix> before

(Bavarian et al. 2022, "Efficient training of language models to fill in the middle".) The families
are rows of a table; a model belongs to the one whose tokens its vocabulary has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.tokenizer import Tokenizer


class Family(NamedTuple):
    """The format of one family, with ``{before}`` and ``{after}`` for the texts."""

    layout: tuple[str, ...]
    ends: tuple[str, ...] = ()  # stop tokens of the middle, besides the model's own


_BEFORE, _AFTER = "{before}", "{after}"

FAMILIES: tuple[Family, ...] = (
    Family(  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
        ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _AFTER, "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    Family(  # StarCoder, StarCoder2, Granite Code
        ("<fim_prefix>", _BEFORE, "<fim_suffix>", _AFTER, "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    Family(  # SantaCoder
        ("<fim-prefix>", _BEFORE, "<fim-suffix>", _AFTER, "<fim-middle>"),
        ("<|endoftext|>", "<fim-pad>"),
    ),
    Family(  # Code Llama
        ("▁<PRE>", _BEFORE, "▁<SUF>", _AFTER, "▁<MID>"),
        ("▁<EOT>",),
    ),
    Family(  # DeepSeek-Coder, DeepSeek-V2 and V3
        ("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _AFTER, "<｜fim▁end｜>"),
    ),
    Family(  # Codestral, Mistral Small
        ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),
    ),
)


class Infill:
    """The infill format of one tokenizer's model."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        """Use ``family``, all of whose tokens must be in the vocabulary."""
        self._tokenizer = tokenizer
        self._layout = family.layout
        self._ids = {text: tokenizer.token_id(text) for text in family.layout}
        ends = (tokenizer.token_id(text) for text in family.ends)
        # Some models continue with the next file after the middle.
        self.stop_token_ids = tuple(id_ for id_ in ends if id_ is not None)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """The format of the tokenizer's model; None if it has none."""
        for family in FAMILIES:
            marks = [text for text in family.layout if text not in (_BEFORE, _AFTER)]
            if all(tokenizer.token_id(text) is not None for text in marks):
                return cls(tokenizer, family)
        return None

    def encode(self, before: str | Sequence[int], after: str) -> list[int]:
        """The prompt's token ids: the usual prefix of any text (bos), then the family's layout.

        Args:
            before: the text, or its token ids.
            after: the text that follows the middle.
        """
        tokenizer = self._tokenizer
        ids = tokenizer.encode("")
        for item in self._layout:
            mark = self._ids[item]
            if item == _BEFORE:
                is_text = isinstance(before, str)
                ids += tokenizer.encode(before, add_special_tokens=False) if is_text else before
            elif item == _AFTER:
                ids += _encode_after(tokenizer, after)
            elif mark is not None:
                ids.append(mark)
        return ids


def _encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a continuation, without the space that some vocabularies prepend."""
    if not tokenizer.rules.max_lead:
        return tokenizer.encode(text, add_special_tokens=False)
    lead = tokenizer.encode("☺", add_special_tokens=False)
    ids = tokenizer.encode("☺" + text, add_special_tokens=False)
    if ids[: len(lead)] == lead:
        return ids[len(lead) :]
    return tokenizer.encode(text, add_special_tokens=False)
