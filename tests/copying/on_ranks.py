"""Run by `test_copies_run.py` where xtrain cannot be imported: four ranks of copies.

Each copy lies next to this file as a module of its name. Every function `check_NAME`
runs on all ranks and compares what the copy of NAME does with what one process gets.
"""

import importlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SIZE = 4
COLLECTIVES = {
    "all_reduce": 40_000,  # above the tree's limit
    "ring_all_reduce": 11,
    "tree_all_reduce": 11,
    "halving_doubling_all_reduce": 11,
    "one_shot_all_reduce": 11,
    "parameter_server_all_reduce": 11,
}


def copied(name):
    """The class or function of a copy."""
    module, _, part = name.partition(".")
    return getattr(importlib.import_module(module), part or module)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def ranks():
    return dist.get_rank(), dist.get_world_size()


def of_rank(rank, *shape):
    """Every rank's tensor, known to all."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def of_all(*shape):
    return torch.stack([of_rank(r, *shape) for r in range(SIZE)])


def check_all_reduces():
    rank, _ = ranks()
    for name, numel in COLLECTIVES.items():
        all_reduce = copied(name)
        for count in (numel, 3):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor = of_rank(rank, count)
                all_reduce(tensor, op)
                total = of_all(count).sum(0)
                same(tensor, total / SIZE if op == dist.ReduceOp.AVG else total)


def check_hierarchical_all_reduce():
    rank, _ = ranks()
    rows = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    columns = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    tensor = of_rank(rank, 7)
    copied("hierarchical_all_reduce")(
        tensor, intra_group=rows[rank // 2], inter_group=columns[rank % 2]
    )
    same(tensor, of_all(7).sum(0))


def check_ring_halves():
    rank, _ = ranks()
    whole = of_all(SIZE, 3)
    piece = torch.empty(3, dtype=torch.float64)
    copied("ring_reduce_scatter")(piece, whole[rank].clone())
    same(piece, whole.sum(0)[rank])
    gathered = torch.empty(SIZE, 3, dtype=torch.float64)
    copied("ring_all_gather")(gathered, piece)
    same(gathered, whole.sum(0))


def check_rooted():
    rank, _ = ranks()
    for name in ("broadcast", "broadcast_naive"):
        tensor = of_rank(rank, 5)
        copied(name)(tensor, src=2)
        same(tensor, of_rank(2, 5))
    tensor = of_rank(rank, 5)
    copied("reduce")(tensor, dst=1)
    same(tensor, of_all(5).sum(0) if rank == 1 else of_rank(rank, 5))
    pieces = [torch.empty(5, dtype=torch.float64) for _ in range(SIZE)]
    copied("gather")(of_rank(rank, 5), pieces if rank == 3 else None, dst=3)
    if rank == 3:
        same(torch.stack(pieces), of_all(5))
    landing = torch.empty(5, dtype=torch.float64)
    copied("scatter")(landing, list(of_all(5)) if rank == 3 else None, src=3)
    same(landing, of_rank(rank, 5))


def check_lists():
    rank, _ = ranks()
    outputs = [torch.empty(r + 1, dtype=torch.float64) for r in range(SIZE)]
    copied("all_gather")(outputs, of_rank(rank, rank + 1))
    for other, output in enumerate(outputs):
        same(output, of_rank(other, other + 1))
    output = torch.empty(2, dtype=torch.float64)
    copied("reduce_scatter")(output, list(of_rank(rank, SIZE, 2)))
    same(output, of_all(SIZE, 2).sum(0)[rank])
    copied("barrier")()


def check_all_to_all():
    rank, _ = ranks()
    sent = [torch.full((rank + other,), 10.0 * rank + other) for other in range(SIZE)]
    came = [torch.empty(rank + other) for other in range(SIZE)]
    expected = [
        torch.full((rank + other,), 10.0 * other + rank) for other in range(SIZE)
    ]
    copied("all_to_all")(came, sent)
    same(torch.cat(came), torch.cat(expected))
    sizes = [rank + other for other in range(SIZE)]
    assert copied("exchange_split_sizes")(sizes) == sizes
    output = torch.empty(sum(sizes))
    copied("all_to_all_single")(output, torch.cat(sent), sizes, sizes)
    same(output, torch.cat(expected))


def check_point_to_point():
    rank, size = ranks()
    after, before = (rank + 1) % size, (rank - 1) % size
    landing, expected = torch.empty(4, dtype=torch.float64), of_rank(before, 4)
    copied("exchange")(of_rank(rank, 4), after, landing, before)
    same(landing, expected)
    landing.zero_()
    copied("exchange_all")([(of_rank(rank, 4), after)], [(landing, before)])
    same(landing, expected)
    landing.zero_()
    copied("ring_shift")(of_rank(rank, 4), landing)
    same(landing, expected)
    landing.zero_()
    works = [copied("irecv")(landing, before), copied("isend")(of_rank(rank, 4), after)]
    for work in works:
        work.wait()
    same(landing, expected)
    if rank == 0:
        copied("send")(of_rank(0, 4), 1)
    if rank == 1:
        copied("recv")(landing, 0)
        same(landing, of_rank(0, 4))


def net():
    torch.manual_seed(7)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def loss_of(model, inputs):
    return model(inputs).square().mean()


def batch(step, rank):
    return of_rank(1000 + 10 * step + rank, 5, 6)


def trained_alone(make_optimizer, steps=3, max_norm=None):
    """One process that sees all ranks' batches."""
    model = net()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(step, r) for r in range(SIZE)])).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def check_data_parallel():
    rank, _ = ranks()
    for name in ("NaiveDataParallel", "DistributedDataParallel"):
        bare = net()
        with torch.no_grad():
            bare[0].weight.add_(rank)  # rank 0's is copied to all
        arguments = {"bucket_cap_mb": 0.0005} if name[0] == "D" else {}
        model = copied(name)(bare, **arguments)
        optimizer = adamw(bare.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            if name == "NaiveDataParallel":
                model.reduce_gradients()
            optimizer.step()
        for found, expected in zip(
            bare.parameters(), trained_alone(adamw), strict=True
        ):
            same(found.detach(), expected)


def check_ddp_accumulates():
    rank, _ = ranks()
    bare = net()
    model = copied("DistributedDataParallel")(bare)
    with model.no_sync():
        loss_of(model, batch(0, rank)).backward()
    loss_of(model, batch(1, rank)).backward()
    alone = net()
    for step in (0, 1):
        loss_of(alone, torch.cat([batch(step, r) for r in range(SIZE)])).backward()
    for found, expected in zip(bare.parameters(), alone.parameters(), strict=True):
        same(found.grad, expected.grad)


def check_distributed_sampler():
    _, size = ranks()
    mine = copied("DistributedSampler")(range(10), shuffle=True)
    torchs = torch.utils.data.DistributedSampler(range(10), shuffle=True)
    for epoch in (0, 3):
        mine.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(mine) == list(torchs)
    assert len(mine) == len(torchs) == -(-10 // size)


def check_adam():
    for name in ("Adam", "AdamW"):
        kind = copied(name)
        found = trained_alone(lambda p, kind=kind: kind(p, lr=0.05, weight_decay=0.1))
        kind = getattr(torch.optim, name)
        expected = trained_alone(
            lambda p, kind=kind: kind(p, lr=0.05, weight_decay=0.1)
        )
        for one, other in zip(found, expected, strict=True):
            same(one, other)


def check_mixed_precision():
    """bf16 weights are the rounded masters; an overflow skips the step on all ranks."""
    rank, _ = ranks()
    scaler = copied("LossScaler")(init_scale=8.0)
    model = net().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    mine = copied("MixedPrecisionOptimizer")(
        model.parameters(), torch.optim.AdamW, scaler=scaler, lr=0.05
    )
    reference = torch.optim.AdamW(masters, lr=0.05)
    for _ in range(3):
        mine.zero_grad()
        mine.backward(loss_of(model, batch(0, 0).bfloat16()))
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() / 8
        assert mine.step()
        reference.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            same(parameter.detach(), master.detach().bfloat16())
    before = [p.detach().clone() for p in model.parameters()]
    mine.backward(loss_of(model, batch(0, 0).bfloat16()) * (3e38 if rank == 1 else 1))
    assert not mine.step()
    assert scaler.scale == 4.0
    for parameter, old in zip(model.parameters(), before, strict=True):
        same(parameter.detach(), old)


def check_zero_optimizer():
    rank, _ = ranks()
    for stage in (1, 2):
        model = net()
        optimizer = copied("ZeroOptimizer")(
            model.parameters(), torch.optim.AdamW, stage, bucket_cap_mb=0.0005, lr=0.05
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
        expected = trained_alone(adamw, max_norm=0.01)
        for one, other in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=1e-6, atol=1e-8)
        states = sum(
            t.numel() for s in optimizer.state.values() for t in s.values() if t.dim()
        )
        whole = 2 * sum(p.numel() for p in model.parameters())
        assert states < 0.4 * whole, "1/N of the state, and padding"


def check_fully_sharded():
    rank, _ = ranks()
    for reshard in (True, False):
        bare = net()
        sharded = copied("FullyShardedDataParallel")
        model = sharded(bare, reshard_after_forward=reshard, blocks=[nn.Linear])
        optimizer = adamw(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            copied("clip_sharded_grad_norm_")(grads, 0.01)
            optimizer.step()
        held = [p.detach().reshape(-1) for p in model.parameters()]
        every = [None] * SIZE
        dist.all_gather_object(every, held)
        expected = trained_alone(adamw, max_norm=0.01)
        for number, other in enumerate(expected):
            one = torch.cat([pieces[number] for pieces in every])
            torch.testing.assert_close(one, other.reshape(-1), rtol=1e-6, atol=1e-8)
        most = sum(t.numel() for t in expected) / SIZE + len(model.units)
        assert sum(piece.numel() for piece in held) <= most, "1/N, and padding"


def check_clipping():
    rank, _ = ranks()
    shard = of_rank(rank, 9)
    norm = copied("clip_sharded_grad_norm_")([shard], 0.5)
    whole = of_all(9)
    same(norm, whole.norm())
    same(shard, whole[rank] * 0.5 / (whole.norm() + 1e-6))


def check_checkpoints():
    rank, size = ranks()
    saver = importlib.import_module("save_checkpoint")
    loader = importlib.import_module("load_checkpoint")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weight = of_rank(0, 4, 5)
    cut = weight.reshape(-1).chunk(size)
    mine = saver.Shard("weight", (4, 5), 5 * rank, cut[rank].clone())
    path = saver.save_checkpoint(folder[0], 3, [mine], extra={"epoch": 2})
    landing = torch.zeros(4, 5, dtype=torch.float64)
    columns = landing[:, rank : rank + 1].clone()
    wanted = loader.Shard("weight", (4, 5), (0, rank), columns)
    rest = loader.Shard("weight", (4, 5), (0, 4), landing[:, 4:].clone())
    shards = [wanted, rest] if rank == 0 else [wanted]
    step, extra = loader.load_checkpoint(path, shards)
    assert (step, extra) == (3, {"epoch": 2})
    same(columns, weight[:, rank : rank + 1])
    if rank == 0:
        same(rest.tensor, weight[:, 4:])


def slice_of(x, dim):
    """What this rank has of `x`: a slice of `dim`, or all of it if that is None."""
    rank, size = ranks()
    return x if dim is None else x.chunk(size, dim)[rank]


def whole_and_mine(x, dim=None):
    """The input of one process, and of this rank."""
    return x.clone().requires_grad_(), slice_of(x, dim).clone().requires_grad_()


def same_slices(layer, full, dims, of_full=lambda grad, name: grad):
    """All gradients of a cut layer are those of the whole one, cut along `dims`."""
    for name, parameter in layer.named_parameters():
        expected = of_full(full.get_parameter(name).grad, name)
        same(parameter.grad, slice_of(expected, dims.get(name)))


def check_parallel_linear():
    x, grad = of_rank(0, 3, 8, 12), of_rank(1, 3, 8, 8)
    for split in (False, True):
        sequence = 1 if split else None
        for name, dims, dim_in, dim_out in (
            ("ColumnParallelLinear", {"weight": 0, "bias": 0}, sequence, -1),
            ("RowParallelLinear", {"weight": 1}, -1, sequence),
        ):
            torch.manual_seed(3)
            full = nn.Linear(12, 8).double()
            layer = copied(name).from_full(full, sequence_parallel=split)
            whole, mine = whole_and_mine(x, dim_in)
            y, out = full(whole), layer(mine)
            y.backward(grad)
            out.backward(slice_of(grad, dim_out))
            same(out.detach(), slice_of(y.detach(), dim_out))
            same(mine.grad, slice_of(whole.grad, dim_in))
            same_slices(layer, full, dims)


def check_parallel_embeddings():
    torch.manual_seed(3)
    full = nn.Embedding(20, 8).double()
    ids = torch.tensor([[0, 4, 5, 9, 10], [14, 15, 19, 0, 7]])
    y = full(ids)
    y.backward(of_rank(1, 2, 5, 8))
    for name, dim in (("VocabParallelEmbedding", 0), ("HiddenParallelEmbedding", 1)):
        layer = copied(name).from_full(full)
        out = layer(ids)
        same(out.detach(), y.detach())
        out.backward(of_rank(1, 2, 5, 8))
        same_slices(layer, full, {"weight": dim})


def check_vocab_parallel_cross_entropy():
    x, labels = 50 * of_rank(0, 10, 12), torch.arange(10)
    labels[3] = -100
    whole, mine = whole_and_mine(x, -1)
    expected = nn.functional.cross_entropy(whole, labels, label_smoothing=0.1)
    expected.backward()
    loss = copied("vocab_parallel_cross_entropy")(mine, labels, label_smoothing=0.1)
    loss.backward()
    same(loss.detach(), expected.detach())
    same(mine.grad, slice_of(whole.grad, -1))


class Block(nn.Module):
    """SwiGLU, or causal attention in which nothing turns, on one process."""

    def __init__(self, **features):
        super().__init__()
        torch.manual_seed(3)
        for name, (out, into) in features.items():
            self.add_module(name, nn.Linear(into, out, bias=False).double())

    def swiglu(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def attention(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in projections)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def check_parallel_blocks():
    x, grad = of_rank(0, 3, 8, 6), of_rank(1, 3, 8, 6)
    mlp = {"gate_proj": (12, 6), "up_proj": (12, 6), "down_proj": (6, 12)}
    heads = {"q_proj": (32, 6), "k_proj": (8, 6), "v_proj": (8, 6), "o_proj": (6, 32)}
    rows = {f"{n}_proj.weight": 0 for n in ("gate", "up", "q", "k", "v")}
    dims = rows | {"down_proj.weight": 1, "o_proj.weight": 1}
    attention = copied("ParallelAttention").from_full

    def twice(grad, name):  # 2 key heads on 4 ranks
        if name[:2] not in ("k_", "v_"):
            return grad
        return grad.unflatten(0, (-1, 4)).repeat_interleave(2, 0).flatten(0, 1)

    still = {"positions": torch.zeros(8)}
    for split in (False, True):
        for features, forward, cut, arguments in (
            (mlp, Block.swiglu, copied("ParallelSwiGLU").from_full, {}),
            (heads, Block.attention, partial(attention, head_dim=4), still),
        ):
            full = Block(**features)
            layer = cut(full, sequence_parallel=split)
            dim = 1 if split else None
            whole, mine = whole_and_mine(x, dim)
            y = forward(full, whole)
            y.backward(grad)
            out = layer(mine, **arguments)
            out.backward(slice_of(grad, dim))
            same(out.detach(), slice_of(y.detach(), dim))
            same(mine.grad, slice_of(whole.grad, dim))
            same_slices(layer, full, dims, twice)


def check_parallel_norm():
    full = nn.RMSNorm(6, 1e-5).double()
    layer = copied("ParallelRMSNorm").from_full(full, sequence_parallel=True)
    whole, mine = whole_and_mine(of_rank(0, 3, 8, 6), 1)
    grad = of_rank(1, 3, 8, 6)
    full(whole).backward(grad)
    layer(mine).backward(slice_of(grad, 1))
    same(mine.grad, slice_of(whole.grad, 1))
    same_slices(layer, full, {})


def attention(q, k, v, causal=True):
    """Of one process, with few key heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def check_softmax_of_a_ring():
    _, size = ranks()
    scores, values = of_rank(0, 3, 5, 4 * size), of_rank(1, 3, 4 * size, 2)
    expected = scores.softmax(-1) @ values, scores.logsumexp(-1)
    same(copied("online_softmax")(scores, values, 3), expected)
    mine = slice_of(scores, -1), slice_of(values, -2)
    same(copied("ring_online_softmax")(*mine), expected)


def check_flash_attention():
    leaves = [of_rank(h, 2, h, 9, 4).requires_grad_() for h in (4, 2, 2)]
    grad = of_rank(9, 2, 4, 9, 4)
    for causal in (True, False):
        expected = attention(*leaves, causal)
        q, k, v = (x.detach() for x in leaves)
        out, lse = copied("flash_attention_forward")(q, k, v, causal)
        same(out, expected.detach())
        found = copied("flash_attention_backward")(grad, q, k, v, out, lse, causal)
        same(found, torch.autograd.grad(expected, leaves, grad))


def check_cut_sequences():
    _, size = ranks()
    shard, unshard = copied("shard_sequence"), copied("unshard_sequence")
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    row, column = mesh["ring"].get_group(), mesh["ulysses"].get_group()
    leaves = [of_rank(h, 2, h, 8 * size, 6).requires_grad_() for h in (8, 2, 2)]
    grad = of_rank(9, 2, 8, 8 * size, 6)
    ring, gathered = copied("ring_attention"), copied("all_gather_attention")
    ulysses, hybrid = copied("ulysses_attention"), copied("hybrid_attention")
    for causal in (True, False):
        y = attention(*leaves, causal)
        expected = [y, *torch.autograd.grad(y, leaves, grad)]
        for balance in ("none", "striped", "zigzag"):
            how = {"causal": causal, "balance": balance}
            for call, groups in (
                (partial(ring, **how), None),
                (partial(gathered, **how), None),
                (partial(ulysses, causal=causal), None),
                (partial(hybrid, mesh=mesh, **how), (row, column)),
            ):
                layout = "none" if call.func is ulysses else balance

                def cut(x, layout=layout, groups=groups):
                    if groups is None:
                        return shard(x, 2, layout)
                    return shard(shard(x, 2, layout, groups[0]), 2, "none", groups[1])

                mine = [cut(x.detach()).requires_grad_() for x in leaves]
                out = call(*mine)
                found = [out, *torch.autograd.grad(out, mine, cut(grad))]
                for one, whole in zip(found, expected, strict=True):
                    same(one.detach(), cut(whole.detach()))
    positions = torch.arange(8 * size)
    mine = copied("local_positions")(8, "zigzag")
    assert torch.equal(mine, shard(positions, 0, "zigzag"))
    assert torch.equal(unshard(mine.double(), 0, "zigzag"), positions.double())


def experts_of(hidden=6, inner=5, experts=8):
    """The router's weight, gate, up and down: known to all."""
    up = (experts, inner, hidden)
    shapes = [(experts, hidden), up, up, (experts, hidden, inner)]
    return [of_rank(60 + i, *shape) for i, shape in enumerate(shapes)]


def mixture(x, router, gate, up, down, top_k):
    """All experts on all tokens, of which the chosen ones count; and the choice."""
    scores = (x @ router.t()).softmax(-1)
    values, chosen = scores.topk(top_k, -1)
    gates = torch.zeros_like(scores).scatter(1, chosen, values)
    gates = gates / gates.sum(-1, keepdim=True)
    inner = torch.einsum("th,efh->tef", x, gate)
    inner = nn.functional.silu(inner) * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("te,tef,ehf->th", gates, inner, down), scores, chosen


def filled(layer, weights):
    experts = layer.experts
    names = layer.router.weight, experts.gate_proj, experts.up_proj, experts.down_proj
    with torch.no_grad():
        for parameter, weight in zip(names, weights, strict=True):
            parameter.copy_(weight)
    return layer, names


def check_mixture_of_experts():
    weights = [w.requires_grad_() for w in experts_of()]
    x, grad = of_rank(0, 9, 6).requires_grad_(), of_rank(1, 9, 6)
    y, scores, chosen = mixture(x, *weights, 2)
    expected = [y, *torch.autograd.grad(y, [x, *weights], grad, retain_graph=True)]
    mine = x.detach().clone().requires_grad_()
    layer, parameters = filled(copied("MoE")(6, 5, 8, 2, dtype=x.dtype), weights)
    out = layer(mine)
    found = [out, *torch.autograd.grad(out, [mine, *parameters], grad)]
    same([t.detach() for t in found], [t.detach() for t in expected])
    bare = [w.detach() for w in (x, *weights)]
    out, saved = copied("moe_forward")(*bare, 2)
    found = [out, *copied("moe_backward")(grad, saved)]
    same(found, [t.detach() for t in expected])
    ones = torch.ones_like(chosen, dtype=scores.dtype)
    picked = copied("top_k_gradient")(ones, chosen, 8)
    same(picked, torch.zeros_like(scores).scatter(1, chosen, 1.0))
    router = copied("TopKRouter")(6, 8, 2, dtype=x.dtype)
    with torch.no_grad():
        router.weight.copy_(weights[0])
    assert torch.equal(router(x.detach()).experts_Tk, chosen)
    experts = copied("Experts")(8, 6, 5, dtype=x.dtype)
    assert experts(x.detach(), torch.tensor([9, *[0] * 7])).shape == x.shape


def check_balance():
    even = torch.full((8, 4), 0.25, dtype=torch.float64)
    chosen = torch.arange(8)[:, None] % 4
    same(copied("load_balancing_loss")(even, chosen), torch.tensor(1.0).double())
    of_sequences = copied("sequence_balance_loss")
    same(of_sequences(even[None], chosen[None]), torch.tensor(1.0).double())
    logits = of_rank(0, 5, 4)
    same(copied("router_z_loss")(logits), logits.logsumexp(-1).square().mean())
    bias = torch.zeros(3)
    copied("update_balance_bias")(bias, torch.tensor([2, 0, 1]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0]
    kept = copied("within_capacity")(torch.tensor([[0, 1], [0, 2], [0, 1]]), 3, 1)
    assert kept.tolist() == [[True, True], [False, True], [False, False]]
    plan = copied("plan_placement")([8, 2, 2, 1], 2, 3)
    assert plan.experts == ((0, 1, 2), (0, 1, 3))


def check_experts_over_ranks():
    rank, size = ranks()
    weights = [w.requires_grad_() for w in experts_of()]
    tokens, gradients = of_all(5, 6).flatten(0, 1), of_all(5, 6).flatten(0, 1) + 1
    whole = tokens.clone().requires_grad_()
    y, _, chosen = mixture(whole, *weights, 2)
    expected = torch.autograd.grad(y, [whole, *weights], gradients)
    full, _ = filled(copied("MoE")(6, 5, 8, 2, dtype=tokens.dtype), weights)
    layer = copied("GShardMoE").from_full(full)
    x = tokens.chunk(size)[rank].clone().requires_grad_()
    out = layer(x)
    out.backward(gradients.chunk(size)[rank])
    same(out.detach(), y.detach().chunk(size)[rank])
    same(x.grad, expected[0].chunk(size)[rank])
    dist.all_reduce(layer.router.weight.grad)
    same(layer.router.weight.grad, expected[1])
    for name, grad in zip(("gate", "up", "down"), expected[2:], strict=True):
        same(getattr(layer.experts, f"{name}_proj").grad, grad.chunk(size)[rank])
    # Experts that return what they get: the gates sum up to 1.
    routing = layer.router(x.detach())
    assert torch.equal(routing.experts_Tk, chosen.chunk(size)[rank])
    plan = copied("plan_dispatch")(routing)
    rows = copied("dispatch")(x.detach(), plan)
    assert len(rows) == int(plan.counts_L.sum())
    same(copied("combine")(rows, routing.gates_Tk, plan).detach(), x.detach())


def check_deepseeks_mixture():
    layer = copied("DeepSeekMoE")(6, 5, 8, 2, shared_experts=2, groups=4, top_groups=2)
    x = of_rank(0, 7, 6).float()
    y = layer(x)
    loads = layer.router.stats.counts_E
    layer.router.update_balance_bias(loads, rate=0.1)
    assert y.shape == x.shape and int(loads.sum()) == 14
    assert layer.router.balance_bias.any() and layer.shared is not None


CHECKS = {name: check for name, check in globals().items() if name[:6] == "check_"}


def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
    for name, check in CHECKS.items():
        check()
        dist.barrier()
        if rank == 0:
            print("ok", name, flush=True)
    assert not [n for n in sys.modules if n.split(".")[0] == "xtrain"]
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        mp.start_processes(run, (store,), SIZE, start_method="fork")
