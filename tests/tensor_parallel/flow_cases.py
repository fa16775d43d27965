"""The modules of the data-flow table: whole, cut, and which whole tensors have names.

`record` runs both on every rank, in float64 with the same weights and inputs, and
`holds` tells whether tensors of all ranks are a whole one in a declared state.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensor_parallel.calls import NAMES, collectives_of
from tests.tensor_parallel.dense import fill, mine, random_of
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.comm.work import Work
from xtrain.model import XtrainConfig
from xtrain.model.layer import Attention, SwiGLU
from xtrain.model.modules import PlainModules, TensorParallelModules
from xtrain.model.parameters import placement_of
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    ParallelAttention,
    ParallelSwiGLU,
    RowParallelLinear,
    VocabParallelEmbedding,
    attention,
    cross_entropy,
    embedding,
    functions,
    linear,
    mlp,
    norm,
    vocab_parallel_cross_entropy,
)
from xtrain.testing.transport import dumps

B, S, H, INNER, V = 3, 4, 8, 12, 20
CONFIG = XtrainConfig(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=INNER,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
NORMS = ("input_layernorm", "post_attention_layernorm")


class DenseLinear(nn.Linear):
    """`nn.Linear` that shows its product before the bias."""

    def __init__(self) -> None:
        super().__init__(H, INNER)
        self.product = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.linear(x, self.weight)) + self.bias


class DenseCrossEntropy(nn.Module):
    """Each token's loss, with the numbers between shown."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.sums = nn.Identity(), nn.Identity()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        largest = self.largest(logits.amax(-1).detach())
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        sums = self.sums(torch.stack([shifted.exp().sum(-1), target]))
        return sums[0].log() - sums[1]


class CutCrossEntropy(nn.Module):
    """The function as a module."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, reduction="none")


def cut_layer(sequence_parallel: bool, whole: nn.Module) -> nn.Module:
    """A decoder layer with this rank's slices of a whole one's weights."""
    group = dist.group.WORLD
    parts = TensorParallelModules(
        CONFIG, F.scaled_dot_product_attention, sequence_parallel, group
    )
    layer = parts.layer().double()
    for part in (
        layer.input_layernorm,
        layer.self_attn,
        layer.post_attention_layernorm,
    ):
        part.sum_gradients = True  # a model does that after backward
    full = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            place = placement_of(name, CONFIG, group.rank(), group.size())
            parameter.copy_(place.of(full[name]))
    return layer


@dataclass(frozen=True)
class Case:
    """A module of the table.

    Attributes:
        whole: makes it for one process; cut: makes the cut module of that.
        named: the whole tensors by name, each the input or the output of a submodule.
        input_dim, output_dim: of which a rank gets and gives its slice; None: whole.
    """

    whole: Callable[[], nn.Module]
    cut: Callable[[nn.Module], nn.Module]
    named: dict[str, tuple[str, str]]
    output_shape: tuple[int, ...] = (B, S, H)
    input: Callable[[], Tensor] = lambda: random_of(1, B, S, H)
    input_dim: int | None = None
    output_dim: int | None = None
    others: tuple[Any, ...] = ()

    def output_grad(self) -> Tensor:
        return random_of(7, *self.output_shape)


def ids(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(V, shape, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def ends(**named: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {"x": ("", "in"), **named, "y": ("", "out")}


def of_linear(cut: type, input_dim: int | None, output_dim: int | None) -> Case:
    named = ends(**{"x Wᵀ": ("product", "out")})
    return Case(lambda: fill(DenseLinear()), cut.from_full, named, (B, S, INNER),
                input_dim=input_dim, output_dim=output_dim)  # fmt: skip


def of_embedding(cut: type) -> Case:
    named = {"ids": ("", "in"), "y": ("", "out")}
    return Case(lambda: fill(nn.Embedding(V, H)), cut.from_full, named,
                input=partial(ids, B, S))  # fmt: skip


def inside(projections: str, last: str, result: str, at: str = ""):
    """What is named between the two matmuls of a block."""
    made = {name: (f"{at}{name}_proj", "out") for name in projections.split()}
    return made | {result: (f"{at}{last}", "in")}


def of_layer(sequence_parallel: bool) -> Case:
    named = ends(
        **{"norm of x": (NORMS[0], "out")},
        **inside("q k v", "o_proj", "heads' output", "self_attn."),
        **{"attention": ("self_attn", "out"), "x + attention": (NORMS[1], "in")},
        **{"its norm": (NORMS[1], "out")},
        **inside("gate up", "down_proj", "silu(gate) · up", "mlp."),
        MLP=("mlp", "out"),
    )
    dim = 1 if sequence_parallel else None
    parts = PlainModules(CONFIG, F.scaled_dot_product_attention)
    cut = partial(cut_layer, sequence_parallel)
    return Case(
        lambda: fill(parts.layer()),
        cut,
        named,
        input_dim=dim,
        output_dim=dim,
        others=(torch.arange(S),),
    )


CASES = {
    "column_linear": of_linear(ColumnParallelLinear, None, -1),
    "row_linear": of_linear(RowParallelLinear, -1, None),
    "vocab_parallel_embedding": of_embedding(VocabParallelEmbedding),
    "hidden_parallel_embedding": of_embedding(HiddenParallelEmbedding),
    "cross_entropy": Case(
        DenseCrossEntropy,
        lambda _: CutCrossEntropy(),
        {"logits": ("", "in"), "largest logit": ("largest", "out"),
         "sum of exp, label's": ("sums", "out"), "loss": ("", "out")},
        (B * S,),
        partial(random_of, 1, B * S, V),
        input_dim=-1,
        others=(ids(B * S),),
    ),
    "swiglu": Case(
        lambda: fill(SwiGLU(CONFIG)),
        ParallelSwiGLU.from_full,
        ends(**inside("gate up", "down_proj", "silu(gate) · up")),
    ),
    "attention": Case(
        lambda: fill(Attention(CONFIG)),
        ParallelAttention.from_full,
        ends(**inside("q k v", "o_proj", "heads' output")),
        others=(torch.arange(S),),
    ),
    "decoder_layer": of_layer(False),
    "decoder_layer_sequence_parallel": of_layer(True),
}  # fmt: skip


@dataclass
class Point:
    """A tensor on its way, and the gradient that arrives at it."""

    value: Tensor
    grad: Tensor | None = None


@dataclass
class Sent:
    """A collective: what this rank handed over and what it got."""

    kind: str
    before: Tensor
    after: Tensor
    point: Point | None = None


@dataclass
class Found:
    """What happened on a rank, in order.

    Attributes:
        points: tensors outside of the communicating functions.
        ways: the collectives of forward and of backward.
        calls: their names by the ledger, so that no other one is missed.
        before_sum: of a weight that ranks share: its gradient before it is summed.
    """

    points: list[Point] = field(default_factory=list)
    ways: dict[str, list[Sent]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    calls: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[str, Point] = field(default_factory=dict)
    before_sum: dict[str, Point] = field(default_factory=dict)


class Recorder:
    """Keeps what the layers' communicating functions are given and give back."""

    def __init__(self, module: nn.Module):
        self.found, self.way = Found(), "forward"
        self.seen: list[Tensor] = []
        self.names = {p.data_ptr(): name for name, p in module.named_parameters()}

    def see(self, tensors) -> None:
        """Tensors outside of the communicating functions, each once."""
        for one in tensors:
            if all(one is not other for other in self.seen):
                self.seen.append(one)
                self.found.points.append(point_of(one))

    def sent(self, kind: str, before: Tensor, after: Tensor, point=None) -> None:
        after = after.detach().clone()
        self.found.ways[self.way].append(Sent(kind, before, after, point))

    def matmul(self, function):
        def call(x, *rest, **options):
            self.see([x])
            y = function(x, *rest, **options)
            self.see([y] if isinstance(y, Tensor) else y)
            return y

        return call

    def gather(self, x, dim, group):
        whole = GATHER(x, dim, group)
        self.sent("all-gather", x.detach().clone(), whole)
        return whole

    def join(self, stacked, dim):
        """The end of an all-gather that began earlier."""
        whole = JOIN(stacked, dim)
        self.sent("all-gather", stacked[dist.get_rank()].clone(), whole)
        return whole

    def sum_async(self, x, dim, group):
        before = x.detach().clone()
        total, work = SUM_ASYNC(x, dim, group)
        work.wait()
        self.sent("all-reduce" if dim is None else "reduce-scatter", before, total)
        return total, Work()

    def operator(self, kind, function):
        def call(x, *rest):
            y = function(x, *rest)
            self.sent(kind, x.detach().clone(), y, point_of(x))
            return y

        return call

    def all_reduce(self, x, op=dist.ReduceOp.SUM, group=None):
        before = x.clone()
        dist.all_reduce(x, op, group=group)
        largest = op == dist.ReduceOp.MAX
        self.sent("all-reduce MAX" if largest else "all-reduce", before, x)

    def shared(self, function):
        def call(weight, *rest):
            y = function(weight, *rest)
            self.found.before_sum[self.names[weight.data_ptr()]] = point_of(y)
            return y

        return call


GATHER, JOIN, SUM_ASYNC = functions.gather, functions.join, functions._sum_async


def point_of(tensor: Tensor) -> Point:
    point = Point(tensor.detach().clone())
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: setattr(point, "grad", grad.detach().clone()))
    return point


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let all communication of the layers pass the recorder."""
    new = [
        *((module, "column_linear", recorder.matmul(functions.column_linear))
          for module in (attention, linear, mlp)),
        (linear, "row_linear", recorder.matmul(functions.row_linear)),
        (functions, "gather", recorder.gather),
        (functions, "join", recorder.join),
        (functions, "_sum_async", recorder.sum_async),
        *((embedding, name, recorder.operator(kind, getattr(embedding, name)))
          for kind, name in (("all-reduce", "all_reduce_identity"),
                             ("all-gather", "all_gather_split"))),
        (cross_entropy, "dist",
         SimpleNamespace(all_reduce=recorder.all_reduce, ReduceOp=dist.ReduceOp)),
        (attention, "identity_sum", recorder.shared(attention.identity_sum)),
        (norm, "identity_all_reduce_wide",
         recorder.shared(norm.identity_all_reduce_wide)),
    ]  # fmt: skip
    with ExitStack() as stack:
        for place, name, value in new:
            stack.enter_context(replaced(place, name, value))
        yield


def calls_of(ledger: CommLedger) -> list[str]:
    """The collectives of a ledger by name; messages between two ranks are none."""
    ops = [event.op.strip("_") for event in ledger.events]
    names = [[name for s, name in NAMES.items() if op.startswith(s)] for op in ops]
    return [found[0] for found in names if found]


def record(case: Case, cut=None) -> tuple[list[Found], dict[str, Point]]:
    """What every rank has found, and the whole tensors by name, weights among them."""
    whole = case.whole()
    dense = run_whole(case, whole)
    module = (cut or case.cut)(whole)
    recorder = Recorder(module)
    for name in NORMS:
        if hasattr(module, name):
            getattr(module, name).register_forward_hook(
                lambda _, args, y: recorder.see([args[0], y])
            )
    x = case.input() if case.input_dim is None else mine(case.input(), case.input_dim)
    grad = case.output_grad()
    if case.output_dim is not None:
        grad = mine(grad, case.output_dim)
    x = x.clone().requires_grad_(x.is_floating_point())
    with collectives_of("torch"), recording(recorder):
        with CommLedger() as forward:
            recorder.see([x])
            y = module(x, *(t.to(x.device) for t in case.others))
            recorder.see([y])
        recorder.way = "backward"
        with CommLedger() as backward:
            y.backward(grad)
    found = recorder.found
    found.calls = {"forward": calls_of(forward), "backward": calls_of(backward)}
    for name, p in module.named_parameters():
        found.weights[name] = Point(p.detach(), p.grad)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, dumps(found))  # tensors arrive on this device
    return [pickle.loads(found) for found in by_rank], dense


def run_whole(case: Case, whole: nn.Module) -> dict[str, Point]:
    """Every named tensor of the whole module and every weight, with its gradient."""
    found: dict[str, Point] = {}

    def keep(name: str, side: str):
        def hook(_, args, y) -> None:
            found[name] = point_of(args[0] if side == "in" else y)

        return hook

    for name, (at, side) in case.named.items():
        whole.get_submodule(at).register_forward_hook(keep(name, side))
    x = case.input()
    x.requires_grad_(x.is_floating_point())
    whole(x, *(t.to(x.device) for t in case.others)).backward(case.output_grad())
    weights = {n: Point(p.detach(), p.grad) for n, p in whole.named_parameters()}
    return found | weights


def holds(state: str, held: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether `held`, by rank, is the whole tensor in this state."""
    kind, *rest = state.split()
    copies = int(rest[2]) if len(rest) > 1 else 1
    if kind == "split":
        slices = whole.chunk(len(held) // copies, int(rest[0]))
        return all(same(one, slices[r // copies]) for r, one in enumerate(held))
    if kind == "replicated":
        return all(same(one, whole) for one in held)
    if any(one.shape != held[0].shape for one in held):
        return False
    stacked = torch.stack(list(held))
    if kind == "largest":  # of different ones: equal ones are replicated
        different = not same(stacked.amin(0), whole)
        return different and same(stacked.amax(0), whole)
    if not rest:
        return same(stacked.sum(0), whole)
    sums = stacked.unflatten(0, (-1, copies)).sum(1)
    return all(map(same, sums, whole.chunk(len(sums), int(rest[0]))))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for the order of sums."""
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-9, atol=1e-12
    )
