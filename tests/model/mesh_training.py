"""The decoder trained on a mesh of ranks under one wrapper over data, by name."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from tests.devices import randint
from tests.model.twins import config_of
from xtrain.checkpoint import load_checkpoint, save_checkpoint
from xtrain.comm import init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import (
    FullyShardedDataParallel,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
)

ROWS, SEQUENCE = 8, 12  # of a step's batch, whose rows the data ranks share
WRAPPERS = "plain", "ddp", "zero 1", "zero 2", "fsdp"


def batch(step: int):
    """Tokens and labels; rows have unequal numbers of valid labels, one has none."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, ROWS, SEQUENCE)
    tokens, labels = randint(24, shape, generator)
    for row in range(ROWS):
        labels[row, : 5 * row % (SEQUENCE + 1)] = -100
    return tokens, labels


class Layout(NamedTuple):
    """A wrapper over `data` ranks of a model that is cut over the others.

    With `expert` ranks the axis of the data ranks is "expert_data".
    """

    wrapper: str
    data: int
    tensor: int
    context: int = 1
    attention: str = "ring"
    expert: int = 0

    @property
    def size(self) -> int:
        return self.batches * self.context * self.tensor

    @property
    def batches(self) -> int:
        """How many ranks bring their own."""
        return self.data * max(1, self.expert)

    @property
    def axis(self) -> str:
        """Of the wrapper."""
        return "expert_data" if self.expert else "data"

    def mesh(self):
        sizes = {self.axis: self.data, "expert": self.expert}
        sizes |= {"context": self.context, "tensor": self.tensor}
        if self.context == 1:
            del sizes["context"]
        if not self.expert:
            del sizes["expert"]
        return init_mesh(tuple(sizes.values()), tuple(sizes))


def wrapped(bare, kind: str, low=None, lr=0.03, eps=1e-8, **options):
    """(what is called, its AdamW) of a model under a wrapper with these options."""
    model, adamw = bare, torch.optim.AdamW
    if low is not None and kind != "fsdp":
        bare.to(low)
    if kind == "ddp":
        model = DistributedDataParallel(bare, **options)
    if kind == "fsdp":
        options["compute_dtype"] = low
        model = FullyShardedDataParallel(bare, blocks=[DecoderLayer], **options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind.startswith("zero"):
        options |= {"stage": int(kind[-1]), "bucket_cap_mb": 2**-9}
        return model, ZeroOptimizer(parameters, adamw, lr=lr, eps=eps, **options)
    if low is not None and kind != "fsdp":
        return model, MixedPrecisionOptimizer(parameters, adamw, lr=lr, eps=eps)
    return model, adamw(parameters, lr=lr, eps=eps)


class MeshTraining:
    """A model and its optimizer in a layout; all train on the same batches.

    Args:
        changes: of the config.
        low: dtype of the weights in computation; masters keep fp32.
        micro_batches: of a step, all but the last in `no_sync`; each is a share of the
            rank's rows, and divided by the number of labels of the whole step.
    """

    def __init__(
        self,
        layout: Layout,
        changes: dict,
        dtype=torch.float64,
        low=None,
        lr=0.03,
        eps=1e-8,
        micro_batches=1,
        max_norm=None,
        sequence_parallel=False,
        frozen=(),
    ):
        self.layout, self.micro_batches = layout, micro_batches
        self.max_norm = max_norm
        self.mesh = layout.mesh()
        self.bare = XtrainModel(
            config_of(**changes),
            self.mesh,
            sequence_parallel=sequence_parallel,
            context_attention=layout.attention,
            dtype=dtype,
        )
        freeze(self.bare, frozen)
        self.data_group = self.mesh[layout.axis].get_group()
        options = {"gradient_reduction": "sum", "process_group": self.data_group}
        self.model, self.optimizer = wrapped(
            self.bare, layout.wrapper, low, lr, eps, **options
        )
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.losses.append(self.accumulate(step))
            self.bare.sync_gradients(
                skip=() if self.layout.wrapper == "plain" else (self.layout.axis,)
            )
            if self.max_norm is not None:
                self.norms.append(self.clip(self.max_norm).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.bare.config.balance_bias:
                self.bare.update_balance_biases(0.05)

    def accumulate(self, step: int) -> float:
        """Forwards and backwards of this rank's rows of the step's batch; the loss."""
        total = 0.0
        tokens, labels = batch(step)
        here, size = self.bare.data.rank(), self.layout.batches
        tokens, labels = (t.chunk(size)[here] for t in (tokens, labels))
        for micro in range(self.micro_batches):
            part = [x.chunk(self.micro_batches)[micro] for x in (tokens, labels)]
            with self.quiet() if micro < self.micro_batches - 1 else nullcontext():
                weight = share(step, micro, self.micro_batches, self.layout)
                loss = self.model(*part) * weight
                loss.backward()
                total += loss.item()
        return total

    def quiet(self):
        """The wrapper's `no_sync`; without a wrapper nothing is sent in backward."""
        inner = self.optimizer if "zero" in self.layout.wrapper else self.model
        return inner.no_sync() if hasattr(inner, "no_sync") else nullcontext()

    def clip(self, max_norm: float):
        if self.layout.wrapper == "fsdp":
            return self.model.clip_grad_norm_(max_norm)
        if self.layout.wrapper.startswith("zero"):
            return self.optimizer.clip_grad_norm_(max_norm, self.bare)
        return self.bare.clip_grad_norm_(max_norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """This tensor rank's slice of every parameter."""
        if self.layout.wrapper == "fsdp":
            full = self.model.full_state_dict()
            return {name: full[name] for name, _ in self.bare.named_parameters()}
        return {n: p.detach().clone() for n, p in self.bare.named_parameters()}

    def largest_error(self, expected: dict[str, torch.Tensor]) -> float:
        """Of every slice against its slice of the full weights."""
        found = self.weights()
        if self.bare.config.tie_word_embeddings:
            expected = {n: w for n, w in expected.items() if n != "lm_head.weight"}
        assert found.keys() == expected.keys()
        return max(
            (weight - self.bare.placement(name).of(expected[name])).abs().max().item()
            for name, weight in found.items()
        )

    def save(self, directory, step, with_optimizer=True, extra=None):
        optimizer = self.optimizer if with_optimizer else None
        if self.layout.wrapper == "fsdp":
            return self.model.save_sharded(directory, step, optimizer, extra)
        if self.layout.wrapper.startswith("zero"):
            return self.optimizer.save_sharded(directory, step, self.bare, extra)
        shards = self.bare.shards()
        return save_checkpoint(directory, step, shards, optimizer, extra)

    def load(self, path, with_optimizer=True):
        optimizer = self.optimizer if with_optimizer else None
        if self.layout.wrapper == "fsdp":
            return self.model.load_sharded(path, optimizer)
        if self.layout.wrapper.startswith("zero"):
            return self.optimizer.load_sharded(path, self.bare)
        return load_checkpoint(path, self.bare.shards(), optimizer)


def share(step: int, micro: int, micro_batches: int, layout: Layout) -> float:
    """What a micro-batch's mean weighs in the mean of the step's valid labels."""
    if micro_batches == 1:
        return 1.0
    _, labels = batch(step)
    counts = [
        (part.chunk(micro_batches)[micro] != -100).sum().item()
        for part in labels.chunk(layout.batches)
    ]
    return sum(counts) / (labels != -100).sum().item()


def freeze(model: XtrainModel, names: Iterable[str]) -> None:
    """No gradient for parameters whose names hold one of these."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))


def one_process(changes: dict, steps: int, max_norm=None, lr=0.03, eps=1e-8, frozen=()):
    """Weights after these steps in one process, the gradients' norms, the losses."""
    model = XtrainModel(config_of(**changes), dtype=torch.float64)
    freeze(model, frozen)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, eps=eps
    )
    norms, losses = [], []
    for step in range(steps):
        loss = model.loss(*batch(step))
        losses.append(loss.item())
        loss.backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        if model.config.balance_bias:
            model.update_balance_biases(0.05)
    return {n: p.detach() for n, p in model.named_parameters()}, norms, losses


def train_runs(runs, changes, expected, max_norm, tolerance):
    """Three steps of each (layout, options): (norms, losses); weights as expected."""
    found = []
    for layout, options in runs:
        run = MeshTraining(layout, changes, max_norm=max_norm, **options)
        run.train(0, 3)
        error = run.largest_error(expected)
        assert error < tolerance, f"{layout} {options}: {error}"
        found.append((run.norms, run.losses))
    return found


def check_training(
    world, runs, changes, max_norm=None, tolerance=1e-12, digits=1e-13
) -> None:
    """Each (layout, options) of `runs`, all of one size, trains as one process does.

    Args:
        max_norm: of the gradients, below the norm of every step.
        tolerance: of weights; `digits` is that of norms, relative.
    """
    expected, norms, losses = one_process(changes, 3, max_norm)
    assert max_norm is None or min(norms) > 2 * max_norm
    arguments = runs, changes, expected, max_norm, tolerance
    found = world(runs[0][0].size).run(train_runs, *arguments)
    for by_run in found:
        for run, (of_run, first) in zip(
            runs, zip(by_run, found[0], strict=True), strict=True
        ):
            assert of_run[0] == first[0], "norms have the same bits on each rank"
            assert of_run[0] == pytest.approx(norms, rel=digits, abs=0), run
            assert of_run[1] == pytest.approx(losses, rel=1e-12, abs=0), run
