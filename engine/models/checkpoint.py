"""A model on disk, a directory or a GGUF file: its config, its files, its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from engine.config import LoadFormat
from engine.errors import ModelLoadError
from engine.gguf.file import GgufFile, find_gguf, read_gguf
from engine.models.audio.config import AudioConfig, read_audio
from engine.models.config_reader import ConfigReader
from engine.models.encoder.spec import EncoderSpec
from engine.models.families import read_spec
from engine.models.json_file import parse_object, read_bytes
from engine.models.optional_tensors import with_present
from engine.models.safetensors import Header, read_header
from engine.models.sentence_transformers import SentenceConfig, read_sentence_config
from engine.models.spec import DecoderSpec
from engine.models.tied_head import with_own_head, without_missing_head
from engine.models.torch_file import read_torch_header
from engine.models.vision.config import VisionConfig, read_vision
from engine.pooling import PoolingInfo, PoolingKind
from engine.text.tokenizer_files import find_end_token_id

_Part = TypeVar("_Part")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MODELOPT = "hf_quant_config.json"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SINGLE = "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Contents of config.json, generation_config.json and sentence-transformers' files, or of
    GGUF."""

    directory: Path
    spec: DecoderSpec | EncoderSpec
    sentence: SentenceConfig
    raw: bytes  # config.json as it is, or the GGUF tables
    gguf: GgufFile | None = None  # holds the weights, instead of a directory
    quantization_config: dict[str, Any] | None = None  # that section of config.json
    vision: VisionConfig | None = None  # None: the model takes no images
    vision_unsupported_reason: str | None = None  # why not, if it has a known vision part
    audio: AudioConfig | None = None  # None: the model takes no audio
    audio_unsupported_reason: str | None = None  # why not, if it has a known audio part

    @property
    def embedding_size(self) -> int:
        """Dimensions of the vectors that it makes."""
        dense = self.sentence.dense
        if dense:
            return dense[-1].outputs
        spec = self.spec
        return spec.output_size if isinstance(spec, EncoderSpec) else spec.hidden_size

    def pooling_info(self, kind: PoolingKind) -> PoolingInfo:
        """Describe how it makes vectors, of the hidden states ``kind``, and scores."""
        sentence, spec = self.sentence, self.spec
        return PoolingInfo(
            kind=kind,
            size=self.embedding_size,
            normalize=sentence.normalize,
            num_labels=1 if sentence.score_tokens else spec.num_labels,
            sigmoid=spec.score_sigmoid if sentence.sigmoid is None else sentence.sigmoid,
            prompts=sentence.prompts,
            default_prompt=sentence.default_prompt,
            pools_prompts=sentence.pools_prompts,
            lowercase=sentence.lowercase,
            messages=sentence.messages,
            score_tokens=sentence.score_tokens,
        )


def read_config(model: str) -> ModelConfig:
    """Read the config of a model directory or of a GGUF file.

    Raises:
        ModelLoadError: the directory or its config.json is missing, damaged or not supported.
    """
    path = find_gguf(model)
    if path is not None:
        from engine.gguf.config import pooling_kind  # imported only for GGUF
        from engine.gguf.spec import read_gguf_spec

        file = read_gguf(path)
        sentence = SentenceConfig(kind=pooling_kind(file))
        return ModelConfig(path.parent, read_gguf_spec(file), sentence, file.raw, file)
    directory = Path(model)
    if not directory.is_dir():
        raise ModelLoadError(f"{model}: no such model directory")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing; a model directory in Hugging Face format has one")
    raw = read_bytes(path)
    try:
        config = parse_object(path, raw)
        spec = read_spec(config)
    except ModelLoadError as error:
        raise ModelLoadError(_in_directory(directory, str(error))) from None
    sentence = read_sentence_config(directory)
    _check_modules(directory, sentence, spec)
    if isinstance(spec, DecoderSpec):
        spec = _with_other_end_tokens(directory, spec)
        spec = _as_in_files(directory, spec, pools=sentence.kind is not None)
    vision, images_refused = _read_part(read_vision, config, directory, spec)
    audio, audio_refused = _read_part(read_audio, config, directory, spec)
    return ModelConfig(
        directory,
        spec,
        sentence,
        raw,
        quantization_config=_quantization(config, directory),
        vision=vision,
        vision_unsupported_reason=images_refused,
        audio=audio,
        audio_unsupported_reason=audio_refused,
    )


def read_headers(directory: Path, load_format: LoadFormat = "auto") -> list[Header]:
    """Read and check the headers of all weight files: safetensors, or with "bin" PyTorch's own
    format.

    Raises:
        ModelLoadError: there are none, the index names a file that is missing or outside the
            directory, or a file is damaged.
    """
    is_torch = load_format == "bin"
    read = read_torch_header if is_torch else read_header
    index = directory / (_TORCH_INDEX if is_torch else _INDEX)
    if index.is_file():
        headers = [read(directory / name) for name in _indexed_files(index)]
        _check_index(index, headers)
        return headers
    single = directory / (_TORCH_SINGLE if is_torch else _SINGLE)
    files = [single] if single.is_file() or is_torch else sorted(directory.glob("*.safetensors"))
    if not files:
        others = [directory / name for name in (_TORCH_SINGLE, _TORCH_INDEX)]
        if any(path.is_file() for path in others):
            raise ModelLoadError(
                f"{directory}: holds its weights as pickles only (pytorch_model.bin), which can "
                "hide code; if you trust their maker, ask for them with --load-format bin"
            )
        raise ModelLoadError(f"{directory}: holds no .safetensors file and no {_INDEX}")
    return [read(path) for path in files]


def fingerprint(config: ModelConfig, headers: list[Header], *extra: str) -> str:
    """Return a short hash of this build, the config, the tensor tables and ``extra`` settings.

    The weights' bytes are not read; their names, shapes, offsets and file sizes are.
    """
    digest = hashlib.sha256(_version().encode())
    for part in (config.raw, *(text.encode() for text in extra)):
        digest.update(hashlib.sha256(part).digest())
    for header in headers:
        digest.update(hashlib.sha256(header.raw).digest())
        digest.update(header.file_bytes.to_bytes(8, "little"))
    return "fp_" + digest.hexdigest()[:12]


def _indexed_files(index: Path) -> list[str]:
    """Return the shards that an index names, each once, in order."""
    mapping = parse_object(index, read_bytes(index)).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelLoadError(f"{index}: has no 'weight_map'")
    names = list(dict.fromkeys(mapping.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{index}: {name!r:.80} is not the name of a file beside it")
        if not (index.parent / name).is_file():
            raise ModelLoadError(f"{index.parent / name}: missing, and named by {index.name}")
    return names


def _check_index(index: Path, headers: list[Header]) -> None:
    """Check that every tensor is in the file that the index names."""
    mapping = parse_object(index, read_bytes(index))["weight_map"]
    held = {header.path.name: header.entries for header in headers}
    for tensor, name in mapping.items():
        if tensor not in held[name]:
            raise ModelLoadError(f"{index}: tensor {tensor[:80]!r} is not in {name}")


def _quantization(config: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    """Return the section that tells how weights are stored.

    Some are in the text section, and older ones of ModelOpt in a file of their own.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found, file = config.get("quantization_config") or inner, directory / _MODELOPT
    # Some name no more than the method.
    if (not found or found == {"quant_method": "modelopt"}) and file.is_file():
        own = parse_object(file, read_bytes(file)).get("quantization")
        if not isinstance(own, dict):
            raise ModelLoadError(f"{file}: has no 'quantization'")
        return {"quant_method": "modelopt", **own}
    return found


def _read_part(
    read: Callable[[dict[str, Any], Path, DecoderSpec], _Part | None],
    config: dict[str, Any],
    directory: Path,
    spec: DecoderSpec | EncoderSpec,
) -> tuple[_Part | None, str | None]:
    """Return the vision or audio part, or why it is not served; text is served in either case."""
    if not isinstance(spec, DecoderSpec):
        return None, None
    try:
        return read(config, directory, spec), None
    except ModelLoadError as error:
        return None, _in_directory(directory, str(error))


def _check_modules(
    directory: Path, sentence: SentenceConfig, spec: DecoderSpec | EncoderSpec
) -> None:
    """Raise ModelLoadError if the model cannot have a module that its files name."""
    if sentence.dense and isinstance(spec, DecoderSpec):
        raise ModelLoadError(
            f"{sentence.dense[0].directory}: a module of type 'Dense' is supported behind encoders "
            "only; this is a decoder"
        )
    if sentence.score_tokens:
        if not isinstance(spec, DecoderSpec) or not spec.is_generative:
            raise ModelLoadError(f"{directory}: has a LogitScore, but no head of a language model")
        if max(sentence.score_tokens) >= spec.vocab_size:
            raise ModelLoadError(f"{directory}: has a LogitScore of a token that does not exist")


def _with_other_end_tokens(directory: Path, spec: DecoderSpec) -> DecoderSpec:
    """Add the end tokens of generation_config.json and the tokenizer's own to the spec's.

    Chat models that were tuned from base models often have theirs in the tokenizer's config alone.
    """
    path, listed = directory / "generation_config.json", spec.eos_token_ids
    if path.is_file():
        reader = ConfigReader(parse_object(path, read_bytes(path)), str(path))
        listed = (*listed, *reader.token_ids("eos_token_id"))
    own = find_end_token_id(directory)
    if own is not None and 0 <= own < spec.vocab_size:
        listed = (*listed, own)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(listed)))


def _as_in_files(directory: Path, spec: DecoderSpec, *, pools: bool) -> DecoderSpec:
    """Remove optional parameters that the files lack. Add a head that they have, though the config
    calls it tied to the embedding; or remove that of a model which ``pools`` if they lack it."""
    is_tied = spec.is_generative and spec.tie_word_embeddings
    may_lack_head = spec.is_generative and pools and not is_tied
    if not (is_tied or may_lack_head or spec.optional):
        return spec
    try:
        headers = read_headers(directory)
        if is_tied:
            spec = with_own_head(spec, headers)
        elif may_lack_head:
            spec = without_missing_head(spec, headers)
        return with_present(spec, headers)
    except ModelLoadError:
        return spec  # who reads the weights reports what is wrong with the files


def _in_directory(directory: Path, message: str) -> str:
    return f"{directory / message}" if message.startswith("config.json") else message


def _version() -> str:
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "unreleased"  # running from a source tree
