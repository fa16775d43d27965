"""Dispatch and combine: which row goes where, that none is lost, and the way back."""

import pytest
import torch
import torch.distributed as dist

from tests.expert_parallel import reference
from tests.expert_parallel.moe_cases import HIDDEN, close
from xtrain.comm.collective_choice import collectives_named
from xtrain.comm.work import Work
from xtrain.expert_parallel import Routing, combine, dispatch, plan_dispatch
from xtrain.expert_parallel.dispatch import (
    experts_per_rank,
    issue_combine,
    issue_dispatch,
    order_by_expert,
    waited,
)

MODULE = "xtrain.expert_parallel.dispatch"
PLAN = [f"{MODULE}:plan_dispatch", f"{MODULE}:DispatchPlan"]
WAY = [f"{MODULE}:{n}" for n in ("dispatch", "combine", "_Dispatch", "_Combine")]
HALVES = [f"{MODULE}:{n}" for n in ("issue_dispatch", "issue_combine", "waited")]
NAMES = ("torch", "direct", "ring")


def random_routing(tokens: int, experts: int, top_k: int, seed: int) -> Routing:
    """Any choice, about one copy in five dropped; gates that want a gradient."""
    scores = reference.tokens(tokens, experts, seed)
    chosen = scores.topk(top_k, dim=1).indices
    dropped = reference.tokens(tokens, top_k, seed + 100) < -0.84
    gates = reference.tokens(tokens, top_k, seed + 200).requires_grad_()
    return Routing(chosen, gates, scores.softmax(-1), scores, ~dropped)


def copies_of(routing: Routing) -> list[tuple[int, int, int]]:
    """(expert, token, choice) of each kept copy, in that order."""
    return sorted(
        (int(routing.experts_Tk[t, j]), t, j)
        for t, j in routing.kept_Tk.nonzero().tolist()
    )


def on_device(routing: Routing) -> Routing:
    """Made on the CPU, where all ranks draw the same; used where the rank works."""
    device = torch.get_default_device()
    fields = ("experts_Tk", "gates_Tk", "probabilities_TE", "logits_TE", "kept_Tk")
    moved = [getattr(routing, f).detach().to(device) for f in fields]
    moved[1].requires_grad_()
    return Routing(*moved)


def all_routings(tokens: list[int], experts: int, top_k: int) -> list[Routing]:
    with torch.device("cpu"):
        return [random_routing(n, experts, top_k, r) for r, n in enumerate(tokens)]


def dispatch_and_combine(tokens: list[int], experts: int, top_k: int, name: str) -> int:
    """Rows that carry their rank and token go to their experts and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    routings = all_routings(tokens, experts, top_k)
    routing, local = on_device(routings[rank]), experts // size
    plan = plan_dispatch(routing, collectives=collectives_named(name))
    device = torch.get_default_device()

    arriving = [
        (expert, sender, token, choice)
        for sender, other in enumerate(routings)
        for expert, token, choice in copies_of(other)
        if expert // local == rank
    ]
    counts = [sum(e == rank * local + i for e, *_ in arriving) for i in range(local)]
    sent = [
        sum(e // local == r for e, *_ in copies_of(routings[rank])) for r in range(size)
    ]
    came = [sum(sender == r for _, sender, *_ in arriving) for r in range(size)]
    assert (plan.counts_L.tolist(), plan.sent, plan.received) == (counts, sent, came)
    assert plan.tokens_M.tolist() == [t for _, t, _ in copies_of(routings[rank])]

    # A token is (its rank, its number).
    x = torch.tensor([[rank, t] for t in range(tokens[rank])], dtype=torch.float64)
    x = x.view(tokens[rank], 2).to(device).requires_grad_()
    rows = dispatch(x, plan)
    arriving.sort()  # by expert, then sender, then token
    assert rows.tolist() == [[sender, token] for _, sender, token, _ in arriving]

    # Experts that multiply by their number + 1; a sum with the gates.
    factor = torch.tensor([e + 1.0 for e, *_ in arriving], dtype=torch.float64)
    y = combine(rows * factor.to(device)[:, None], routing.gates_Tk, plan)
    expected = torch.zeros_like(x)
    weight = torch.zeros(tokens[rank], dtype=torch.float64)
    for expert, token, choice in copies_of(routings[rank]):
        weight[token] += routing.gates_Tk[token, choice].item() * (expert + 1)
    expected = weight.to(device)[:, None] * x.detach()
    close(y, expected)
    y.sum().backward()
    close(x.grad, weight.to(device)[:, None].expand_as(x))
    gates = torch.zeros(tokens[rank], top_k, dtype=torch.float64)
    for expert, token, choice in copies_of(routings[rank]):
        gates[token, choice] = (expert + 1.0) * (rank + token)
    close(routing.gates_Tk.grad, gates.to(device))
    return len(rows)


def all_cases(cases: list[tuple]) -> list[int]:
    return [dispatch_and_combine(*case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies(*PLAN, *WAY, f"{MODULE}:order_by_expert")
def test_rows_reach_their_experts_and_come_back_weighted(world, ranks):
    experts = 8 if 8 % ranks == 0 else 2 * ranks
    ragged, even = [5, 0, 3, 7, 1, 4, 0, 2][:ranks], [6] * ranks
    cases = [(ragged, experts, top_k, "torch") for top_k in (1, 2, 5)]
    cases += [(ragged, experts, 2, name) for name in NAMES[1:]]
    others = (even, [0] * ranks, [0] * (ranks - 1) + [5])
    cases += [(tokens, experts, 3, "torch") for tokens in others]
    by_rank = world(ranks).run(all_cases, cases)
    for number, (tokens, *rest) in enumerate(cases):
        kept = sum(len(copies_of(r)) for r in all_routings(tokens, *rest[:2]))
        assert sum(found[number] for found in by_rank) == kept, "tokens are conserved"


def halves(name: str) -> tuple[list, int]:
    """Two batches under way at the same time, waited for in the other order."""
    rank, pending = dist.get_rank(), []
    for tokens in (4, 3):
        routing = on_device(random_routing(tokens, 4, 2, seed=7 * tokens + rank))
        plan = plan_dispatch(routing, collectives=collectives_named(name))
        x = torch.arange(tokens * 2.0).view(tokens, 2) + 100 * rank
        copies = x[plan.tokens_M]
        pending.append((plan, copies, issue_dispatch(copies, plan)))
    back = []
    for plan, copies, under_way in reversed(pending):
        assert isinstance(under_way[0], Work)
        rows = waited(under_way)
        assert torch.equal(rows, waited(issue_dispatch(copies, plan))), "by expert"
        back.append((copies, issue_combine(rows, plan)))
    for copies, under_way in reversed(back):
        assert torch.equal(waited(under_way), copies), "combine inverts dispatch"
    return len(back)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.verifies(*HALVES)
def test_issue_and_wait_are_apart_and_combine_undoes_dispatch(world, name):
    assert world(2).run(halves, name) == [2, 2]


def strided(name: str) -> None:
    """Rows, tokens and gradients that are columns of something: not contiguous."""
    rank = dist.get_rank()
    routing = on_device(random_routing(6, 4, 2, seed=rank))
    plan = plan_dispatch(routing, collectives=collectives_named(name))
    wide = torch.arange(36.0, dtype=torch.float64).view(HIDDEN, 6) * (rank + 1)
    x, plain = (t.requires_grad_() for t in (wide.clone(), wide.t().clone()))
    rows, same = dispatch(x.t(), plan), dispatch(plain, plan)
    assert torch.equal(rows, same)
    # Column by column in memory: what comes back, and the gradient of the rows.
    turned = (rows * 3).t().contiguous().t()
    assert not turned.is_contiguous() or len(turned) < 2
    y = combine(turned, routing.gates_Tk, plan)
    expected = combine(same * 3, routing.gates_Tk, plan)
    close(y, expected)
    (y.t().contiguous() ** 2).sum().backward()
    (expected**2).sum().backward()
    close(x.grad.t(), plain.grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.verifies(*WAY, *HALVES)
def test_tensors_that_are_not_contiguous(world, name):
    world(2).run(strided, name)


def in_a_sub_group() -> list[int]:
    """Two groups of two, each with a routing of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = groups[rank % 2]
    routing = on_device(random_routing(5, 4, 2, seed=rank))
    plan = plan_dispatch(routing, group)
    x = torch.full((5, 1), float(rank))
    return [plan.group is group, sorted(set(dispatch(x, plan).flatten().tolist()))]


@pytest.mark.verifies(*PLAN, *WAY)
def test_a_sub_group_exchanges_among_its_own(world):
    by_rank = world(4).run(in_a_sub_group)
    for rank, (own, senders) in enumerate(by_rank):
        assert own and set(senders) <= {rank % 2, rank % 2 + 2}
    assert any(len(senders) == 2 for _, senders in by_rank)


@pytest.mark.verifies(f"{MODULE}:order_by_expert")
def test_rows_are_sorted_by_expert_and_then_by_sender():
    # from rank 0: a a c      from rank 1: b c c
    arriving = torch.tensor([[2, 0, 1], [0, 1, 2]])
    assert order_by_expert(arriving).tolist() == [0, 1, 3, 2, 4, 5]


@pytest.mark.verifies(f"{MODULE}:experts_per_rank")
def test_experts_must_divide_over_the_ranks():
    assert experts_per_rank(8, 4) == 2
    with pytest.raises(ValueError, match="8 experts on 3 ranks"):
        experts_per_rank(8, 3)
