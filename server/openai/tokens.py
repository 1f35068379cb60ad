"""POST /tokenize and /detokenize: the model's tokens of a text, and the reverse."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.access.caller import caller_of
from server.errors import bad_field
from server.openai.chat_prompt import encode_chat
from server.openai.endpoint import check_length, encode_texts, json_response, read_request, state_of
from server.openai.inputs import DetokenizeRequest, TokenizeRequest
from server.openai.message_files import with_file_texts
from server.openai.openapi_schema import describe
from server.openai.outputs import DetokenizeResponse, TokenizeResponse
from server.openai.sampling import check_token_ids

router = APIRouter()


@router.post(
    "/tokenize",
    summary="Token ids of a text or a conversation",
    openapi_extra=describe(TokenizeRequest, TokenizeResponse),
)
async def tokenize(request: Request) -> Response:
    """Count and list the tokens, exactly as the generating endpoints would see them."""
    body, headers = await read_request(request, TokenizeRequest)
    state = state_of(request)
    model = await (state.model() if body.model is None else state.get_model(body.model))
    if body.prompt is not None:
        check_length(len(body.prompt), model, "prompt")
        wanted = body.add_special_tokens
        add_special = True if wanted is None else wanted
        (tokens,) = await encode_texts(
            model.tokenizer, [body.prompt], add_special_tokens=add_special
        )
    else:
        body = await with_file_texts(state.files, caller_of(request), body)
        tools = [tool.callable.for_template() for tool in body.tools or []]
        tokens = (await encode_chat(state, model, body, tools)).token_ids
    strings = [model.tokenizer.token_text(id) for id in tokens] if body.return_token_strs else None
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=model.info.max_model_len,
        tokens=tokens,
        token_strs=strings,
    )
    return json_response(answer, headers)


@router.post(
    "/detokenize",
    summary="The text of token ids",
    openapi_extra=describe(DetokenizeRequest, DetokenizeResponse),
)
async def detokenize(request: Request) -> Response:
    """Decode tokens to text, including special tokens."""
    body, headers = await read_request(request, DetokenizeRequest)
    state = state_of(request)
    model = await (state.model() if body.model is None else state.get_model(body.model))
    check_token_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
    if len(body.tokens) > model.info.max_model_len * 16:
        raise bad_field("tokens", "holds far more tokens than the context")
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text), headers)
