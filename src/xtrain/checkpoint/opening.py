"""All ranks open one checkpoint, for tensors that all of them mean alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import ProcessGroup

from xtrain.checkpoint.errors import CheckpointError, CheckpointReplaced
from xtrain.checkpoint.pieces import About, Shard
from xtrain.checkpoint.reader import CheckpointReader, open_newest, open_same
from xtrain.comm.agreement import (
    place_in,
    raising_everywhere,
    value_of_rank_0,
    values_of_all,
)


def wanted_anywhere(
    shards: list[Shard], group: ProcessGroup | None
) -> dict[str, About]:
    """Shape and dtype of every tensor that some rank holds a part of.

    ValueError on every rank if a shard is not within its tensor, or two ranks have
    different tensors under one name.
    """
    mine: dict[str, About] = {}
    with raising_everywhere(ValueError, group=group):
        for shard in shards:
            shard.check()
            if mine.setdefault(shard.name, shard.about) != shard.about:
                raise ValueError(f"two shards of different tensors {shard.name}")
    everywhere = values_of_all(mine, group)
    wanted: dict[str, tuple[int, About]] = {}
    for rank, theirs in enumerate(everywhere):
        for name, about in theirs.items():
            first, known = wanted.setdefault(name, (rank, about))
            if known != about:
                raise ValueError(
                    f"ranks {first} and {rank} hold parts of different tensors {name}: "
                    f"{list(known.shape)} {known.dtype}, "
                    f"{list(about.shape)} {about.dtype}"
                )
    return {name: about for name, (_, about) in wanted.items()}


@contextmanager
def open_everywhere(
    path: str | Path, group: ProcessGroup | None
) -> Iterator[CheckpointReader]:
    """A checkpoint, or the newest of a run as rank 0 finds it, open on every rank."""
    failures = CheckpointReplaced, CheckpointError
    reader = name = None
    try:
        with raising_everywhere(*failures, group=group):
            if place_in(group)[0] == 0:
                reader, name = open_newest(path)  # kept open, so it stays there
        name = value_of_rank_0(name, group)
        with raising_everywhere(*failures, group=group):
            reader = reader or open_same(path, name)
        assert reader is not None
        yield reader
    finally:
        if reader is not None:
            reader.close()


def check_same_checkpoint(reader: CheckpointReader, group: ProcessGroup | None) -> None:
    """CheckpointError on every rank unless all have opened the same one."""
    theirs = values_of_all((str(reader.path), reader.checksum), group)
    for rank, (path, checksum) in enumerate(theirs):
        if checksum != theirs[0][1]:
            raise CheckpointError(
                f"ranks 0 and {rank} load different checkpoints: {theirs[0][0]} and "
                f"{path}"
            )
