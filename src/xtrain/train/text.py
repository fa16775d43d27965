"""From text to a file of tokens; and a text that every Python brings along.

    files -> a tokenizer's ids, an end-of-document after each file -> `write_tokens`

`ByteTokenizer` needs nothing: an id a byte and one for the end, 257 in all.
`FileTokenizer` reads the `tokenizer.json` of a Hugging Face model, with the package
`tokenizers`. Ids come once into a file; training reads no text.

The corpus of Python's own standard library, some 10 MB of source text in Python 3.11,
is made in seconds on first use and kept in the user's cache folder. Its name has a
digest of the files' names and sizes: another Python makes another corpus.
"""

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xtrain.train.tokens import TokenFile
from xtrain.train.writing import write_tokens

SPLITS = ("train", "evaluation")
ONE_IN = 20  # files that are of the split "evaluation"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What `prepare` asks of a tokenizer."""

    vocab_size: int
    end: int
    """The id that ends a document."""

    def encode(self, text: bytes) -> Tensor | Sequence[int]:
        """The ids of a text in UTF-8, without an end."""


class ByteTokenizer:
    """Each byte is its own id; 256 ends a document."""

    vocab_size = 257
    end = 256

    def encode(self, text: bytes) -> Tensor:
        """[bytes], uint8."""
        if not text:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids; ends are left out, and what is not UTF-8 is replaced."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else ids
        return bytes(i for i in numbers if i != self.end).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, by the package `tokenizers`.

    Args:
        end: the token that ends a document; unless given, the first of the usual ones
            that the vocabulary has.

    Raises:
        ValueError: the package is missing, the file is none of its own, or the
            vocabulary has no such token.
    """

    def __init__(self, path: str | Path, end: str | None = None):
        try:
            from tokenizers import Tokenizer as Reader
        except ImportError:
            raise ValueError(
                f"{path} is read by the package tokenizers: pip install tokenizers"
            ) from None
        try:
            self.reader: Any = Reader.from_file(str(path))
        except Exception as error:  # it raises Exception itself
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        ids = self.reader.get_vocab(with_added_tokens=True)
        known = [name for name in (ENDS if end is None else [end]) if name in ids]
        if not known:
            wanted = f"none of {', '.join(ENDS)}" if end is None else f"no {end!r}"
            raise ValueError(
                f"{path} has {wanted}: name the token that ends a document"
            )
        self.vocab_size, self.end = max(ids.values()) + 1, ids[known[0]]

    def encode(self, text: bytes) -> list[int]:
        given = text.decode(errors="replace")
        return self.reader.encode(given, add_special_tokens=False).ids

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.reader.decode(ids.tolist() if isinstance(ids, Tensor) else ids)


def prepare(
    paths: Iterable[str | Path], out: str | Path, tokenizer: Tokenizer | None = None
) -> TokenFile:
    """Write the text of files to a file of tokens, each as a document with an end.

    Args:
        tokenizer: a ByteTokenizer unless given.
    """
    tokenizer = tokenizer or ByteTokenizer()
    write_tokens(out, documents_of(paths, tokenizer), tokenizer.vocab_size)
    return TokenFile.open(out)


def documents_of(paths: Iterable[str | Path], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Ids of each file's text and the end, int64."""
    end = torch.tensor([tokenizer.end], device="cpu")
    for path in paths:
        ids = torch.as_tensor(tokenizer.encode(Path(path).read_bytes()), device="cpu")
        yield torch.cat([ids.to(torch.int64), end])


def library(root: str | Path | None = None) -> Path:
    return Path(root or sysconfig.get_paths()["stdlib"])


def library_files(
    split: str = "train", limit: int | None = None, root: str | Path | None = None
) -> list[Path]:
    """Files of Python's standard library, sorted by their names.

    Args:
        split: "evaluation" for about one file in 20, "train" for all others; a hash
            of its name decides for each.
        limit: bytes of all together; a file that would go beyond it is left out.
        root: a folder in place of the standard library's.
    """
    if split not in SPLITS or not (limit is None or limit > 0):
        raise ValueError(f"split={split!r} of {', '.join(SPLITS)}, limit={limit}")
    root = library(root)
    names: list[str] = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in LEFT_OUT]
        paths = [Path(folder, name) for name in files if name.endswith(".py")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    chosen: list[Path] = []
    total = 0
    for name in sorted(names):
        size = (root / name).stat().st_size
        evaluated = zlib.crc32(name.encode()) % ONE_IN == 0
        fits = limit is None or total + size <= limit
        if fits and evaluated == (split == "evaluation"):
            total += size
            chosen.append(root / name)
    return chosen


def library_tokens(
    split: str = "train",
    limit: int | None = None,
    cache: str | Path | None = None,
    root: str | Path | None = None,
) -> TokenFile:
    """The standard library's source text as bytes; made if it is not in the cache.

    Processes that begin at once may each make it: all see the same file, complete.

    Args:
        split, limit, root: of `library_files`.
        cache: a folder; ~/.cache/xtrain unless given.
    """
    files = library_files(split, limit, root)
    sizes = {path.relative_to(library(root)): path.stat().st_size for path in files}
    about = [f"{path.as_posix()} {size}" for path, size in sizes.items()]
    digest = blake2b("\n".join(about).encode(), digest_size=8).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache or Path(base, "xtrain")) / f"library-{split}-{digest}.tokens"
    try:
        return TokenFile.open(path)
    except ValueError:  # missing or damaged
        path.parent.mkdir(parents=True, exist_ok=True)
        return prepare(files, path)
