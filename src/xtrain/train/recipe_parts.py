"""The parts of a recipe that only training has: data, optimizer, logs, checkpoints.

The line under a field is its help on the command line; `None` is `none` there.
"""

import re
from dataclasses import dataclass
from typing import Literal

from xtrain.plan.checks import require_positive, require_whole
from xtrain.train.values import check_types

MOST_THREADS = 1024  # of a rank


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on."""

    path: str | None = None
    """A file of tokens, or of text; unless given the source text of Python's standard
    library."""
    validation: str | None = None
    """The same to evaluate on; the standard library has a part of its own for it."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizer.json` for text; unless given that of
    checkpoint.load_hf, if it has one, else an id a byte."""
    sequence: int = 128
    """Tokens of one sequence."""
    packing: Literal["stream", "documents"] = "stream"
    """One stream that is cut every `sequence` tokens, or documents packed whole."""
    document_masks: bool = False
    """Tokens see their own document only, as they always do when packed whole."""
    shuffle: bool = True
    """Each epoch takes the sequences in an order of its own."""
    workers: int = 0
    """Threads of a rank that make batches ahead."""

    def __post_init__(self) -> None:
        check_types(self)
        check_not_empty(self, "path", "validation", "tokenizer")
        require_whole("sequence", self.sequence)
        require_whole("workers", self.workers, least=0)
        require_at_most("workers", self.workers, MOST_THREADS)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its constants."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon takes the matrices of layers and leaves all other parameters to adamw."""
    lr: float = 1e-3
    """Learning rate at its peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How much of adamw's means is kept from step to step."""
    eps: float = 1e-8
    """Keeps adamw from dividing by zero."""
    weight_decay: float = 0.1
    """Of the weights a step, times the learning rate."""
    momentum: float = 0.95
    """How much of muon's mean is kept from step to step."""
    nesterov: bool = True
    """muon looks one step ahead."""
    ns_steps: int = 5
    """Iterations of muon's orthogonalization (Newton-Schulz)."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How muon's step grows with a matrix; the first way has one lr for both kinds."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of muon's products, and of what it sends."""
    balance_rate: float = 1e-3
    """How far a step moves the biases of routers, with model.balance_bias."""
    skip_nonfinite: int = 0
    """So many steps in a row may be left out because loss or norm is nan or inf; the
    next one ends the run, and names the first tensor."""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive("lr", self.lr)
        require_positive("eps", self.eps)
        require_whole("ns_steps", self.ns_steps)
        require_whole("skip_nonfinite", self.skip_nonfinite, least=0)
        for name in ("weight_decay", "balance_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is below 0")
        for name, value in (
            ("betas", self.betas[0]),
            ("betas", self.betas[1]),
            ("momentum", self.momentum),
        ):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Log:
    """Where the numbers of a run go."""

    jsonl: str | None = None
    """A file with a line a step: step, loss, grad_norm, tokens_per_s."""
    tensorboard: str | None = None
    """A folder for TensorBoard."""
    wandb: str | None = None
    """A project of Weights & Biases."""
    every: int = 1
    """Steps from one line to the next where the output is not a terminal."""
    profile: str | None = None
    """Steps to profile, "first:last", both included; the first one of a run is 1."""
    profile_folder: str = "profile"
    """Where the profiler's traces go, one a rank."""

    flight_recorder: str | None = None
    """A folder for each rank's last calls, written when the run hangs or fails; `xtrain
    hang` reads them."""
    stragglers: int | None = None
    """Steps from one comparison of the ranks to the next: one that is slow is named,
    with its seconds; never unless given. On the CPU alone."""

    def __post_init__(self) -> None:
        check_types(self)
        check_not_empty(self, "jsonl", "tensorboard", "wandb", "profile_folder")
        check_not_empty(self, "flight_recorder")
        require_whole("every", self.every)
        if self.stragglers is not None:
            require_whole("stragglers", self.stragglers)
        if self.profile is not None and self.profile_window is None:
            raise ValueError(
                f"profile={self.profile!r} is not first:last, two steps from 1 on"
            )

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The first and the last step that are profiled."""
        found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", self.profile or "")
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            return None
        return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is kept of a run, and what it begins with."""

    folder: str | None = None
    """Where checkpoints are written; none are unless given."""
    every: int | None = None
    """Steps from one to the next; only after the last step unless given."""
    keep: int | None = None
    """So many of the newest stay; all unless given."""
    resume: str | None = "auto"
    """auto goes on from the newest in `folder`, if there is one; a path from that one;
    none begins anew."""
    background: bool = False
    """Written by other processes while training goes on, from a copy in memory."""
    grace: float = 25.0
    """Seconds from SIGTERM to the end of the step, at which all ranks save; a rank that
    gets no further ends then. Below what its engine waits: torchrun 30 s."""
    load_hf: str | None = None
    """A folder of a Hugging Face model, config.json and safetensors: the run has its
    model, and begins with its weights unless it goes on from a checkpoint."""
    save_hf: str | None = None
    """A folder for the model at the end, as Hugging Face's files, in the dtype of those
    it began with, else of the run; not there yet, empty, or of an earlier run of this
    model, which is replaced: a tokenizer that was added stays."""
    format: Literal["xtrain"] = "xtrain"
    """Of the files: any layout reads what any layout wrote."""

    def __post_init__(self) -> None:
        check_types(self)
        check_not_empty(self, "folder", "resume", "load_hf", "save_hf")
        require_positive("grace", self.grace)
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is None:
                continue
            require_whole(name, value)
            if self.folder is None:
                raise ValueError(f"{name}={value} without a folder for checkpoints")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """The loss on data that is not trained on."""

    every: int | None = None
    """Steps from one evaluation to the next; none unless given."""
    batches: int = 8
    """Of the size of a step's, the same ones each time."""

    def __post_init__(self) -> None:
        check_types(self)
        require_whole("batches", self.batches)
        if self.every is not None:
            require_whole("every", self.every)


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Text that the model writes."""

    prompt: str | None = None
    """What it goes on from; no text is written unless given."""
    tokens: int = 64
    """How many it adds."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most probable token."""
    every: int | None = None
    """Steps from one text to the next; only after the last step unless given."""

    def __post_init__(self) -> None:
        check_types(self)
        require_whole("tokens", self.tokens)
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r} is below 0")
        if self.every is not None:
            require_whole("every", self.every)


def require_at_most(name: str, value: int, most: int) -> None:
    """ValueError for a number that no machine can do."""
    if value > most:
        raise ValueError(f"{name}={value} is above {most}")


def check_not_empty(part: object, *names: str) -> None:
    """ValueError for a name or path that is an empty text."""
    for name in names:
        if getattr(part, name) == "":
            raise ValueError(f"{name}='' is empty: give none, or leave it out")
