"""A decoder with experts, over expert ranks and others, beside the whole one."""

from typing import NamedTuple

import torch

from tests.devices import randint
from tests.model.test_on_a_mesh import check_weights, close, config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel

LENGTH, ROWS, STEPS = 8, 2, 3  # rows of each rank that brings a batch
LIMIT = 0.3  # below the norm of every step
AXES = ("expert_data", "expert", "context", "tensor")
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 8}
DEEPSEEK = MIXTRAL | {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "balance_bias": True,
}
LOSSES = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}


class Case(NamedTuple):
    """How a model is cut, and what of its config is changed."""

    expert_data: int
    expert: int
    context: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    kind: str = "mixtral"
    losses: bool = False
    padded: bool = False
    changes: tuple[tuple[str, object], ...] = ()

    @property
    def ranks(self) -> int:
        """That bring batches of their own."""
        return self.expert_data * self.expert

    def mesh(self):
        """With the axes that are above one alone; a whole model has one."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        sizes = {axis: n for axis, n in sizes.items() if n > 1} or {"expert": 1}
        return init_mesh(tuple(sizes.values()), tuple(sizes))

    def config(self):
        kind = MIXTRAL if self.kind == "mixtral" else DEEPSEEK
        losses = LOSSES if self.losses else {}
        return config_of(**(kind | losses | dict(self.changes)))

    def model(self) -> XtrainModel:
        options = {"sequence_parallel": self.sequence_parallel}
        return XtrainModel(self.config(), self.mesh(), dtype=torch.float64, **options)


def batch(step: int, ranks: int):
    """Tokens and labels of all ranks; some rows have no label."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, ROWS * ranks, LENGTH)
    tokens, labels = randint(24, shape, generator)
    for row in range(ROWS * ranks):
        labels[row, : 5 * row % (LENGTH + 1)] = -100
    tokens[-1] = 3  # a row of one token: all its copies go to the same experts
    return tokens, labels


def mask_of(labels):
    """False for the end of some rows, and for the whole of one; their labels go."""
    rows, length = labels.shape
    kept = length - torch.arange(rows) * 3 % (length + 1)
    mask = torch.arange(length) < kept[:, None]
    labels[~mask] = -100
    return mask.to(labels.device)


def own_rows(model: XtrainModel, *whole: torch.Tensor):
    """Those of this rank."""
    if model.data is None:
        return whole
    rank, size = model.data.rank(), model.data.size()
    return [t.chunk(size)[rank] for t in whole]


class Twins:
    """A cut model and the whole one, which take the same steps."""

    def __init__(self, case: Case):
        self.case, self.cut = case, case.model()
        self.whole = XtrainModel(case.config(), dtype=torch.float64)
        self.models = self.whole, self.cut
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.03) for m in self.models
        ]

    def gradients(self, step: int) -> None:
        """Loss and every gradient."""
        full = batch(step, self.case.ranks)
        whole, own = {}, {}
        if self.case.padded:
            whole["token_mask"] = mask_of(full[1])
            own["token_mask"] = own_rows(self.cut, whole["token_mask"])[0]
        rows = own_rows(self.cut, *full)
        losses = self.whole(*full, **whole), self.cut(*rows, **own)
        for optimizer, loss in zip(self.optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        self.cut.sync_gradients()
        close(losses[1], losses[0], f"{self.case} loss")
        for name, parameter in self.cut.named_parameters():
            right = self.cut.placement(name).of(self.whole.get_parameter(name).grad)
            close(parameter.grad, right, f"{self.case} gradient {name}")

    def step(self) -> None:
        norms = [m.clip_grad_norm_(LIMIT) for m in self.models]
        assert norms[0] > 2 * LIMIT
        close(norms[1].double(), norms[0], f"{self.case} norm")
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.step()
            if model.config.balance_bias:
                model.update_balance_biases(0.05)

    def check_biases(self) -> None:
        right = dict(self.whole.named_buffers())
        assert bool(right) == self.whole.config.balance_bias
        for name, buffer in self.cut.named_buffers():
            close(buffer, right[name], f"{self.case} {name}")
            assert buffer.abs().max() > 0.04

    def train(self) -> None:
        """Everything of STEPS steps."""
        check_weights(self.cut, self.whole, f"{self.case} at the start")
        for step in range(STEPS):
            self.gradients(step)
            self.step()
        self.check_biases()
        check_weights(self.cut, self.whole, f"{self.case} after {STEPS} steps")


def train_all(cases: list[Case]) -> None:
    for case in cases:
        Twins(case).train()
