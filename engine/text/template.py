"""Chat templates: convert messages to prompt text and token ids.

A template is code that comes with a model, so it runs in a killable process (see
``template_worker``). The spelling of a special token inside a message stays plain text, while those
in the template itself become special tokens: see :meth:`ChatTemplate.encode_chat`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from engine.errors import InvalidParameter, ModelLoadError, TemplateError
from engine.gguf.file import find_gguf, read_gguf
from engine.text import tekken_file
from engine.text.system_messages import SystemPlaces, find_places, place_system_messages
from engine.text.template_process import RenderProcess, TemplateUnanswered
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import read_json, read_named_templates

RENDER_LIMIT_S = 1.5

_OWN_TEMPLATES = {  # by model_type
    path.stem: path for path in Path(__file__).with_name("templates").glob("*.jinja")
}
_PROBE = "Zephyrine"  # a word that no template contains

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_RESERVED |= {"chat_template", "tokenize", "raise_exception", "strftime_now"}

Message = Mapping[str, Any]
_Result = TypeVar("_Result")


class TemplateOptions(TypedDict, total=False):
    """Rendering options, named as in transformers' ``apply_chat_template``."""

    tools: Sequence[Mapping[str, Any]] | None  # function descriptions shown to the model
    add_generation_prompt: bool  # end with the beginning of the assistant's turn; default: true
    continue_final_message: bool  # leave the last message open for the model to continue
    template_kwargs: Mapping[str, Any] | None  # further variables for the template
    name: str | None  # of the template; None: see ``ChatTemplate``


class ChatTemplate:
    """A model's chat template, bound to its tokenizer."""

    def __init__(
        self, templates: Mapping[str, str], tokenizer: Tokenizer, *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        """Bind template sources by name: ``tool_use`` for requests with tools, else ``default``."""
        self.templates = dict(templates)
        self._tokenizer = tokenizer
        self._process = RenderProcess(self.templates, limit_s=limit_s)
        # One thread: the process renders one at a time anyway, so more threads would only wait.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._requires_parts: dict[str, bool] = {}  # by template, once known
        self._system_places: dict[str, SystemPlaces] = {}  # by template, once needed

    @classmethod
    def from_dir(
        cls, path: str | Path, tokenizer: Tokenizer, override: str | None = None
    ) -> ChatTemplate:
        """The template of a model directory; without one, rendering fails.

        Args:
            path: a model directory, in which ``chat_template.jinja`` (and
                ``additional_chat_templates/``) and the key in ``tokenizer_config.json``, in its
                plain and its named form, are looked up, and without any the templates that come
                with us for some kinds of models; or a GGUF file.
            tokenizer: the model's.
            override: source or file path of a template to use instead.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        if override is not None:
            inline = "{" in override or "\n" in override
            return cls.from_source(override if inline else _read(Path(override)), tokenizer)
        gguf = find_gguf(path)
        if gguf is None:
            return cls(_find_templates(Path(path)), tokenizer)
        from engine.gguf.tokenizer import chat_templates  # few models are GGUF files

        return cls(chat_templates(read_gguf(gguf)), tokenizer)

    @classmethod
    def from_source(
        cls, source: str, tokenizer: Tokenizer, *, limit_s: float = RENDER_LIMIT_S
    ) -> ChatTemplate:
        """Make a template from jinja2 source."""
        return cls({"default": source}, tokenizer, limit_s=limit_s)

    @property
    def source(self) -> str | None:
        """The source used for requests with tools; None without a template."""
        return next(
            (self.templates[name] for name in ("tool_use", "default") if name in self.templates),
            next(iter(self.templates.values()), None),
        )

    def start(self) -> None:
        """Start the rendering process before the first request; does not wait for it."""
        if self.templates:
            self._process.start()

    async def check(self) -> None:
        """Compile all templates, so that errors are found before one is needed.

        Raises:
            TemplateError: a template cannot be compiled.
        """
        for name in self.templates:
            await self._run_in_executor(partial(self._process.check, name))

    def close(self) -> None:
        """End the rendering process. Idempotent."""
        self._executor.shutdown(cancel_futures=True)
        self._process.close()

    async def in_thread(self, call: Callable[[], _Result]) -> _Result:
        """Run a call of the blocking methods where it keeps no other waiting than they do."""
        return await self._run_in_executor(call)

    # ------------------------------------------------------------ text

    async def render(self, messages: Sequence[Message], **options: Unpack[TemplateOptions]) -> str:
        """The prompt text of a conversation; ``messages`` are in the API's format.

        Raises:
            TemplateError: the template raised an error (with its message), failed or was killed.
            InvalidParameter: a variable's name is reserved, or a text contains a lone surrogate.
        """
        return await self._run_in_executor(partial(self.render_sync, messages, **options))

    def render_sync(self, messages: Sequence[Message], **options: Unpack[TemplateOptions]) -> str:
        """Same as ``render``, for callers without an event loop; blocks."""
        if not self.templates:
            raise TemplateError(
                "this model has no chat template; use completions, or start with a chat template"
            )
        tools = options.get("tools")
        continue_final = options.get("continue_final_message", False)
        context = self._variables(options.get("template_kwargs") or {})
        name = options.get("name") or self._choose(tools)
        if name not in self.templates:
            raise TemplateError(f"this model has no chat template named {name[:80]!r}")
        if any(message.get("role") == "system" for message in messages):
            messages = place_system_messages(messages, self._find_system_places(name))
        if self._requires_content_parts(name):
            messages = [_as_content_parts(message) for message in messages]
        context["messages"] = list(messages)
        context["tools"] = list(tools) if tools else None
        context["documents"] = None
        context["add_generation_prompt"] = (
            options.get("add_generation_prompt", True) and not continue_final
        )
        mark = ""
        if continue_final:
            mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(8))
            context["messages"][-1:] = [_append_mark(message, mark) for message in messages[-1:]]
        try:
            text = self._process.render(name, context)
        except UnicodeEncodeError:
            raise _surrogate_error(messages) from None
        return _truncate_at(text, mark) if mark else text

    # ------------------------------------------------------------ token ids

    async def encode_chat(
        self,
        messages: Sequence[Message],
        rewrite: Callable[[str], str] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """The prompt's token ids, with the arguments and errors of ``render``.

        ``rewrite`` is applied to the rendered text. Special tokens come from the template itself,
        bos included; none are added. Strings from the request are guarded (``Tokenizer.guard``)
        before rendering, so spellings of special tokens in them are plain text in the prompt.
        """
        return await self._run_in_executor(
            partial(self.encode_chat_sync, messages, rewrite, **options)
        )

    def encode_chat_sync(
        self,
        messages: Sequence[Message],
        rewrite: Callable[[str], str] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]:
        """Same as ``encode_chat``, for callers without an event loop; blocks."""
        guard = self._tokenizer.guard
        messages = [
            _map_strings(message, guard, f"messages.{index}")
            for index, message in enumerate(messages)
        ]
        options["tools"] = _map_strings(options.get("tools"), guard, "tools")
        options["template_kwargs"] = _map_strings(
            options.get("template_kwargs"), guard, "chat_template_kwargs"
        )
        text = self.render_sync(messages, **options)
        if rewrite is not None:
            text = rewrite(text)
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    # ------------------------------------------------------------ private

    async def _run_in_executor(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _requires_content_parts(self, name: str) -> bool:
        """Whether a template shows text only if the content is a list of parts.

        So do the templates of some models that take images, such as LLaVA.
        """
        if name not in self._requires_parts:
            plain = {"role": "user", "content": _PROBE}
            parts = _as_content_parts(plain)
            self._requires_parts[name] = not self._shows(name, [plain], [_PROBE]) and self._shows(
                name, [parts], [_PROBE]
            )
        return self._requires_parts[name]

    def _find_system_places(self, name: str) -> SystemPlaces:
        """Where a template shows system messages."""
        if name not in self._system_places:
            in_parts = self._requires_content_parts(name)

            def shows(messages: Sequence[Message], words: Sequence[str]) -> bool:
                sent = [_as_content_parts(each) for each in messages] if in_parts else messages
                return self._shows(name, sent, words)

            self._system_places[name] = find_places(shows)
        return self._system_places[name]

    def _shows(self, name: str, messages: Sequence[Message], words: Sequence[str]) -> bool:
        """Whether a template accepts ``messages`` and shows all of ``words`` in them.

        Raises TemplateUnanswered if that cannot be told.
        """
        context = self._variables({})
        context |= {"messages": list(messages), "tools": None, "documents": None}
        try:
            text = self._process.render(name, {**context, "add_generation_prompt": True})
        except TemplateUnanswered:
            raise
        except TemplateError:
            return False
        return all(word in text for word in words)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        names = ("tool_use", "default") if tools else ("default",)
        chosen = next((name for name in names if name in self.templates), None)
        return chosen if chosen is not None else next(iter(self.templates))

    def _variables(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = self._tokenizer.named_tokens
        for name in template_kwargs:
            if name in _RESERVED or name in named:
                raise InvalidParameter(
                    f"'chat_template_kwargs' must not hold '{name[:100]}'",
                    param="chat_template_kwargs",
                )
        return {**named, **template_kwargs}


def _find_templates(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found |= read_named_templates(root / name)
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read(path)
    path = root / "chat_template.jinja"
    found |= {"default": _read(path)} if path.is_file() else {}
    return found or tekken_file.find_template(root) or _find_own_template(root)


def _find_own_template(root: Path) -> dict[str, str]:
    """Our template of a kind of model that comes with a program instead; else none."""
    kind = read_json(root / "config.json").get("model_type")
    path = _OWN_TEMPLATES.get(kind) if isinstance(kind, str) else None
    return {} if path is None else {"default": _read(path)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the chat template {path} cannot be read: {error}") from error


def _map_strings(value: Any, change: Callable[[str], str], param: str) -> Any:
    """Apply ``change`` to every string in ``value``, keys included.

    Raises:
        InvalidParameter: ``value``, which came as ``param``, is nested too deeply.
    """
    try:
        return _mapped(value, change)
    except RecursionError:
        raise InvalidParameter(f"'{param}' is nested too deeply", param=param) from None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _as_content_parts(message: Message) -> Message:
    """The message with a plain text content turned into a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _append_mark(message: Message, mark: str) -> Message:
    """The message with ``mark`` appended to its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if isinstance(content, Sequence) and content and isinstance(content[-1].get("text"), str):
        last = {**content[-1], "text": content[-1]["text"] + mark}
        return {**message, "content": [*content[:-1], last]}
    raise InvalidParameter("the final message has no text to continue", param="messages")


def _truncate_at(text: str, mark: str) -> str:
    at = text.rfind(mark)
    if at < 0:
        raise TemplateError(
            "the chat template does not render the final message, so it cannot be continued"
        )
    return text[:at]


def _surrogate_error(messages: Sequence[Message]) -> InvalidParameter:
    for index, message in enumerate(messages):
        for key, value in message.items():
            param = f"messages.{index}.{key}"
            try:
                _map_strings(value, lambda text: text.encode().decode(), param)
            except UnicodeEncodeError:
                return InvalidParameter(
                    "the text holds a lone surrogate, which is no character", param=param
                )
    return InvalidParameter("the request holds a lone surrogate, which is no character")
