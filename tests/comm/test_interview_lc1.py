"""Claims of the interview page of lc1, each run with and without its cause."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import ranks
from tests.devices import NCCL
from tests.testing.processes import wait_until
from xtrain import comm
from xtrain.testing import World

# ---------------------------------------------------- why all-reduce, not reduce


def one_training_step(collective):
    """The weight after one step on this rank's own data, gradients shared or not."""
    rank, size = ranks()
    weight = torch.ones(3, requires_grad=True)
    (weight * (rank + 1)).square().sum().backward()
    if collective == "all_reduce":
        comm.all_reduce(weight.grad)
    elif collective == "reduce":
        comm.reduce(weight.grad, 0)
    else:
        comm.reduce(weight.grad, 0)
        comm.broadcast(weight.grad, 0)
    return weight.detach() - 0.01 * weight.grad / size


def test_replicas_need_the_sum_on_every_rank(world):
    everywhere = world(4).run(one_training_step, "all_reduce")
    assert all(torch.equal(everywhere[0], weight) for weight in everywhere)
    at_one = world(4).run(one_training_step, "reduce")
    assert torch.equal(at_one[0], everywhere[0])
    assert not any(torch.equal(at_one[0], weight) for weight in at_one[1:])
    two_steps = world(4).run(one_training_step, "reduce, broadcast")
    assert all(torch.equal(everywhere[0], weight) for weight in two_steps)


# ------------------------------------------------------------- one program, N ranks


def add_up_my_share(numbers):
    """The same line of the same program; the rank decides which numbers it takes."""
    rank, size = ranks()
    share = numbers[rank::size]
    total = torch.tensor(float(sum(share)))
    comm.all_reduce(total)
    return share, total.item()


def test_the_rank_decides_which_data_a_process_works_on(world):
    numbers = list(range(10))
    results = world(4).run(add_up_my_share, numbers)
    shares = [share for share, _ in results]
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert [total for _, total in results] == [sum(numbers)] * 4


# ------------------------------------------------- experts: at most k ranks a token


def dispatch_to_experts(tokens, experts_per_rank, choices):
    """Each token goes once to every rank that has one of its experts, and comes home.

    Returns the numbers of ranks that the tokens visited, and whether they are home.
    """
    rank, size = ranks()
    own = torch.arange(rank * tokens, (rank + 1) * tokens).cpu()
    generator = torch.Generator("cpu").manual_seed(rank)
    scores = torch.rand(
        tokens, size * experts_per_rank, generator=generator, device="cpu"
    )
    experts = scores.topk(choices).indices
    goes_to = torch.zeros(tokens, size, dtype=torch.bool, device="cpu")
    goes_to.scatter_(1, experts // experts_per_rank, True)
    where, which = goes_to.T.nonzero(as_tuple=True)  # by destination
    device = torch.empty(0).device
    copies, sizes = own[which].to(device), where.bincount(minlength=size).tolist()
    arriving = comm.exchange_split_sizes(sizes, device=device)
    landed = torch.empty(sum(arriving), dtype=copies.dtype)
    comm.all_to_all_single(landed, copies, arriving, sizes)
    back = torch.empty_like(copies)
    comm.all_to_all_single(back, landed, sizes, arriving)  # the two lists swapped
    return goes_to.sum(1).tolist(), torch.equal(back, copies), landed.tolist()


def test_a_token_visits_at_most_as_many_ranks_as_it_has_experts(world):
    size, tokens, choices = 4, 40, 3
    results = world(size).run(dispatch_to_experts, tokens, 2, choices)
    visits = [ranks for visited, _, _ in results for ranks in visited]
    assert set(visits) == {2, 3}  # two of three experts may live together; never four
    landed = [token for _, _, arrived in results for token in arrived]
    assert [landed.count(token) for token in range(size * tokens)] == visits
    assert all(came_home for _, came_home, _ in results)


# -------------------------------------------------------------- order of calls


def cross_two_calls():
    """Rank 0 reduces a then b, everybody else b then a."""
    rank, _ = ranks()
    a, b = torch.full((2,), 1.0), torch.full((2,), 100.0)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)
    return a.tolist(), b.tolist()


def test_calls_pair_up_by_order_not_by_name(world):
    mixed = [101.0, 101.0]  # one rank's a was added to the other rank's b
    assert world(2).run(cross_two_calls) == [(mixed, mixed)] * 2


def call_with_a_wrong_size(name):
    rank, _ = ranks()
    try:
        with comm.debug_checks():
            getattr(comm, name)(torch.ones(4 + (rank == 1)))
    except ValueError as error:
        return str(error)
    return "ran"


@pytest.mark.verifies("xtrain.comm.debug_checks:debug_checks")
@pytest.mark.parametrize("name", ["ring_all_reduce", "tree_all_reduce", "all_reduce"])
def test_debug_checks_show_every_ranks_call(world, name):
    messages = world(3).run(call_with_a_wrong_size, name)
    assert len(set(messages)) == 1
    for rank, size in enumerate([4, 5, 4]):
        assert f"rank {rank}: " in messages[0]
        assert f"[{size}]" in messages[0].split(f"rank {rank}: ")[1].split("\n")[0]


# ------------------------------------------------------------------ a hang, recorded


def one_call_behind(path):
    """Rank 1 comes to the last all-reduce late: the flight recorder of each, then."""
    rank, _ = ranks()
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        path.touch()
    wait_until(path.exists)
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    if rank == 1:
        (path.parent / "rank 1 has looked").touch()
        dist.all_reduce(torch.ones(5))
    else:
        wait_until((path.parent / "rank 1 has looked").exists)
        work.wait()
    return len(dump["entries"]), dump["entries"][-1]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"),
    reason="this torch records NCCL's calls only",
)
def test_the_flight_recorder_is_on_and_shows_who_is_behind(gloo, tmp_path):
    with World(2) as own_world:
        (ahead, last), (behind, before) = own_world.run(
            one_call_behind, tmp_path / "rank 0 has called"
        )
    assert ahead == behind == 2000  # the newest, unless TORCH_FR_BUFFER_SIZE says
    assert last["collective_seq_id"] == before["collective_seq_id"] + 1
    assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[5]])
    assert before["input_sizes"] == [[1]]
    lines = [frame["name"] for frame in last["frames"]]
    assert "one_call_behind" in lines


# ------------------------------------------------------------ groups and addresses


def group_without_an_address():
    rank, _ = ranks()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=pairs[rank // 2])
    return value.item()


def test_sub_groups_meet_in_the_store_of_the_world(world):
    assert world(4).run(group_without_an_address) == [1, 1, 5, 5]


# --------------------------------------------------------------- the same bits again


def sums_of(calls):
    """The same random tensor reduced again and again, by torch and by each of ours."""
    rank, _ = ranks()
    generator = torch.Generator("cpu").manual_seed(rank)
    tensor = torch.randn(10_007, generator=generator, device="cpu")
    tensor = tensor.to(torch.empty(0).device)
    # NCCL promises no order of additions, as with NVLS.
    algorithms = [] if dist.get_backend() in NCCL else [dist.all_reduce]
    for name in ("ring", "tree", "halving_doubling", "one_shot"):
        algorithms.append(getattr(comm, f"{name}_all_reduce"))
    results = []
    for algorithm in algorithms:
        copies = [tensor.clone() for _ in range(calls)]
        for copy in copies:
            algorithm(copy)
        assert all(torch.equal(copies[0], copy) for copy in copies)
        results.append(copies[0])
    return results


def test_the_same_call_gives_the_same_bits_again(world, xtrain_worlds):
    """In one job, and in the next: the order of the additions depends on no timing."""
    first = world(4).run(sums_of, 10)
    with World(4, xtrain_worlds.backend, xtrain_worlds.device) as another_job:
        second = another_job.run(sums_of, 2)
    for mine, again in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, again))


# ------------------------------------------------------- stale is not asynchronous


def weights_after(steps, delay):
    """Gradient descent on x^2 / 2 with gradients that are `delay` steps old."""
    weights = [1.0]
    for step in range(steps):
        gradient = weights[max(0, step - delay)]
        weights.append(weights[-1] - 0.5 * gradient)
    return weights


def test_stale_gradients_take_another_path():
    fresh, stale = weights_after(8, delay=0), weights_after(8, delay=2)
    assert fresh == [0.5**step for step in range(9)]
    assert stale != fresh
    assert min(stale) < 0 <= min(fresh)  # the stale one overshoots


# ------------------------------------------------------------- low-precision sums


def test_a_bf16_sum_of_ones_stops_at_256():
    total = torch.zeros((), dtype=torch.bfloat16)
    one = torch.ones((), dtype=torch.bfloat16)
    for _ in range(1024):
        total += one
    assert total == 256
    assert sum(one.float() for _ in range(1024)) == 1024


def reduce_one_large_and_many_small(how):
    """256 on rank 0 and 1 on the others, every sum exact in fp32."""
    rank, size = ranks()
    tensor = torch.full((size,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    if how == "in bf16":
        comm.tree_all_reduce(tensor)
    elif how == "pre-divided":
        tensor /= size
        comm.tree_all_reduce(tensor)
        tensor *= size
    else:
        wide = tensor.float()
        comm.tree_all_reduce(wide)
        tensor.copy_(wide)
    return tensor.float().tolist()


def test_bf16_on_the_wire_loses_small_gradients(world):
    size = 8
    rounded = torch.tensor(255.0 + size).bfloat16().item()
    results = {
        how: world(size).run(reduce_one_large_and_many_small, how)
        for how in ("in bf16", "pre-divided", "in fp32")
    }
    assert results["in fp32"] == [[rounded] * size] * size
    assert results["in bf16"] != results["in fp32"]
    # Division moves the exponent alone: a guard against overflow, not rounding.
    assert results["pre-divided"] == results["in bf16"]


def reduce_large_halves(divide_first):
    _, size = ranks()
    tensor = torch.full((4,), 30_000.0, dtype=torch.float16)
    if divide_first:
        tensor /= size
        comm.ring_all_reduce(tensor)
    else:
        comm.ring_all_reduce(tensor)
        tensor /= size
    return tensor.tolist()


def test_fp16_sums_overflow_unless_divided_before(world):
    assert world(4).run(reduce_large_halves, False) == [[float("inf")] * 4] * 4
    assert world(4).run(reduce_large_halves, True) == [[30_000.0] * 4] * 4
