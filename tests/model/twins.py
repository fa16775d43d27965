"""A decoder cut over a mesh beside the whole one: sizes, batches, the same steps."""

from typing import Any, NamedTuple

import torch

from tests.devices import randint
from xtrain.comm import init_mesh
from xtrain.model import RopeScaling, XtrainConfig, XtrainModel

STEPS = 3
LIMIT = 0.3  # below the norm of every step
LENGTH, ROWS = 24, 3  # of `sparse_batch`; zigzag cuts 24 tokens on 1 to 4 ranks
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
PARTS = {  # of Qwen2, Qwen3 and Mistral, and a vocabulary that is padded
    "qkv_bias": True,
    "qk_norm": True,
    "sliding_window": 7,
    "max_window_layers": 1,
}
LOSSES = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}


def config_of(**changes) -> XtrainConfig:
    sizes = {
        "vocab_size": 24,
        "hidden_size": 7,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "initializer_range": 0.4,
        "rope_theta": 1000.0,
        "rope_scaling": RopeScaling(factor=5.0, original_max_position_embeddings=120),
    }
    return XtrainConfig(**(sizes | changes))


def close(found, expected, what=""):
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


def check_weights(cut, whole, what) -> None:
    """Every parameter of `cut` is its slice of the whole model's."""
    for name, parameter in cut.named_parameters():
        place = cut.placement(name)
        close(parameter.detach(), place.of(whole.get_parameter(name)), f"{what} {name}")


def batch(seed: int, rows: int = 2, sequence: int = 12):
    """Tokens and labels; more labels are ignored in later rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = randint(24, (2, rows, sequence), generator)
    for row in range(rows):
        labels[row, : 3 * row] = -100
    return tokens, labels


def sparse_batch(step: int, rows: int = ROWS, length: int = LENGTH):
    """Tokens and labels; whole parts of the sequence have no label, and whole rows."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = randint(24, (2, rows, length), generator)
    if step % 3 == 0:
        labels[:, : 2 * length // 3] = -100  # cut into runs, a rank has none
    if step % 3 == 1:
        labels[:, 1 : length - 1] = -100  # zigzag: rank 0 alone has any
    labels[1, step:] = -100
    return tokens, labels


def batch_of_ranks(step: int, ranks: int):
    """Tokens and labels of 2 rows a rank; some rows have no label."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = randint(24, (2, 2 * ranks, 8), generator)
    for row in range(2 * ranks):
        labels[row, : 5 * row % 9] = -100
    tokens[-1] = 3  # a row of one token: all its copies go to the same experts
    return tokens, labels


def mask_of(labels):
    """False for the end of some rows, and for the whole of one; their labels go."""
    rows, length = labels.shape
    kept = length - torch.arange(rows) * 3 % (length + 1)
    mask = torch.arange(length) < kept[:, None]
    labels[~mask] = -100
    return mask.to(labels.device)


def documents_of(rows: int, length: int):
    """Packed ones of several lengths; one row ends in padding, one is a document."""
    ids = torch.arange(length) // torch.tensor([5, 9, length])[:rows, None]
    ids[1, -4:] = -1
    return ids


class Case(NamedTuple):
    """How a model is cut, and what of its config is changed."""

    expert_data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    attention: str = "ring"
    balance: str | None = None
    sequence_parallel: bool = False
    changes: dict[str, Any] | None = None
    padded: bool = False
    documents: bool = False
    once_a_rank: bool = False
    axes: tuple[str, ...] = ()  # the mesh has these also with one rank

    def mesh(self):
        sizes = {axis: getattr(self, axis) for axis in AXES}
        sizes = {axis: n for axis, n in sizes.items() if n > 1 or axis in self.axes}
        return init_mesh(tuple(sizes.values()), tuple(sizes))

    def model(self) -> XtrainModel:
        return XtrainModel(
            config_of(**(self.changes or {})),
            self.mesh(),
            sequence_parallel=self.sequence_parallel,
            context_attention=self.attention,
            context_balance=self.balance,
            once_a_rank=self.once_a_rank,
            dtype=torch.float64,
        )


class Twins:
    """A cut model and the whole one, which take the same steps."""

    def __init__(self, case: Case):
        self.case, self.cut = case, case.model()
        self.whole = XtrainModel(self.cut.config, dtype=torch.float64)
        self.models = self.whole, self.cut
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.03) for m in self.models
        ]

    def own_rows(self, whole):
        """Those of this rank."""
        if whole is None or self.cut.data is None:
            return whole
        return whole.chunk(self.cut.data.size())[self.cut.data.rank()]

    def documents(self, tokens):
        """Of these tokens, or None."""
        if not self.case.documents:
            return None
        return documents_of(*tokens.shape).to(tokens.device)

    def check_logits(self, tokens, positions) -> None:
        """This rank's tokens and columns, and all of them in their order."""
        given = {"positions": positions, "documents": self.documents(tokens)}
        right = self.whole(tokens, **given)
        gathered = self.cut(tokens, **given, gather_logits=True)
        vocabulary = self.whole.config.vocab_size
        assert gathered.shape[-1] == vocabulary
        close(gathered, right[..., :vocabulary], f"{self.case} gathered logits")
        local = self.cut(tokens, **given)
        if self.cut.context is not None:
            cut = self.cut.context.of_batch(tokens.shape[1], given["documents"])
            right = cut.shard(right)
        if self.cut.tensor is not None:
            right = right.chunk(self.case.tensor, -1)[self.cut.tensor.rank()]
        close(local, right, f"{self.case} logits")

    def gradients(self, tokens, labels, positions=None, mask=None) -> None:
        """Loss and every gradient, before gradients are compared."""
        own = [self.own_rows(x) for x in (tokens, labels)]
        ids = self.documents(tokens)
        own_ids = self.own_rows(ids)
        losses = [
            self.whole(tokens, labels, positions, token_mask=mask, documents=ids),
            self.cut(
                *own, positions, token_mask=self.own_rows(mask), documents=own_ids
            ),
        ]
        for optimizer, loss in zip(self.optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        self.cut.sync_gradients()
        close(losses[1], losses[0], f"{self.case} loss")

    def check_gradients(self) -> None:
        for name, parameter in self.cut.named_parameters():
            right = self.cut.placement(name).of(self.whole.get_parameter(name).grad)
            assert self.cut.config.num_local_experts or right.abs().max() > 1e-9
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
            if self.cut.config.num_local_experts:
                ranks = self.case.expert_data * self.case.expert
                tokens, labels = batch_of_ranks(step, ranks)
                mask = mask_of(labels) if self.case.padded else None
                self.gradients(tokens, labels, mask=mask)
            else:
                tokens, labels = sparse_batch(step)
                spaced = torch.arange(LENGTH) * 3
                packed = (torch.arange(LENGTH) + torch.arange(ROWS)[:, None]) % 9
                positions = (None, spaced, packed)[step]
                self.check_logits(tokens, positions)
                self.gradients(tokens, labels, positions)
            self.check_gradients()
            self.step()
        self.check_biases()
        check_weights(self.cut, self.whole, f"{self.case} after {STEPS} steps")


def train_all(cases: list[Case]) -> None:
    for case in cases:
        Twins(case).train()
