"""Token ids of what is pooled or scored: texts and pairs, behind a prompt or within a template.

Models of sentence-transformers that read messages get a text as the user's, a pair as those of the
roles ``query`` and ``document``, and a prompt as the system's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import ContextLengthExceeded
from engine.pooling import MessageFormat, PoolingInfo
from engine.text.template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer
from engine.text.truncation import EncodedPair, encode_pairs, encode_texts

_MAX_CHARS_PER_TOKEN = 128  # of texts; tokens of more are few, and no text consists of them


class PooledTexts(NamedTuple):
    """What texts are encoded with."""

    tokenizer: Tokenizer
    template: ChatTemplate
    pooling: PoolingInfo

    def encode(
        self,
        texts: Sequence[str],
        limit: int | None,
        *,
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Return the token ids of each text, at most ``limit`` tokens: the text's end is dropped.

        Blocks while the template is rendered, if the model has one for texts.

        Raises:
            ContextLengthExceeded: ``limit`` leaves no token to a text within the template.
            InvalidParameter: a text cannot be encoded.
            TemplateError: the template refused a text.
        """
        messages = self.pooling.messages
        if messages is None:
            texts = [self.pooling.as_read(text, prompt) for text in texts]
            return encode_texts(self.tokenizer, texts, limit, add_special_tokens=add_special_tokens)
        read = self.pooling.as_read
        return [
            self._render(messages, [*_system(prompt), ("user", read(text))], limit)
            for text in texts
        ]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None, *, prompt: str = ""
    ) -> list[EncodedPair]:
        """Return each pair as one prompt of at most ``limit`` tokens.

        The second text is cut first, and within a template it alone. Raises as ``encode`` does.
        """
        messages, read = self.pooling.messages, self.pooling.as_read
        if messages is None:
            return encode_pairs(
                self.tokenizer, [(read(a, prompt), read(b)) for a, b in pairs], limit
            )
        return [
            EncodedPair(
                self._render(
                    messages,
                    [*_system(prompt), ("query", read(first)), ("document", read(second))],
                    limit,
                ),
                None,
            )
            for first, second in pairs
        ]

    def _render(
        self, form: MessageFormat, said: Sequence[tuple[str, str]], limit: int | None
    ) -> list[int]:
        """Return the token ids of messages, the last of which is cut to fit."""

        def encode(last: str) -> list[int]:
            texts = [*said[:-1], (said[-1][0], last)]
            return self.template.encode_chat_sync(
                [_message(role, text, form) for role, text in texts],
                add_generation_prompt=form.add_generation_prompt,
                name=form.template,
            )

        last = said[-1][1]
        if limit is not None:  # what is behind so many characters is cut in any case
            last = last[: limit * _MAX_CHARS_PER_TOKEN]
        ids = encode(last)
        if limit is None or len(ids) <= limit:
            return ids
        bare = self.tokenizer.encode(last, add_special_tokens=False)
        kept = len(bare)
        while len(ids) > limit:
            kept -= len(ids) - limit
            if kept < 1:
                raise ContextLengthExceeded(
                    f"{limit} tokens leave none to a text beside the model's template and the "
                    "texts before it",
                    param="truncate_prompt_tokens",
                )
            # Part of a character may be left at the end.
            ids = encode(self.tokenizer.decode(bare[:kept]).rstrip("\N{REPLACEMENT CHARACTER}"))
        return ids


def _system(prompt: str) -> list[tuple[str, str]]:
    return [("system", prompt)] if prompt else []


def _message(role: str, text: str, form: MessageFormat) -> Message:
    content: Any = [{"type": "text", "text": text}] if form.content_parts else text
    return {"role": role, "content": content}
