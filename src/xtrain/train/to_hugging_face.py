"""The end of a run as the files of a Hugging Face model, from any layout.

    all ranks' shards      -> .partial-OUT-<8>/  --rename-->  OUT/
    DIR's other files      ->        "

Every rank sends its boxes to rank 0, tensor by tensor (`model.hf_save`), each element
once. OUT appears complete or not at all; that of an earlier run is replaced in one step
(renameat2), and a tokenizer that was added to it stays. DIR is what the run began with,
if it did.
"""

import ctypes
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from xtrain.checkpoint import CheckpointError, Shard
from xtrain.checkpoint.bare_file import opened_safetensors
from xtrain.checkpoint.folder import sync_directory
from xtrain.comm.agreement import raising_everywhere
from xtrain.model.hf_files import CONFIG
from xtrain.model.hf_load import Found
from xtrain.model.hf_names import hf_sources, whole_shapes
from xtrain.model.hf_save import write_hf
from xtrain.train.checkpoints import shards_of, units_of
from xtrain.train.wrap import WrappedModel
from xtrain.zero import fsdp_checkpoint

WEIGHTS = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5"),
    *(".msgpack", ".gguf", ".onnx", ".npz"),
)
"""Ends of the names of files that are not copied."""
WRITTEN = re.compile(
    r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)
"""Names of files that every run writes."""
ADDED = re.compile(
    r"tokenizer(\.json|\.model|_config\.json)|(vocab|merges)\.txt|README\.md"
    r"|(added_tokens|generation_config|special_tokens_map|vocab)\.json"
    r"|chat_template\.(jinja|json)|LICENSE(\.\w+)?"
)
"""Names of files that people add to a model: they stay."""
RENAME_EXCHANGE, AT_FDCWD = 2, -100  # of Linux


def check_target(directory: str, found: Found | None = None) -> bool:
    """Whether a folder of this name has files of a run that begins with `found`.

    ValueError if it has others, or cannot be made.
    """
    place, what = Path(directory).resolve(), f"checkpoint.save_hf={directory}"
    if found is not None and place == source_of(found).resolve():
        raise ValueError(f"{what} is what the run begins with: give another folder")
    try:
        held = set(os.listdir(place) if place.exists() else ())
        if foreign := foreign_files(place, found):
            raise ValueError(
                f"{what} has {', '.join(foreign[:3])}, which this run would not write: "
                "give a folder that is empty, not yet there, or an earlier run's"
            )
        if os.path.ismount(place):
            raise ValueError(
                f"{what} is where a file system is mounted: give a folder inside"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(prefix=f".partial-{place.name}-", dir=place.parent))
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {error}") from None
    return not held.issubset(map(str, added_files(place)))


def source_of(found: Found) -> Path:
    """The folder of what a run begins with."""
    return next(iter(found.files)).parent


def foreign_files(place: Path, found: Found | None) -> list[str]:
    """Files of a folder that a run which begins with `found` neither writes nor
    keeps."""
    source = None if found is None else source_of(found)
    own = set(added_files(place))
    if source is not None:
        own.update(besides_weights(source))
    names = [p.relative_to(place) for p in place.rglob("*") if not p.is_dir()]
    foreign = {name for name in names if name not in own}
    return sorted(str(n) for n in foreign if not WRITTEN.fullmatch(str(n)))


def added_files(place: Path) -> list[Path]:
    """Names of a folder's files that people add to a model."""
    names = [path for path in place.glob("*") if ADDED.fullmatch(path.name)]
    return [path.relative_to(place) for path in names if path.is_file()]


def weights_of(model: WrappedModel) -> list[Shard]:
    """This rank's part of every parameter, in any wrapper."""
    units = units_of(model)
    shards = fsdp_checkpoint.shards_of(units, model) if units else shards_of(model)
    names = whole_shapes(model.config)
    return [shard for shard in shards if shard.name in names]  # no buffers


def save_hf(
    directory: str | Path,
    model: WrappedModel,
    found: Found | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a wrapped model as Hugging Face's files; every rank calls it.

    `directory` appears complete, by a rename of what was written beside it.

    Args:
        directory: empty, not there, or of an earlier run: its tokenizer and other
            files by which people complete a model stay.
        found: what the run began with: its dtypes, its entries of `config.json` and its
            other files are kept.
        dtype: of all tensors of a run that began without files.

    Raises:
        CheckpointError: on every rank, and then nothing has appeared.
    """
    place, is_first = Path(directory).resolve(), dist.get_rank() == 0
    partial = place.with_name(f".partial-{place.name}-{secrets.token_hex(4)}")
    dtypes, carried, metadata = None, {}, {}
    if found is not None:
        dtypes = {name: about.dtype for name, about in found.tensors.items()}
        carried = {CONFIG: found.carried[CONFIG]}
    elif dtype is not None:
        dtypes = dict.fromkeys(hf_sources(model.config), dtype)
    try:
        with raising_everywhere(CheckpointError, group=None):
            if is_first:
                partial.mkdir(parents=True)
                if found is not None:
                    metadata = copy_besides_weights(found, partial)
        what = weights_of(model), model.config, model.mesh, carried
        write_hf(partial, *what, dtypes=dtypes, metadata=metadata)
        with raising_everywhere(CheckpointError, group=None):
            if is_first:
                if foreign := foreign_files(place, found):
                    raise CheckpointError(f"{place} has {foreign[0]} by now")
                keep_added(place, partial)
                sync_directory(partial)
                put_in_place(partial, place)
                sync_directory(place.parent)
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)


def copy_besides_weights(found: Found, target: Path) -> dict[str, str]:
    """Copy what a directory has besides weights and hidden files; what the header of
    its safetensors has besides tensors."""
    source = source_of(found)
    for name in besides_weights(source):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
    with opened_safetensors(next(iter(found.files))) as opened:
        return opened.metadata() or {}


def keep_added(place: Path, target: Path) -> None:
    """Copy what people have added to the model at `place`; what a run writes itself
    stays as it is."""
    for name in added_files(place):
        if not (target / name).exists():
            shutil.copy2(place / name, target / name)
            with open(target / name, "rb") as file:
                os.fsync(file.fileno())


def besides_weights(source: Path) -> Iterator[Path]:
    """Names of a folder's files that are neither weights nor hidden."""
    for folder, inside, names in os.walk(source):
        inside[:] = [name for name in inside if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            hidden = name.startswith(".") or name.endswith(WEIGHTS)
            if not hidden and path.is_file():
                yield path.relative_to(source)


def put_in_place(partial: Path, place: Path) -> None:
    """Rename a folder; what was at `place` is at `partial` then."""
    if not place.exists():
        os.rename(partial, place)
        return
    try:
        exchange(partial, place)
    except (AttributeError, OSError):  # a system without this call
        old = partial.with_name(f"{partial.name}-old")
        os.rename(place, old)
        os.rename(partial, place)
        os.rename(old, partial)


def exchange(one: Path, other: Path) -> None:
    """Let two names of one file system change places, in one step."""
    both = AT_FDCWD, bytes(one), AT_FDCWD, bytes(other)
    if ctypes.CDLL(None, use_errno=True).renameat2(*both, RENAME_EXCHANGE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(one))
