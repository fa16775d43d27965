"""A recipe's data as samples: a file of tokens, of text, or the standard library."""

from hashlib import blake2b
from pathlib import Path

from xtrain.train.recipe_parts import Data
from xtrain.train.samples import Samples
from xtrain.train.text import (
    ByteTokenizer,
    FileTokenizer,
    library_tokens,
    prepare,
)
from xtrain.train.tokens import MAGIC, TokenFile


def tokenizer_of(
    data: Data, vocab_size: int | None = None
) -> ByteTokenizer | FileTokenizer:
    """What text becomes tokens by, and tokens text.

    ValueError if a file has more ids than the model's vocabulary.
    """
    if data.tokenizer is None:
        return ByteTokenizer()
    found = FileTokenizer(data.tokenizer)
    if vocab_size is not None and found.vocab_size > vocab_size:
        raise ValueError(
            f"{data.tokenizer} has {found.vocab_size} ids, and the model a vocabulary "
            f"of {vocab_size}: model.vocab_size must be at least as large"
        )
    return found


def is_text(path: str) -> bool:
    """Whether a file is not one of tokens."""
    with Path(path).open("rb") as file:
        return file.read(len(MAGIC)) != MAGIC


def open_tokens(path: str, data: Data) -> TokenFile:
    """A file of tokens; one of text is made into one beside it, which is kept.

    A text that is newer than its tokens is read again; each tokenizer has its own file.
    """
    text = Path(path)
    if not is_text(path):
        return TokenFile.open(text)
    way = b"" if data.tokenizer is None else Path(data.tokenizer).read_bytes()
    made = text.with_name(
        f"{text.name}.{blake2b(way, digest_size=4).hexdigest()}.tokens"
    )
    if made.is_file() and made.stat().st_mtime_ns >= text.stat().st_mtime_ns:
        return TokenFile.open(made)
    return prepare([text], made, tokenizer_of(data))


def samples_of(data: Data, vocab_size: int, seed: int, evaluation: bool) -> Samples:
    """The samples to train on, or to evaluate on.

    FileNotFoundError, or ValueError if a file has ids beyond the model's vocabulary.
    """
    path = data.validation if evaluation else data.path
    if path is not None and not Path(path).is_file():
        option = "validation" if evaluation else "path"
        raise FileNotFoundError(
            f"data.{option}={path} is not a file: give one of tokens or text"
        )
    if path is None:
        file = library_tokens("evaluation" if evaluation else "train")
    else:
        file = open_tokens(path, data)
    if file.vocab_size > vocab_size:
        raise ValueError(
            f"{file.path} has a vocabulary of {file.vocab_size} tokens, and the model "
            f"one of {vocab_size}: set model.vocab_size={file.vocab_size}"
        )
    return Samples(
        file,
        data.sequence,
        seed=seed,
        packing=data.packing,
        shuffle=data.shuffle and not evaluation,
        document_masks=data.document_masks,
    )
