"""Answers in channels, as gpt-oss and Muse Glimmer write them.

OpenAI's harmony format:

    <|channel|>analysis<|message|>The user wants ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>Hello!<|return|>

An answer is a list of messages, each with a header. A message on ``analysis`` is reasoning, one to
a function is a tool call, and all others are content. The recipient may also precede the channel.
See https://cookbook.openai.com/articles/openai-harmony.

Muse Glimmer's messages have no channels. What it writes to itself is reasoning:

     to=self<|message|>The user wants ...<|eom|>
    <|start|>assistant to=user<|message|>Hello!<|eot|>
"""

from __future__ import annotations

import re
from typing import NamedTuple

from server.text import json_calls
from server.text.calls import ToolCallEmitter
from server.text.source import Malformed, Read, Source, Unfinished

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HEADER_STARTS = (START, CHANNEL)  # start of a header

# What a grammar produces: between messages, and before content and a call's arguments.
NEXT_MESSAGE = f"{START}assistant"
REASONING = f"{CHANNEL}analysis{MESSAGE}"
CONTENT = f"{CHANNEL}final{MESSAGE}"
CALL_HEAD = f"{CHANNEL}commentary to=functions.{{}} {CONSTRAIN}json{MESSAGE}"

EOM, EOT = "<|eom|>", "<|eot|>"  # ends of Muse's messages, and of its turns


class Channels(NamedTuple):
    """A format of answers in channels; all but the first are what a grammar produces."""

    markers: tuple[str, ...]  # all of its marks
    reasoning: str  # the head of a message that is reasoning
    end: str  # of such a message
    content: str  # the head of one to the user


HARMONY = Channels(MARKERS, REASONING, END, CONTENT)
MUSE = Channels((START, MESSAGE, EOM, EOT), f" to=self{MESSAGE}", EOM, f" to=user{MESSAGE}")

_MAX_HEADER = 512  # characters
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."


class Header(NamedTuple):
    """The header of a message."""

    channel: str = "final"
    recipient: str = ""  # "": the user

    @property
    def function(self) -> str | None:
        """The function that is called, if any."""
        name = self.recipient.removeprefix(_FUNCTIONS)
        return name if name != self.recipient else None

    @property
    def is_reasoning(self) -> bool:
        """Whether the message is not part of the answer: reasoning, or for a built-in tool."""
        return self.channel == "analysis" or bool(self.recipient and self.function is None)


NO_HEADER = Header()  # of text without a header


def read_header(source: Source) -> Read[Header | None]:
    """Read the next header; ``NO_HEADER`` if there is none, None if the text ends inside it."""
    begin, kept = source.position, source.checkpoint
    source.checkpoint = begin if kept is None else kept
    try:
        yield from source.read_space()
        for mark in (*HEADER_STARTS, "to="):
            if (yield from source.accept(mark)):
                yield from source.read_until(MESSAGE, limit=_MAX_HEADER)
                return _parse(source.since(begin))
    except Unfinished:
        source.skip_rest()
        return None
    except Malformed:
        pass
    finally:
        source.checkpoint = kept
    source.position = begin
    return NO_HEADER


def read_call(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read a message to a function, header and arguments."""
    header = yield from read_header(source)
    if header is None or header.function is None:
        raise Malformed
    yield from source.read_space()
    if (yield from source.peek_char()) != "{":
        raise Malformed
    calls.begin(header.function)
    yield from json_calls.stream_object(source, calls)
    calls.end()


def _parse(text: str) -> Header:
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    to = recipient[1] if recipient else ""
    return Header(channel[1] if channel else "final", "" if to == "user" else to)
