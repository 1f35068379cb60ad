"""Small tokenizers of the two families, created on the spot."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from engine.text.tokenizer import Tokenizer

# No deadlines: the machine may be busy with something else.
settings.register_profile("text", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("text")

CORPUS = [
    "Hello world, hello there! The cat sat on the mat; 你好，世界。 naïve café 👩‍👩‍👧‍👦 👍🏽 🇫🇷",
    "def main():\n    return 42  # answer\n\n\tтест и ещё  \u0928\u092e\u0938\u094d\u0924\u0947",
]
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<<s>>"]


def byte_level() -> Backend:
    """A tokenizer like GPT-2's; its text round-trips exactly."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


def metaspace(*, legacy: bool = False) -> Backend:
    """A tokenizer like SentencePiece's: a space before the first word, unknown bytes as ``<0xAB>``.

    The legacy form, as in Llama 2, also adds that space after each special token.
    """
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *(chr(code) for code in range(0x21, 0x7F)), "你", "é"]
    pieces += ["▁h", "▁he", "ll", "▁hell", "▁hello", "th", "▁th", "▁the"]
    merges = [("▁", "▁"), ("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]
    merges += [("t", "h"), ("▁", "th"), ("▁th", "e")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=None)
    )
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "metaspace": metaspace,
    "metaspace, legacy": partial(metaspace, legacy=True),
}


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), named_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def backend(kind: str) -> Backend:
    """The same tokenizer, untouched: the library's own behaviour."""
    return KINDS[kind]()


@pytest.fixture(scope="session")
def chatml() -> Tokenizer:
    return Tokenizer(byte_level(), named_tokens={"eos_token": "<|im_end|>"})
