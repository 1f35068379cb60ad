"""The bodies and responses of the pooling endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from server.openai.api_model import MAX_MODEL_NAME, ApiModel
from server.openai.deadline import MAX_DEADLINE_MS
from server.openai.inputs import Prompts, Salt


def _read_truncation(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or (value < 1 and value != -1):
        raise ValueError("must be a positive number of tokens, or -1 for all that the model takes")
    return value


def _read_truncate(value: Any) -> bool | None:
    """Parse other servers' switch: a boolean (TEI, Jina, Voyage) or a word (Cohere, NVIDIA)."""
    if value is None or type(value) is bool:
        return value
    if value not in ("END", "NONE"):
        raise ValueError("must be true, false, 'END' or 'NONE': the end of a text is dropped")
    return value == "END"


def _read_texts(value: Any) -> list[str]:
    """Parse one text or several, none of them empty."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or set(map(type, texts)) != {str}:
        raise ValueError("must be a string or a list of strings")
    if not all(texts):
        raise ValueError("must not be empty")
    return texts


def _read_documents(value: Any) -> list[str]:
    """Parse texts, plain or each as the ``text`` of an object."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of strings, or of objects with a 'text'")
    texts: list[Any] = [entry.get("text") if isinstance(entry, dict) else entry for entry in value]
    if set(map(type, texts)) != {str} or not all(texts):
        raise ValueError("must hold strings, or objects with a 'text', none of them empty")
    return texts


def _refused(why: str, *harmless: Any) -> PlainValidator:
    """Make the validator of a field that asks for other vectors, but for some values."""

    def read(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise ValueError(why)
        return None

    return PlainValidator(read)


_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
_MAX_INSTRUCTION = 16_384  # characters
_PROMPT_FIELDS = ("prompt_name", "input_type", "task")  # TEI's name for it, Voyage's and Jina's
_STRING = {"type": "string", "minLength": 1}
_STRINGS = {"type": "array", "items": _STRING, "minItems": 1}
_DOCUMENT = {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}

_TRUNCATION = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]}

# Fields of other servers' embeddings. Without them the vectors would be others than asked for.
_NumberType = Annotated[
    str | None,
    _refused("is not available: vectors have float32 numbers", "float", "float32", ["float"]),
    WithJsonSchema({"anyOf": [{"const": "float"}, {"type": "null"}]}),
]
_LateChunking = Annotated[
    bool | None,
    _refused("is not available: each input gets a vector of its own", False),
    WithJsonSchema({"anyOf": [{"const": False}, {"type": "null"}]}),
]
_OutputDimension = Annotated[
    int | None,
    _refused("is not taken: send 'dimensions'"),
    WithJsonSchema({"type": "null"}),
]
_PromptName = Annotated[str, Field(max_length=256)]

Truncation = Annotated[int | None, PlainValidator(_read_truncation), WithJsonSchema(_TRUNCATION)]
_Truncate = Annotated[
    bool | None,
    PlainValidator(_read_truncate),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["END", "NONE"]}, {"type": "null"}]}),
]
Texts = Annotated[
    list[str], PlainValidator(_read_texts), WithJsonSchema({"anyOf": [_STRING, _STRINGS]})
]
Documents = Annotated[
    list[str],
    PlainValidator(_read_documents),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_STRING, _DOCUMENT]}, "minItems": 1}),
]


class PoolingRequest(ApiModel):
    """The common fields of these endpoints."""

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]
    truncate_prompt_tokens: Truncation = None
    truncate: _Truncate = None
    truncation: _Truncate = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None

    @property
    def max_tokens(self) -> int | None:
        """What longer inputs are cut to: -1 for the longest that the model takes; None: not."""
        if self.truncate_prompt_tokens is None and (self.truncate or self.truncation):
            return -1
        return self.truncate_prompt_tokens


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    prompt_name: _PromptName | None = None
    input_type: _PromptName | None = None
    task: _PromptName | None = None
    late_chunking: _LateChunking = None
    embedding_type: _NumberType = None
    embedding_types: _NumberType = None
    output_dtype: _NumberType = None
    output_dimension: _OutputDimension = None

    @model_validator(mode="after")
    def _names_one_prompt(self) -> Self:
        given = [name for name in _PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot be combined with {given[0]!r}")
        return self

    @property
    def prompt_field(self) -> str:
        """The field that names a prompt, or could."""
        return next((name for name in _PROMPT_FIELDS if getattr(self, name)), _PROMPT_FIELDS[0])


class PairRequest(PoolingRequest):
    """The common fields of the endpoints that compare texts."""

    instruction: Annotated[str, Field(min_length=1, max_length=_MAX_INSTRUCTION)] | None = None


class RerankRequest(PairRequest):
    """POST /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreRequest(PairRequest):
    """POST /v1/score: texts and what they are compared with, by one of vLLM's pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _is_one_pair(self) -> Self:
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        first = next((one for one, _ in _PAIRS if one in given), "text_1")
        second = next((two for one, two in _PAIRS if one == first and two in given), None)
        if first not in given:
            raise ValueError(f"{first}: is required, and 'text_2'; or 'queries' and 'documents'")
        if second is None:
            wanted = " or ".join(repr(two) for one, two in _PAIRS if one == first)
            raise ValueError(f"{first}: comes with {wanted}")
        if others := sorted(given - {first, second}):
            raise ValueError(f"{others[0]}: cannot be combined with {first!r} and {second!r}")
        return self

    @property
    def text_fields(self) -> tuple[str, str]:
        """The fields that hold the texts, and what each is compared with."""
        return next(pair for pair in _PAIRS if all(getattr(self, name) for name in pair))


# ---------------------------------------------------------------- answers


class PoolingUsage(msgspec.Struct):
    """Tokens read; none are generated."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response of /v1/embeddings, in the order of the input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    """A document as it was sent."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One document's relevance; ``index`` is its position in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    """The response of /v1/rerank, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """The response of /v1/score, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
