"""Conversion of a conversation's messages into the model's prompt and its images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidParameter
from engine.images.placeholders import expand_image_tokens, make_rewriter
from engine.images.read import ProcessedImage
from engine.images.types import Image
from server.errors import bad_field
from server.openai.inputs import ChatRequest, Message, TokenizeRequest
from server.state import Model, ServerState

_MAX_IMAGE_BYTES = 256 * 2**20  # of one prompt's pixels, as the model gets them


class ChatPrompt(NamedTuple):
    """A prompt in which the placeholder tokens of each image are expanded."""

    token_ids: list[int]
    images: tuple[Image, ...]


async def encode_chat(
    state: ServerState,
    model: Model,
    body: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    add_special_tokens: bool = False,
) -> ChatPrompt:
    """Render a conversation with the model's template and encode it.

    Args:
        state: the application's, which reads images.
        model: the one whose template is used.
        body: the messages, and how the prompt ends.
        tools: shown to the model, in the form templates expect.
        template_kwargs: variables of the template, which those in ``body`` override.
        add_special_tokens: prepend what the tokenizer prepends to a text.

    Raises:
        ApiError: 400, an image cannot be shown to the model.
        InvalidParameter: the template does not show the images.
        TemplateError: the template refused the messages, or timed out.
    """
    assert body.messages is not None
    continue_final = bool(body.continue_final_message)
    wanted = body.add_generation_prompt
    if continue_final and body.messages[-1].role != "assistant":
        raise bad_field("continue_final_message", "needs a last message of the assistant")
    pictures = await _read_pictures(state, model, body.messages)
    rules = model.info.images if pictures else None
    token_ids = await model.template.encode_chat(
        [message.for_template(model.answer_format) for message in body.messages],
        None if rules is None else make_rewriter(pictures, rules),
        tools=tools,
        add_generation_prompt=not continue_final if wanted is None else wanted,
        continue_final_message=continue_final,
        template_kwargs={**(template_kwargs or {}), **(body.chat_template_kwargs or {})},
    )
    if add_special_tokens:
        token_ids = model.tokenizer.encode("") + token_ids
    if rules is None:
        return ChatPrompt(token_ids, ())
    return ChatPrompt(*expand_image_tokens(token_ids, pictures, rules))


async def _read_pictures(
    state: ServerState, model: Model, messages: Sequence[Message]
) -> list[ProcessedImage]:
    """Read all messages' images in order, one by one: a disconnect leaves no work behind."""
    shown = [
        (f"messages.{index}.content", image.data)
        for index, message in enumerate(messages)
        for image in message.images.values()
    ]
    if not shown:
        return []
    rules = model.info.images
    if rules is None:
        raise bad_field(shown[0][0], "holds an image, and this model takes none here; send text")
    if len(shown) > rules.max_images:
        problem = f"holds {len(shown)} images; at most {rules.max_images} are taken"
        raise bad_field("messages", problem)
    pictures: list[ProcessedImage] = []
    room = _MAX_IMAGE_BYTES
    for number, (param, data) in enumerate(shown, 1):
        try:
            picture = await state.images.decode(data, rules)
        except InvalidParameter as error:
            problem = f"cannot be used, in image {number} of {len(shown)}: {error.message}"
            raise bad_field(param, problem) from None
        room -= picture.num_bytes
        if room < 0:
            problem = f"holds images of more than {_MAX_IMAGE_BYTES >> 20} MiB of pixels"
            raise bad_field("messages", problem)
        pictures.append(picture)
    return pictures
