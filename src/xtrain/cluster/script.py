"""A script as `torchrun` would run it, on every rank of a virtual cluster.

    torchrun               a process a rank, its place in the environment, __main__ is
                           the script, init_process_group("nccl") finds the others
    here                   a thread a rank, its own environment, __main__ and globals;
                           the script's groups are on "xtrain-virtual", whatever
                           backend it names

Modules that the script imports exist once, for all ranks.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from xtrain.cluster import running
from xtrain.cluster.group import NAME
from xtrain.cluster.virtual_cluster import VirtualCluster


class ScriptExit(RuntimeError):
    """A rank has called `sys.exit` with a code that is not 0."""


class NotAScript(ValueError):
    """A file that is not Python."""


def run_script(
    cluster: VirtualCluster,
    script: Path,
    arguments: Sequence[str] = (),
    per_node: int | None = None,
) -> None:
    """Run a script as __main__ on every rank.

    Args:
        arguments: `sys.argv` after its name.
        per_node: ranks of a node, for LOCAL_RANK; None: all are in one.

    Raises:
        OSError: the script cannot be read.
        NotAScript: it is not Python.
        RankError: a rank raised; see `VirtualCluster.run`.
    """
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as problem:
        raise NotAScript(f"{script} is not Python: {problem}") from None
    main = sys.modules["__main__"]
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with groups_taken_over():
            cluster.run(Body(code, str(script), per_node or cluster.size))
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main


class Body:
    """The script on one rank."""

    def __init__(self, code: CodeType, file: str, per_node: int):
        self.code, self.file, self.per_node = code, file, per_node
        self.__qualname__ = file

    def __deepcopy__(self, memo: Any) -> "Body":
        return self

    def __call__(self, rank: int, size: int) -> None:
        dist.destroy_process_group()  # the script makes its own
        os.environ.update(place_of(rank, size, self.per_node))
        main = ModuleType("__main__")
        main.__dict__.update(__file__=self.file, __builtins__=__builtins__)
        running.cluster().scheduler.current.state.main = main
        sys.modules["__main__"] = main
        try:
            exec(self.code, main.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptExit(f"sys.exit({end.code!r})") from None
        finally:
            main.__dict__.clear()  # frees tensors here, and not in another rank's turn


def place_of(rank: int, size: int, per_node: int) -> dict[str, str]:
    """The environment that `torchrun` gives to a rank."""
    node = rank // per_node
    local = min(per_node, size - node * per_node)
    values = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": local, "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": -(-size // per_node), "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "virtual",
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def groups_taken_over() -> Iterator[None]:
    """Groups of any backend are made on the cluster, and found without a network."""
    helper, rendezvous = c10d._new_process_group_helper, c10d.rendezvous

    def make(
        size: int, rank: int, ranks: list[int], backend: Any, store: Any, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        options["backend_options"] = options["device_id"] = None
        if not ranks:
            size, rank, store = check_place(size, rank), own_rank(), own_store()
        return helper(size, rank, ranks, NAME, store, *rest, **options)

    def meet(url: str, rank: int = -1, size: int = -1, **options: Any) -> Iterator[Any]:
        size = check_place(size, rank)
        yield own_store(), own_rank(), size

    c10d._new_process_group_helper, c10d.rendezvous = make, meet  # type: ignore
    try:
        yield
    finally:
        c10d._new_process_group_helper, c10d.rendezvous = helper, rendezvous


def own_rank() -> int:
    return running.cluster().scheduler.current.number


def own_store() -> dist.Store:
    return running.cluster().store


def check_place(size: int, rank: int) -> int:
    """ValueError for a rank or a size that are not this rank's; the size."""
    cluster = running.cluster()
    if size not in (-1, cluster.size) or rank not in (-1, own_rank()):
        raise ValueError(
            f"init_process_group: rank {rank} of world_size {size}, but this is rank "
            f"{own_rank()} of a cluster of {cluster.size}"
        )
    return cluster.size
