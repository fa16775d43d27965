"""A decoder on context ranks, with tensor ranks besides, beside the whole one."""

from typing import NamedTuple

import torch

from tests.devices import randint
from tests.model.test_on_a_mesh import check_weights, close, config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel

LENGTH, ROWS, STEPS = 24, 3, 3  # 24 tokens are cut by zigzag on 1 to 4 ranks
LIMIT = 0.3  # below the norm of every step


class Case(NamedTuple):
    """How a model is cut, and what of its config is changed."""

    context: int
    tensor: int = 1
    attention: str = "ring"
    balance: str | None = None
    sequence_parallel: bool = False
    changes: tuple[tuple[str, object], ...] = ()

    def mesh(self):
        """With the axes that are above one alone; a whole model has none."""
        sizes = {"context": self.context, "tensor": self.tensor}
        sizes = {axis: n for axis, n in sizes.items() if n > 1} or {"context": 1}
        return init_mesh(tuple(sizes.values()), tuple(sizes))

    def config(self):
        return config_of(**dict(self.changes))

    def model(self) -> XtrainModel:
        return XtrainModel(
            self.config(),
            self.mesh(),
            sequence_parallel=self.sequence_parallel,
            context_attention=self.attention,
            context_balance=self.balance,
            dtype=torch.float64,
        )


def batch(step: int, rows: int = ROWS, length: int = LENGTH):
    """Tokens and labels; whole parts of the sequence have no label, and whole rows."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = randint(24, (2, rows, length), generator)
    if step % 3 == 0:
        labels[:, : 2 * length // 3] = -100  # cut into runs, a rank has none
    if step % 3 == 1:
        labels[:, 1 : length - 1] = -100  # zigzag: rank 0 alone has any
    labels[1, step:] = -100
    return tokens, labels


class Twins:
    """A cut model and the whole one, which take the same steps."""

    def __init__(self, case: Case):
        self.case, self.cut = case, case.model()
        self.whole = XtrainModel(case.config(), dtype=torch.float64)
        models = self.whole, self.cut
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.03) for m in models]

    def check_logits(self, tokens, positions) -> None:
        """This rank's tokens and columns, and all of them in their order."""
        right = self.whole(tokens, positions=positions)
        gathered = self.cut(tokens, positions=positions, gather_logits=True)
        close(gathered, right, f"{self.case} gathered logits")
        local = self.cut(tokens, positions=positions)
        if self.cut.context is not None:
            right = self.cut.context.shard(right)
        if self.cut.tensor is not None:
            right = right.chunk(self.case.tensor, -1)[self.cut.tensor.rank()]
        close(local, right, f"{self.case} logits")

    def gradients(self, tokens, labels, positions=None) -> None:
        """Loss and every gradient, before anything is compared."""
        losses = [m(tokens, labels, positions) for m in (self.whole, self.cut)]
        for optimizer, loss in zip(self.optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        self.cut.sync_gradients()
        close(losses[1], losses[0], f"{self.case} loss")

    def check_gradients(self) -> None:
        for name, parameter in self.cut.named_parameters():
            right = self.cut.placement(name).of(self.whole.get_parameter(name).grad)
            close(parameter.grad, right, f"{self.case} gradient {name}")

    def step(self) -> None:
        norms = [m.clip_grad_norm_(LIMIT) for m in (self.whole, self.cut)]
        assert norms[0] > 2 * LIMIT
        close(norms[1].double(), norms[0], f"{self.case} norm")
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self) -> None:
        """Everything of STEPS steps."""
        for step in range(STEPS):
            tokens, labels = batch(step)
            positions = None
            if step == 1:
                positions = torch.arange(LENGTH) * 3
            if step == 2:  # packed: every row begins anew somewhere
                positions = (torch.arange(LENGTH) + torch.arange(ROWS)[:, None]) % 9
            self.check_logits(tokens, positions)
            self.gradients(tokens, labels, positions)
            self.check_gradients()
            self.step()
        check_weights(self.cut, self.whole, f"{self.case} after {STEPS} steps")


def train_all(cases: list[Case]) -> None:
    for case in cases:
        Twins(case).train()
