"""One description of a job, from which every engine's file is written.

    Job(name="run", recipe="bytes", options=("--layout.data=16",), nodes=2)
     |- ranks       nodes x gpus_per_node, which the recipe's layout must have
     |- train       the words after `xtrain train`, with checkpoints on shared storage
     `- variables   the environment of every rank

What fails is started again and goes on from its newest checkpoint. So a job always has
a folder that all nodes see, an interval between checkpoints, and resume=auto.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from xtrain.plan.checks import require_positive, require_whole, shown
from xtrain.train.elastic import fitted
from xtrain.train.loading import load_recipe
from xtrain.train.overrides import overridden
from xtrain.train.recipe import Recipe

GRACE = 120
"""Seconds from SIGTERM to SIGKILL, in which ranks may end in good order."""
VARIABLES = {
    "OMP_NUM_THREADS": "8",
    "NCCL_DEBUG": "WARN",
    "PYTHONUNBUFFERED": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""The last one gives each start of the ranks a store of its own: in one that outlives
them, ranks find the addresses of the start before (pytorch issue 135712)."""
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
SAVES = 20
"""Checkpoints of a run whose recipe names no interval."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of `xtrain train` on so many machines.

    Raises:
        ValueError: the layout has another number of ranks, the recipe or an option is
            not known, resume is not auto, or a value does not fit its field.
    """

    name: str
    """A DNS label: a to z, digits and -, at most 40 characters."""
    recipe: str
    """As `xtrain train` takes it; a FILE.py must be there on every node."""
    options: tuple[str, ...] = ()
    """Of the recipe: `--layout.data=16`."""
    nodes: int = 1
    min_nodes: int | None = None
    """The run goes on with so many, if no more are there; all of them unless given."""
    gpus_per_node: int = 8
    """Ranks of a node; each has a GPU unless the recipe has device=cpu."""
    image: str = "xtrain:latest"
    """Of the container, on Kubernetes."""
    hours: float = 24.0
    """The job ends after this time at the latest, on Slurm and Kubernetes."""
    max_restarts: int = 3
    """How often ranks are started again after a failure."""
    port: int = 29400
    """Of the rendezvous, on the first node."""
    folder: str = "/shared"
    """Storage that all nodes see under this absolute path."""
    claim: str = "shared"
    """The PersistentVolumeClaim behind `folder`, on Kubernetes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every rank, over `VARIABLES`."""

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("nodes", "gpus_per_node"):
            require_whole(name, getattr(self, name))
        require_whole("max_restarts", self.max_restarts, least=0)
        require_positive("hours", self.hours)
        require_whole("port", self.port, least=1024)
        if self.port > 65535:
            raise ValueError(f"port={self.port} is above 65535")
        made = self.made
        if self.min_nodes is not None:
            require_whole("min_nodes", self.min_nodes)
            if self.min_nodes > self.nodes:
                raise ValueError(
                    f"min_nodes={self.min_nodes} is above nodes={self.nodes}"
                )
        if made.layout.gpus != self.ranks:
            raise ValueError(
                f"the layout has {made.layout.gpus} ranks, and nodes={self.nodes} x "
                f"gpus_per_node={self.gpus_per_node} are {self.ranks}: they must be "
                "equal"
            )
        if made.checkpoint.folder is None:
            raise ValueError("checkpoint.folder is none: a restart would begin anew")
        if made.checkpoint.resume != "auto":
            raise ValueError(
                f"checkpoint.resume={shown(made.checkpoint.resume)} is not auto: each "
                "start would begin there, and not with the job's newest checkpoint"
            )
        for nodes in range(self.min_nodes or self.nodes, self.nodes):
            fitted(made, nodes * self.gpus_per_node)

    def _check_names(self) -> None:
        for name in ("name", "claim"):
            if not LABEL.fullmatch(getattr(self, name)):
                raise ValueError(
                    f"{name}={shown(getattr(self, name))} is not a DNS label: a to z, "
                    "digits and -, at most 40, a letter first and no - last"
                )
        if not re.fullmatch(r"[!-~]+", self.image):
            raise ValueError(f"image={shown(self.image)} is not the name of an image")
        if not self.folder.startswith("/") or self.folder.strip("/") == "":
            raise ValueError(
                f"folder={shown(self.folder)} is not an absolute path below /: all "
                "nodes see it under the same name"
            )
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{shown(name)} is not the name of a variable")
        written = (self.recipe, *self.options, self.folder, *self.environment.values())
        for word in written:
            if not word.isprintable():
                raise ValueError(
                    f"{shown(word)} has a line break or another character that is not "
                    "printable: no file of an engine holds it"
                )

    @cached_property
    def made(self) -> Recipe:
        """The recipe with the options; checkpoints go to `folder` unless it has one."""
        return overridden(load_recipe(self.recipe), self._words)

    @cached_property
    def _words(self) -> list[str]:
        words = list(self.options)
        if load_recipe(self.recipe).checkpoint.folder is None:
            place = f"{self.folder.rstrip('/')}/{self.name}"
            words.insert(0, f"--checkpoint.folder={place}")
        return words if self.min_nodes is None else [*words, "--elastic"]

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nodes_taken(self) -> str:
        """MIN:MAX, or how many, as torchrun has it."""
        few = self.min_nodes
        return str(self.nodes) if few is None else f"{few}:{self.nodes}"

    @property
    def on_gpus(self) -> bool:
        return self.made.device != "cpu"

    @property
    def seconds(self) -> int:
        """Of `hours`, at least one."""
        return max(1, round(self.hours * 3600))

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every rank."""
        return VARIABLES | dict(self.environment)

    @property
    def train(self) -> list[str]:
        """The words after `xtrain train`."""
        words = [self.recipe, *self._words]
        if self.made.checkpoint.every is None:
            words.append(f"--checkpoint.every={max(1, self.made.steps // SAVES)}")
        return [*words, "--checkpoint.resume=auto"]
