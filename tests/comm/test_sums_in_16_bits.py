"""Every sum that the table of sums lists, in bf16, against float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.docs.rendering import page_rows
from xtrain.comm.autograd import identity_all_reduce_wide, identity_sum
from xtrain.comm.collective_choice import RING
from xtrain.comm.direct import direct_all_reduce
from xtrain.comm.main_grad import accumulate_in_fp32, leave_gradient, unround
from xtrain.comm.one_shot import one_shot_all_reduce
from xtrain.comm.reduce_op import reduce_into
from xtrain.comm.ring import ring_all_reduce
from xtrain.comm.tree import halving_doubling_all_reduce, tree_all_reduce
from xtrain.context_parallel import online_softmax, ring_attention
from xtrain.context_parallel.running_attention import sum_of
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.expert_parallel.experts import expert_mlp, routed_mlp
from xtrain.expert_parallel.routing import weighted_sum
from xtrain.model.gradient_sums import sum_gradients, sum_in_one_bucket
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.shared import SharedGradients
from xtrain.schedules import gpipe
from xtrain.tensor_parallel import vocab_parallel_cross_entropy
from xtrain.tensor_parallel.functions import row_linear
from xtrain.tensor_parallel.ring_matmul import (
    add_weight_gradient,
    ring_matmul_reduce_scatter,
)
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer
from xtrain.zero.clip import clip_sharded_grad_norm_

LOW, RANKS, WIDTH = torch.bfloat16, 4, 512
UNIT = 2.0**-8  # half a last place of a bf16 number just above a power of two


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(shape, generator=generator, device="cpu") + 0.5
    return numbers.to(torch.get_default_device(), LOW)


def shares():
    """What each rank brings; all ranks know all."""
    return [drawn(WIDTH, seed=rank) for rank in range(RANKS)]


def half_last_place(exact):
    """Of bf16: 8 bits, so 2^(e-9) for numbers in [2^(e-1), 2^e)."""
    return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 9)


def check_once(result, exact):
    """Rounded once, from a sum that is off by fp32's roundings."""
    error = (result.double() - exact).abs()
    assert bool((error <= 1.01 * half_last_place(exact)).all()), error.max()


def check_wire(result, exact, sizes, roundings=RANKS - 1):
    error = (result.double() - exact).abs()
    assert bool((error <= 1.02 * roundings * UNIT * sizes).all()), error.max()
    assert bool((error > 0).any())


def weight_like():
    return nn.Parameter(torch.ones(WIDTH, dtype=LOW))


class Times(nn.Module):
    """The gradient of its weight is x."""

    def __init__(self, dtype=LOW):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def collectives():
    mine, exact = shares()[dist.get_rank()], sum(s.double() for s in shares())
    for reduce in (ring_all_reduce, tree_all_reduce, halving_doubling_all_reduce):
        reduce(result := mine.clone())
        check_wire(result, exact, exact)
        yield f"comm.{reduce.__module__.rsplit('.')[-1]}:{reduce.__name__}"
    one_shot_all_reduce(result := mine.clone())
    check_once(result, exact)
    yield "comm.one_shot:one_shot_all_reduce"
    direct_all_reduce(result := mine.clone()).wait()
    check_once(result, exact)
    yield "comm.direct:direct_all_reduce"
    reduce_into(result := mine.clone(), shares(), dist.ReduceOp.SUM)
    check_once(result, exact)
    yield "comm.reduce_op:reduce_into"


def wrappers():
    mine, exact = shares()[dist.get_rank()], sum(s.double() for s in shares())
    naive = NaiveDataParallel(Times(), gradient_reduction="sum")
    naive(mine).sum().backward()
    naive.reduce_gradients()
    check_wire(naive.module.weight.grad, exact, exact)
    yield "data_parallel.naive:NaiveDataParallel"
    ddp = DistributedDataParallel(Times(), gradient_reduction="sum")
    ddp(mine).sum().backward()
    check_once(ddp.module.weight.grad, exact)
    yield "data_parallel.ddp:DistributedDataParallel"
    bare = Times()
    summed = {"gradient_reduction": "sum", "collectives": RING}  # rounds at each rank
    zero = ZeroOptimizer(
        bare.parameters(), torch.optim.SGD, lr=0.1, master_weights=False, **summed
    )
    bare(mine).sum().backward()
    zero.reduce_gradients()
    own = exact.chunk(RANKS)[dist.get_rank()]
    check_once(zero.buckets[0].master.grad, own)
    yield "zero.stage1:take_shard"
    fsdp = FullyShardedDataParallel(Times(), **summed)
    fsdp(mine).sum().backward()
    check_once(fsdp.module.weight.grad, own)
    yield "zero.flat_param_group:FlatParamGroup"
    fsdp = FullyShardedDataParallel(Times(torch.float32), compute_dtype=LOW, **summed)
    fsdp(mine).sum().backward()
    check_wire(fsdp.module.weight.grad, own, own)
    yield "zero.fsdp:FullyShardedDataParallel"


def gradients():
    rank, exact = dist.get_rank(), sum(s.double() for s in shares())
    weight = weight_like()
    accumulate_in_fp32([weight])
    for x in shares():
        (weight * x).sum().backward()
    leave_gradient(weight, unround(weight))
    check_once(weight.grad, exact)
    yield "comm.main_grad:unround"
    weight = weight_like()
    (weight * shares()[rank]).sum().backward()
    sum_gradients([weight], None)
    check_once(weight.grad, exact)
    yield "model.gradient_sums:sum_gradients"
    weight = weight_like()
    (weight * shares()[rank]).sum().backward()
    sum_in_one_bucket([weight], range(RANKS), dist.group.WORLD)
    check_once(weight.grad, exact)
    yield "model.gradient_sums:sum_in_one_bucket"
    weight = weight_like()
    accumulate_in_fp32([weight])
    for other in (0, 1):  # what one rank has is no number of 16 bits either
        (weight * shares()[(rank + other) % RANKS]).sum().backward()
    SharedGradients({"weight": [weight]}, None).sum(of_sharded=False)
    leave_gradient(weight, unround(weight))
    check_once(weight.grad, 2 * exact)
    yield "pipeline_parallel.shared:SharedGradients"
    half = torch.full((9,), 300.0, dtype=torch.float16)  # its square is above 65504
    norm = clip_sharded_grad_norm_([half], 1e9)
    assert norm.item() == pytest.approx(300 * 3 * RANKS**0.5, rel=1e-12)
    yield "zero.clip:clip_sharded_grad_norm_"
    for wide in (identity_all_reduce_wide, identity_sum):
        weight = weight_like()
        members = [] if wide is identity_all_reduce_wide else [list(range(RANKS))]
        (wide(weight, *members) * shares()[rank]).sum().backward()
        check_once(weight.grad, exact)
        yield f"comm.autograd:{wide.__name__}"


def losses():
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    rows = torch.ones(300, 1, dtype=LOW)
    stage = PipelineStage(nn.Linear(1, 1, bias=False, dtype=LOW), 0, 1)
    runner = PipelineRunner(
        stage, gpipe(1, 300), lambda y, t: ((t + 0 * y).sum(), 1), alone
    )
    assert runner.step(rows, rows).item() == 1.0  # 300 ones are 256 in bf16
    yield "pipeline_parallel.loss:StepLoss"
    logits, labels = drawn(16, 8 * RANKS, seed=3), torch.arange(16)
    mine = logits.chunk(RANKS, -1)[rank].contiguous()
    loss = vocab_parallel_cross_entropy(mine, labels)
    exact = F.cross_entropy(logits.double(), labels)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    yield "tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"


def matmuls():
    rank = dist.get_rank()
    x, weight = drawn(8, 64, seed=1), drawn(16, 64, seed=2)
    exact = x.double() @ weight.double().t()
    parts = x.chunk(RANKS, -1)[rank], weight.chunk(RANKS, -1)[rank].contiguous()
    check_wire(row_linear(*parts), exact, exact, RANKS)
    yield "tensor_parallel.functions:row_linear"
    mine = ring_matmul_reduce_scatter(*parts, 0)
    own = exact.chunk(RANKS)[rank]
    check_wire(mine, own, own, RANKS)
    yield "tensor_parallel.ring_matmul:ring_matmul_reduce_scatter"
    total, rounded = None, 0.0
    for piece in range(8):  # the parts have 16 bits, their sum has not
        grad, x = drawn(4, 16, seed=piece), drawn(4, 32, seed=piece + 9)
        total = add_weight_gradient(total, grad, x)
        rounded = rounded + (grad.t() @ x).double()
    check_once(total.to(LOW), rounded)
    assert torch.allclose(total.double(), rounded, rtol=1e-6)
    yield "tensor_parallel.ring_matmul:add_weight_gradient"


def attention():
    rank = dist.get_rank()
    scores, values = drawn(4, 256, seed=4), drawn(256, 32, seed=5)
    exact = scores.double().softmax(-1) @ values.double()
    result, _ = online_softmax(scores, values, block_size=8)
    check_once(result, exact)
    yield "context_parallel.online_softmax:online_softmax"
    q, k, v, out = (drawn(1, 1, 32 * RANKS, 8, seed=seed) for seed in range(6, 10))
    whole = [t.double().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*whole).backward(out.double())
    mine = [t.chunk(RANKS, 2)[rank].clone().requires_grad_() for t in (q, k, v)]
    ring_attention(*mine, causal=False).backward(out.chunk(RANKS, 2)[rank])
    for own, full in zip(mine[1:], whole[1:], strict=True):
        exact = full.grad.chunk(RANKS, 2)[rank]
        error = (own.grad.double() - exact).abs()
        # dK is the difference of sums as large as dV's
        sizes = whole[2].grad.chunk(RANKS, 2)[rank]
        assert bool((error <= 3 * UNIT * sizes).all()), (error / sizes).max()
    assert sum_of(None, None, torch.stack([k, v])).dtype == torch.float32
    yield "context_parallel.ring_attention:ring_attention"


def experts():
    tokens, k, hidden = 64, 4, 16
    rows, gates = drawn(tokens * k, hidden, seed=11), drawn(tokens, k, seed=12)
    exact = (gates.double()[..., None] * rows.double().view(tokens, k, hidden)).sum(1)
    check_once(weighted_sum(rows, gates, torch.arange(tokens * k)), exact)
    yield "expert_parallel.routing:weighted_sum"
    x, grad = drawn(tokens, hidden, seed=13), drawn(tokens, hidden, seed=14)
    weights = [drawn(1, 8, hidden, seed=s) for s in (15, 16)]
    weights.append(drawn(1, hidden, 8, seed=17))
    gates, counts = torch.ones(tokens, 1, requires_grad=True), torch.tensor([tokens])
    routed_mlp(x, gates, torch.arange(tokens), counts, *weights).backward(grad)
    out = expert_mlp(x, counts, *weights)
    exact = (grad * out).double().sum(-1)  # of products that have 16 bits
    assert torch.allclose(gates.grad[:, 0].double(), exact, rtol=1e-6)
    yield "expert_parallel.experts:routed_mlp"


def measured():
    """The symbols whose sums keep their bounds."""
    torch.manual_seed(0)
    kinds = collectives, wrappers, gradients, losses, matmuls, attention, experts
    return [symbol for kind in kinds for symbol in kind()]


def test_every_sum_in_16_bits_keeps_its_bound(world):
    page = "lc3-zero/mixed-precision.md"
    rows = page_rows(page, "what is summed")
    listed = [symbol.strip("`") for _, _, symbol, _ in rows]
    assert len(set(listed)) == len(listed) > 20
    bounds = [dtype for dtype, _ in page_rows(page, "adds up in")]
    assert {dtype for *_, dtype in rows} == set(bounds)
    for symbols in world(RANKS).run(measured, timeout=300):
        assert sorted(symbols) == sorted(listed)
