"""``quire chat`` and ``quire complete``: talk to a running server from a terminal or a pipe."""

from __future__ import annotations

import argparse
import base64
import contextlib
import mimetypes
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from server.cli.http_client import ApiClient, ServerError

_COMMANDS = """\
/reset           forget the conversation, keep the system prompt
/image FILE      show an image with the next message
/system [TEXT]   set the system prompt and forget the conversation; alone, show it
/help            this list
/quit            leave (so does Ctrl-D; Ctrl-C stops an answer)"""

# C0 and C1 control characters except newline and tab: a model's text must not control the terminal.
_CONTROLS = dict.fromkeys(c for c in (*range(32), *range(127, 160)) if c not in (9, 10))
_FAINT, _NORMAL = "\x1b[2m", "\x1b[0m"


def chat_main(argv: Sequence[str]) -> int:
    """Hold a conversation. Returns the exit status."""
    parser = _parser(
        "chat",
        "Chat with a model on a running server. With MESSAGE, print one answer. Otherwise start a "
        "conversation with one message per line, typed or piped in.",
    )
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="send this message only")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="attach an image to the first message; repeatable",
    )
    options = parser.parse_args(argv)
    try:
        client = ApiClient(options.url, options.api_key)
        model = options.model or client.first_model()
        chat = Conversation(client, model, _sampling(options), options.system_prompt)
        for file in options.image:
            chat.attach_image(file)
        if options.message is not None:
            _print_stream(chat.send(options.message))
            return 0
        if sys.stdin.isatty():
            return _chat_loop(chat)
        for line in sys.stdin:
            if line.strip():
                _print_stream(chat.send(line.strip()))
        return 0
    except ServerError as problem:
        print(f"quire: {problem}", file=sys.stderr)
        return 1


def complete_main(argv: Sequence[str]) -> int:
    """Continue one text. Returns the exit status."""
    parser = _parser("complete", "Complete a text with a running server.")
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the text; standard input if left out"
    )
    parser.add_argument(
        "--echo", action="store_true", help="print the prompt before the completion"
    )
    options = parser.parse_args(argv)
    if options.prompt is None and sys.stdin.isatty():
        parser.error("give a PROMPT, or pipe one in")
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    try:
        client = ApiClient(options.url, options.api_key)
        model = options.model or client.first_model()
        body = {"model": model, "prompt": prompt, **_sampling(options)}
        if options.echo:
            _write(prompt)
        chunks = client.stream("/v1/completions", body)
        _print_stream(Piece(c["choices"][0]["text"]) for c in chunks if c.get("choices"))
        return 0
    except ServerError as problem:
        print(f"quire: {problem}", file=sys.stderr)
        return 1


class Piece(NamedTuple):
    """A part of an answer as it arrives."""

    text: str
    is_reasoning: bool = False


class Conversation:
    """A chat with its history, to which only finished or manually stopped answers are added."""

    def __init__(
        self, client: ApiClient, model: str, sampling: dict[str, Any], system: str | None = None
    ) -> None:
        self.model = model
        self.system = system
        self._client = client
        self._sampling = sampling
        self._turns: list[dict[str, Any]] = []
        self._images: list[str] = []  # data: URLs to send with the next message

    def reset(self) -> None:
        """Forget all turns but keep the system prompt."""
        self._turns.clear()
        self._images.clear()

    def attach_image(self, file: str) -> None:
        """Attach the image in ``file`` to the next message. Raises ServerError."""
        kind = mimetypes.guess_type(file)[0] or ""
        if not kind.startswith("image/"):
            raise ServerError(f"{file}: not an image, by its name")
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise ServerError(f"{file}: {error.strerror}") from None
        self._images.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")

    def send(self, message: str) -> Generator[Piece, None, None]:
        """Send ``message`` with the history and yield the pieces of the answer.

        Reasoning is yielded too, but does not become part of the history.

        Raises:
            ServerError: the turn failed; the conversation is unchanged.
        """
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
        content = [*shown, {"type": "text", "text": message}] if shown else message
        turns = [*self._turns, {"role": "user", "content": content}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + turns, **self._sampling}
        pieces: list[str] = []
        try:
            with contextlib.closing(self._client.stream("/v1/chat/completions", body)) as chunks:
                for chunk in chunks:
                    for choice in chunk.get("choices", ()):
                        delta = choice.get("delta", {})
                        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                            yield Piece(thought, is_reasoning=True)
                        if text := delta.get("content"):
                            pieces.append(text)
                            yield Piece(text)
        except ServerError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self._images = []
                self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]


def _chat_loop(chat: Conversation) -> int:
    """The loop at a terminal: read a command or a message, print the answer."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() line editing and history)

    print(f"Talking to {chat.model}. /help lists the commands.")
    while True:
        try:
            line = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not line:
            continue
        if line.startswith("/"):
            if _command(chat, line):
                return 0
            continue
        try:
            with contextlib.closing(chat.send(line)) as pieces:
                _print_stream(pieces)
        except KeyboardInterrupt:  # closing the generator has aborted the request on the server
            print(" [stopped]")
        except ServerError as problem:
            print(f"quire: {problem}", file=sys.stderr)


def _command(chat: Conversation, line: str) -> bool:
    """Run one /command. Returns whether to leave."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return True
        case "/reset":
            chat.reset()
            print("Started a new conversation.")
        case "/image":
            try:
                chat.attach_image(rest.strip())
            except ServerError as problem:
                print(f"quire: {problem}", file=sys.stderr)
        case "/system":
            if rest.strip():
                chat.system = rest.strip()
                chat.reset()
            print(f"System prompt: {chat.system or '(none)'}")
        case "/help":
            print(_COMMANDS)
        case _:
            print(f"There is no command {name}.\n{_COMMANDS}")
    return False


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"quire {command}", description=description, allow_abbrev=False
    )
    environ = os.environ
    parser.add_argument(
        "--url",
        default=environ.get("QUIRE_URL") or "http://127.0.0.1:8000",
        help="server address (QUIRE_URL; default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=environ.get("QUIRE_API_KEY", "").split(",")[0] or None,
        help="API key (QUIRE_API_KEY)",
    )
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="model to use (default: the first listed)"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="most tokens in an answer")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="sampling temperature; 0 is greedy"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=float, help="nucleus sampling: probability mass to keep"
    )
    parser.add_argument("--seed", metavar="N", type=int, help="seed, to make sampling repeatable")
    return parser


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _print_stream(pieces: Iterable[Piece]) -> None:
    """Print an answer; its reasoning is faint at a terminal, and left out elsewhere."""
    is_terminal, faint = sys.stdout.isatty(), False
    try:
        for piece in pieces:
            if piece.is_reasoning and not is_terminal:
                continue
            if piece.is_reasoning != faint:
                sys.stdout.write(_FAINT if piece.is_reasoning else f"{_NORMAL}\n\n")
                faint = piece.is_reasoning
            _write(piece.text)
    finally:
        if faint:
            sys.stdout.write(_NORMAL)
    _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
