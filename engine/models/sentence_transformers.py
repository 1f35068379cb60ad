"""Read sentence-transformers' files: how a model's hidden states become one vector.

modules.json          the steps: the transformer, pooling, perhaps dense layers and normalisation
1_Pooling/config.json which hidden states are taken
2_Dense/config.json   the shape of a dense layer, whose weights lie beside it
1_LogitScore/config.json    which tokens' logits are a cross-encoder's score
sentence_bert_config.json   the longest input the model was made for; whether it reads messages
config_sentence_transformers.json   prompts, and what becomes of a cross-encoder's output
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.dense_spec import DenseActivation, DenseSpec
from engine.models.json_file import parse_json, parse_object, read_bytes
from engine.models.output_head import read_score_activation
from engine.pooling import MessageFormat, PoolingKind

_MODES: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "lasttoken": "last",
}
# torch's classes, which configs name by their module.
_DENSE_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
}
_TORCH = "torch.nn."
# In the names of the transformer's own config: the usual one, and those of the oldest models.
_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_POOLED = "sentence_embedding"  # what a dense layer reads and writes: the pooled vector


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How a directory's model pools."""

    kind: PoolingKind | None = None  # None: not specified
    normalize: bool = True
    max_tokens: int | None = None  # the longest input
    dense: tuple[DenseSpec, ...] = ()  # layers that the pooled vector goes through, in order
    lowercase: bool = False  # texts are read in lower case
    prompts: dict[str, str] = field(default_factory=dict)  # by name
    default_prompt: str | None = None  # a name among them
    pools_prompts: bool = True  # whether their tokens are pooled
    sigmoid: bool | None = None  # of scores; None: not specified
    messages: MessageFormat | None = None  # None: texts are read as they are
    score_tokens: tuple[int, ...] = ()  # see ``engine.pooling.PoolingParams``


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the files above; missing information has the usual defaults.

    Raises:
        ModelLoadError: a file is damaged, or contains a step that is not supported.
    """
    config = _read_modules(directory)
    longest, lowercase, messages = _read_transformer(directory, bool(config.score_tokens))
    prompts, default, sigmoid = _read_own_config(directory)
    return replace(
        config,
        max_tokens=longest,
        lowercase=lowercase,
        messages=messages,
        prompts=prompts,
        default_prompt=default,
        sigmoid=sigmoid,
    )


def _read_modules(directory: Path) -> SentenceConfig:
    path = directory / "modules.json"
    if not path.is_file():
        return SentenceConfig()
    modules = parse_json(path, read_bytes(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path}: not a list of modules")
    kind: PoolingKind | None = None
    normalize, pools_prompts = False, True
    dense: list[DenseSpec] = []
    tokens: tuple[int, ...] = ()
    for module in modules:
        package, _, name = str(module.get("type", "")).rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise ModelLoadError(
                f"{path}: a module of type {str(module.get('type'))[:80]!r} is code of its own, "
                "which is never run"
            )
        own = str(module.get("path", ""))
        if name == "Pooling" and kind is None and not normalize:
            kind, pools_prompts = _read_pooling(_beside(path, own))
        elif name == "Normalize":
            normalize = True
        elif name == "Dense" and kind is not None and not normalize:
            dense.append(_read_dense(_beside(path, own)))
        elif name == "LogitScore" and kind is None and not tokens:
            tokens = _read_score_tokens(_beside(path, own))
        elif name in ("Pooling", "Dense", "LogitScore"):
            where = "before the pooling" if kind is None else "where it is among the others"
            raise ModelLoadError(f"{path}: a module of type {name!r} {where} is not supported")
        elif name not in ("Transformer", "Dropout"):  # nothing is dropped outside training
            raise ModelLoadError(f"{path}: a module of type {name[:80]!r} is not supported")
    for before, after in pairwise(dense):
        if before.outputs != after.inputs:
            raise ModelLoadError(
                f"{after.directory}: a dense layer for {after.inputs} numbers follows one that "
                f"has {before.outputs}"
            )
    return SentenceConfig(
        kind, normalize, dense=tuple(dense), pools_prompts=pools_prompts, score_tokens=tokens
    )


def _beside(modules: Path, name: str) -> Path:
    """Return a module's directory, which is in that of ``modules``."""
    if Path(name).name != name:
        raise ModelLoadError(f"{modules}: {name!r:.80} is not a directory in it")
    return modules.parent / name


def _read_pooling(directory: Path) -> tuple[PoolingKind, bool]:
    """Return which states are pooled, and whether a prompt's are among them."""
    path = directory / "config.json"
    config = parse_object(path, read_bytes(path))
    named = config.get("pooling_mode")  # newer versions: one or several names
    if named is None:
        prefix = "pooling_mode_"
        chosen = [key for key, on in config.items() if key.startswith(prefix) and on is True]
        named = [key.removeprefix(prefix) for key in chosen]
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or len(modes) != 1 or str(modes[0]) not in _MODES:
        raise ModelLoadError(
            f"{path}: pooling by {modes!r:.80} is not supported (known: one of cls, mean, max, "
            "lasttoken)"
        )
    kind = _MODES[str(modes[0])]
    return kind, kind == "last" or config.get("include_prompt") is not False


def _read_dense(directory: Path) -> DenseSpec:
    path = directory / "config.json"
    reader = ConfigReader(parse_object(path, read_bytes(path)), str(path))
    for key in ("module_input_name", "module_output_name"):
        reader.require(key, _POOLED)
    reader.require("use_residual", False)
    # A config without one means sentence-transformers' own default.
    name = reader.text("activation_function", f"{_TORCH}modules.activation.Tanh")
    known = _DENSE_ACTIVATIONS.get(name.rpartition(".")[2])
    if known is None or not name.startswith(_TORCH):
        names = ", ".join(_DENSE_ACTIVATIONS)
        raise reader.error("activation_function", f"is {name[:80]!r}; known of torch.nn: {names}")
    spec = DenseSpec(
        directory=directory,
        inputs=reader.count("in_features"),
        outputs=reader.count("out_features"),
        bias=reader.flag("bias", True),
        activation=known,
    )
    reader.finish()
    return spec


def _read_score_tokens(directory: Path) -> tuple[int, ...]:
    path = directory / "config.json"
    reader = ConfigReader(parse_object(path, read_bytes(path)), str(path))
    reader.require("module_input_name", "causal_logits")
    yes, no = reader.non_negative("true_token_id"), None
    if "false_token_id" in reader:
        no = reader.non_negative("false_token_id")
    reader.finish()
    return (yes,) if no is None else (yes, no)


def _read_transformer(
    directory: Path, is_generative_scorer: bool
) -> tuple[int | None, bool, MessageFormat | None]:
    """Return the longest input, whether texts are read in lower case, and as which messages."""
    names = (f"sentence_{kind}_config.json" for kind in _TRANSFORMERS)
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        return None, False, MessageFormat() if is_generative_scorer else None
    config = parse_object(path, read_bytes(path))
    value = config.get("max_seq_length")
    longest = value if type(value) is int and value > 0 else None
    reader = ConfigReader(config, str(path))
    # Since 5.4. A model that reads messages gets all texts as such.
    reads_messages = is_generative_scorer and "modality_config" not in reader
    modalities = reader.section("modality_config")
    form = modalities.section("message") if modalities is not None else None
    reads_messages = reads_messages or form is not None
    messages = _read_message_format(reader, form) if reads_messages else None
    return longest, config.get("do_lower_case") is True, messages


def _read_message_format(reader: ConfigReader, form: ConfigReader | None) -> MessageFormat:
    options = reader.section("processing_kwargs")
    template = options.section("chat_template") if options is not None else None
    generation, name = False, ""
    if template is not None:
        generation = template.flag("add_generation_prompt")
        name = template.text("chat_template", "")
        template.finish()
    shape = "flat" if form is None else form.text("format", "auto")
    if shape not in ("auto", "flat", "structured"):  # chats are read in either form, too
        raise reader.error("modality_config", f"has messages of the format {shape[:80]!r}")
    return MessageFormat(
        add_generation_prompt=generation,
        content_parts=shape == "structured",
        template=name or None,
    )


def _read_own_config(directory: Path) -> tuple[dict[str, str], str | None, bool | None]:
    """Return the prompts, the name of the default one, and whether scores are sigmoids."""
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None, None
    reader = ConfigReader(parse_object(path, read_bytes(path)), str(path))
    given = reader.mapping("prompts")
    prompts = {name: "" if text is None else text for name, text in given.items()}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise reader.error("prompts", "has a prompt that is not a text")
    default = reader.text("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise reader.error("default_prompt_name", f"is {default[:80]!r}, which is no prompt")
    return prompts, default, read_score_activation(reader, "activation_fn")
