"""A byte-level BPE tokenizer, trained on our own corpus and saved in Hugging Face format.

There is no normaliser and the byte alphabet is complete, so every UTF-8 text round-trips. Names and
digits are split so that a tiny model can copy them; see `PIECES`.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import corpus

VOCAB_SIZE = 3072
# A lower-case word includes the preceding space. A capitalised word does not, so that a name has
# the same tokens after a space, after a quote and at the start of an answer: copying names is then
# copying tokens, which a tiny model can learn. Digits are separate tokens, for sums.
PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{Ll}+|\p{Lu}+\p{Ll}*|[\p{Lo}\p{Lm}\p{Lt}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\p{M}]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Single tokens, but not special ones: parsers read them, so they must survive decoding.
MARKS = [
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
END_OF_TEXT, IM_START, IM_END = range(3)
MAX_CONTEXT = 4096
_SHARDS = 4  # of the corpus, that it is trained on


def train_tokenizer() -> Tokenizer:
    """Train on the first shards of the corpus; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        min_frequency=2,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(_SHARDS), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the chat template has its own file."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": t in SPECIAL,
            }
            for t in SPECIAL + MARKS
        },
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _texts(shards: int):
    marks = SPECIAL + MARKS
    for index in range(shards):
        for conversation in corpus.shard(index):
            text = corpus.as_text(conversation)
            for mark in marks:
                text = text.replace(mark, "\n")
            yield text
