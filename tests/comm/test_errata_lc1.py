"""What the original notes on communication say, run, and what is right, run beside it.

Each test is the proof of one entry of the errata page: it fails if the notes were
right after all, or if our own code made the same mistake. The claims about gloo are
tried on gloo alone.
"""

import os
import time
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import free_port, ranks
from tests.comm.test_interview_lc1 import dispatch_to_experts
from tests.devices import NCCL
from xtrain import comm
from xtrain.plan import all_reduce_lower_bound
from xtrain.testing import RankTimeout, World

# ------------------------------------------------------------- E01, E02: the ring


def ring_of_the_notes(tensor, right_chunks, copy):
    """The notes' ring: its chunk numbers and its buffer can be repaired separately."""
    rank, size = ranks()
    chunks = [chunk.clone() for chunk in tensor.chunk(size)]
    arriving = torch.empty_like(chunks[0])
    for step in range(size - 1):
        comm.ring_shift(chunks[(rank - step) % size], arriving)
        chunks[(rank - step - 1) % size] += arriving
    for step in range(size - 1):
        give = rank + 1 - step if right_chunks else rank + 1 + step
        take = give - 1 if right_chunks else give + 1
        comm.ring_shift(chunks[give % size], arriving)
        chunks[take % size] = arriving.clone() if copy else arriving
    return torch.cat(chunks)


def telling_data(rank, size):
    """Another value in every place of every rank."""
    return torch.arange(2.0 * size) + 100 * rank


def is_right(right_chunks, copy, ones=False):
    rank, size = ranks()
    data = [
        torch.ones(2 * size) if ones else telling_data(r, size) for r in range(size)
    ]
    ours = data[rank].clone()
    comm.ring_all_reduce(ours)
    assert torch.equal(ours, sum(data))
    return torch.equal(ring_of_the_notes(data[rank], right_chunks, copy), sum(data))


@pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_gather_walks_down_the_chunks(world, size):
    as_printed = world(size).run(is_right, False, True)
    repaired = world(size).run(is_right, True, True)
    assert repaired == [True] * size
    assert as_printed == [size == 2] * size


@pytest.mark.parametrize("size", [3, 4])
def test_data_of_ones_cannot_see_the_wrong_chunks(world, size):
    assert world(size).run(is_right, False, True, True) == [True] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_received_chunks_need_their_own_memory(world, size):
    aliased = world(size).run(is_right, True, False)
    assert aliased == [size == 2] * size


# --------------------------------------------------- E03, E04: who sends first


def everybody_receives_first():
    rank, size = ranks()
    arriving = torch.empty(1)
    dist.recv(arriving, (rank - 1) % size)
    dist.send(torch.ones(1), (rank + 1) % size)


def test_everybody_receiving_first_hangs(gloo):
    with World(2) as own_world, pytest.raises(RankTimeout, match="recv"):
        own_world.run(everybody_receives_first, timeout=1.0)


def ring_events(order):
    """One all-reduce's worth of ring steps of one element, in an order of calls."""
    rank, size = ranks()
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, arriving = torch.ones(1), torch.empty(1)
    sends_first = {"rank 0 first": rank == 0, "even first": rank % 2 == 0}
    with comm.CommLedger() as ledger:
        for _ in range(2 * (size - 1)):
            if order == "together":
                comm.ring_shift(outgoing, arriving)
            elif sends_first[order]:
                comm.send(outgoing, right)
                comm.recv(arriving, left)
            else:
                comm.recv(arriving, left)
                comm.send(outgoing, right)
    return ledger.events


@pytest.mark.verifies(
    "xtrain.comm.p2p:ring_shift", "xtrain.comm.message_rounds:message_rounds"
)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_rank_zero_first_makes_every_step_a_chain(world, size):
    rounds = {
        order: len(comm.message_rounds(world(size).run(ring_events, order)))
        for order in ("rank 0 first", "even first", "together")
    }
    steps = 2 * (size - 1)
    assert rounds["together"] == steps
    assert rounds["rank 0 first"] == size * steps
    if size % 2 == 0:
        assert rounds["even first"] == 2 * steps
    else:  # two even neighbours meet where the ring closes
        assert rounds["even first"] == Fraction(steps * size, (size - 1) // 2)


# ---------------------------------------------- E05 to E08: volume, steps and time


def ledger_of(name, numel):
    """Bytes sent, bytes received and events of a ring collective on `numel` floats."""
    _, size = ranks()
    whole, piece = torch.ones(numel), torch.ones(numel // size)
    calls = {
        "all_reduce": lambda: comm.ring_all_reduce(whole),
        "reduce_scatter": lambda: comm.ring_reduce_scatter(piece, whole),
        "all_gather": lambda: comm.ring_all_gather(whole, piece),
    }
    with comm.CommLedger() as ledger:
        calls[name]()
    return ledger.bytes_sent, ledger.bytes_received, ledger.events


def measured(worlds, size, name, numel):
    """(bytes sent, bytes received, rounds) of each rank, equal on all of them."""
    results = worlds(size).run(ledger_of, name, numel)
    rounds = len(comm.message_rounds([events for _, _, events in results]))
    (pair,) = {(sent, received) for sent, received, _ in results}
    return (*pair, rounds)


@pytest.mark.verifies("xtrain.plan.traffic:all_reduce_lower_bound")
def test_ring_volume_grows_towards_twice_the_tensor(world):
    numel, itemsize = 60, torch.float32.itemsize
    shares = {}
    for size in (2, 3, 4, 6):
        sent, received, rounds = measured(world, size, "all_reduce", numel)
        shares[size] = Fraction(sent, numel * itemsize)
        assert sent == received
        assert rounds == 2 * (size - 1)
    assert shares == {size: all_reduce_lower_bound(size) for size in shares}
    assert shares[2] == 1
    assert shares[2] < shares[3] < shares[4] < shares[6] < 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_factor_two_is_two_phases(world, size):
    numel = 12 * size
    half = (size - 1) * 12 * torch.float32.itemsize
    for phase in ("reduce_scatter", "all_gather"):
        assert measured(world, size, phase, numel) == (half, half, size - 1)
    both = measured(world, size, "all_reduce", numel)
    assert both == (2 * half, 2 * half, 2 * (size - 1))


def test_equal_volume_is_not_equal_time(world):
    two = measured(world, 2, "all_reduce", 60)
    six = measured(world, 6, "all_reduce", 36)
    assert two[0] == six[0]  # the same bytes leave every rank ...
    assert six[2] == 5 * two[2]  # ... in five times as many steps, one after another


# --------------------------------------------------------------- E09, E10: reduce


def reduce_even_numbers(whose, numel):
    rank, _ = ranks()
    tensor = torch.full((numel,), 2.0 * (rank + 1))
    reduce = dist.reduce if whose == "torch" else comm.reduce
    reduce(tensor, 0)
    return tensor


@pytest.mark.parametrize("numel", [1, 64])
def test_gloo_reduce_leaves_partial_sums_behind(gloo, world, numel):
    results = world(4).run(reduce_even_numbers, "torch", numel)
    inputs = [torch.full((numel,), 2.0 * (rank + 1)) for rank in range(4)]
    assert torch.equal(results[0], sum(inputs))
    assert any(not torch.equal(results[rank], inputs[rank]) for rank in (1, 2, 3))


@pytest.mark.verifies("xtrain.comm.rooted:reduce")
def test_our_reduce_leaves_the_others_alone(world):
    results = world(4).run(reduce_even_numbers, "ours", 1)
    assert [tensor.item() for tensor in results] == [20, 4, 6, 8]


def sum_of_filled(filling):
    rank, _ = ranks()
    tensor = torch.ones(1) * (rank if filling == "rank" else 2 * (rank + 1))
    dist.all_reduce(tensor)
    return tensor.item()


def test_the_code_beside_the_picture_sums_to_six(world):
    assert world(4).run(sum_of_filled, "rank") == [6] * 4
    assert world(4).run(sum_of_filled, "picture") == [20] * 4


# ----------------------------------------- E11, E12: snippets that do not run


def outcome(call) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "ran"


def mixed_dtypes(whose):
    _, size = ranks()
    library = dist if whose == "torch" else comm
    whole, piece = torch.arange(2 * size), torch.arange(2)
    into, scatter = (
        (library.all_gather_single, library.reduce_scatter_single)
        if hasattr(library, "all_gather_single")
        else (library.all_gather_into_tensor, library.reduce_scatter_tensor)
    )
    calls = {
        "list": lambda: library.all_gather([torch.zeros(2)] * size, piece),
        "tensor": lambda: into(torch.zeros(2 * size), piece),
        "reduce_scatter": lambda: scatter(torch.zeros(2), whole),
    }
    return {name: outcome(call) for name, call in calls.items()}


def test_integers_do_not_land_in_floats(world):
    for result in world(4).run(mixed_dtypes, "torch"):
        assert set(result.values()) <= {"ValueError", "RuntimeError", "TypeError"}
    for result in world(4).run(mixed_dtypes, "ours"):
        assert set(result.values()) == {"ValueError"}


def scatter_of_the_notes():
    rank, size = ranks()
    piece = torch.zeros(2)

    def call():
        if rank == 0:
            pieces = torch.arange(2 * size).split(2)
        dist.scatter(piece, list(pieces), src=0)

    return outcome(call)


def scatter_repaired():
    rank, size = ranks()
    piece = torch.zeros(2)
    pieces = list(torch.arange(2.0 * size).split(2)) if rank == 0 else None
    dist.scatter(piece, pieces, src=0)
    return piece.tolist()


def test_only_the_source_of_a_scatter_has_the_list(world):
    failures = world(4).run(scatter_of_the_notes)
    assert failures[0] in ("ValueError", "RuntimeError")  # integers into floats
    assert failures[1:] == ["UnboundLocalError"] * 3
    assert world(4).run(scatter_repaired) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# ------------------------------------------- E13 to E19: groups, meshes, backends


def join(port, explicit):
    """Leave the World's group and form a new one, as a script of its own would."""
    rank, size = ranks()
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    arguments = {"rank": 0, "world_size": size} if explicit else {}
    try:
        dist.init_process_group(
            "gloo", init_method="env://", timeout=timedelta(seconds=2), **arguments
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert dist.get_rank() == rank
    dist.barrier()
    return "joined"


def test_an_explicit_rank_overrides_the_environment(gloo):
    with World(2) as own_world:
        outcomes = own_world.run(join, free_port(), True)
    assert "joined" not in outcomes
    assert any("EADDRINUSE" in text or "listen" in text for text in outcomes)
    with World(2) as own_world:
        assert own_world.run(join, free_port(), False) == ["joined"] * 2


def meshes_that_do_not_fit():
    shapes = [(2, 4), (4, 4), (2, 1)]
    device = torch.empty(0).device.type
    torchs = [outcome(lambda s=s: dist.init_device_mesh(device, s)) for s in shapes[:2]]
    ours = [
        outcome(lambda s=s: comm.init_mesh(s, ("dp", "tp"), device)) for s in shapes
    ]
    return torchs, ours


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh", "xtrain.comm.mesh:check_mesh")
def test_a_mesh_holds_exactly_the_world(world):
    for torchs, ours in world(4).run(meshes_that_do_not_fit):
        assert torchs == ["RuntimeError"] * 2
        assert ours == ["ValueError"] * 3


def mesh_routes_nothing():
    rank, _ = ranks()
    device = torch.empty(0).device.type
    mesh = comm.init_mesh((2, 4), ("dp", "tp"), device)
    everywhere, inside = torch.tensor(float(rank)), torch.tensor(float(rank))
    dist.all_reduce(everywhere)  # no group given: the whole world, mesh or not
    dist.all_reduce(inside, group=mesh["tp"].get_group())
    groups = {
        axis: dist.get_process_group_ranks(mesh[axis].get_group())
        for axis in ("dp", "tp")
    }
    by_hand = [dist.new_group(range(first, first + 4)) for first in (0, 4)]
    again = torch.tensor(float(rank))
    dist.all_reduce(again, group=by_hand[rank // 4])
    return everywhere.item(), inside.item(), again.item(), groups


@pytest.mark.verifies("xtrain.comm.mesh:init_mesh", "xtrain.comm.mesh:axis_ranks")
def test_a_mesh_only_builds_and_names_groups(world):
    results = world(8).run(mesh_routes_nothing)
    assert [result[0] for result in results] == [28] * 8
    assert [result[1] for result in results] == [6] * 4 + [22] * 4
    assert [result[2] for result in results] == [result[1] for result in results]
    assert results[5][3] == {"tp": [4, 5, 6, 7], "dp": [1, 5]}
    assert comm.axis_ranks(5, (2, 4), 1) == [4, 5, 6, 7]
    assert comm.axis_ranks(5, (2, 4), 0) == [1, 5]


def test_init_device_mesh_has_two_names():
    from torch.distributed.device_mesh import init_device_mesh

    assert dist.init_device_mesh is init_device_mesh


def ask_about_groups():
    rank, _ = ranks()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank == 3:
        answers = [outcome(lambda g=g: comm.rank_and_size(g)) for g in groups]
        return groups[0] == groups[1], isinstance(groups[0], int), answers
    if rank == 0:
        refused = outcome(lambda: dist.get_group_rank(groups[0], 2))
        return dist.get_group_rank(groups[0], 1), refused
    return None


@pytest.mark.verifies("xtrain.comm.checks:rank_and_size")
def test_a_foreign_group_has_no_ranks_to_tell(world):
    results = world(4).run(ask_about_groups)
    assert results[0] == (1, "ValueError")
    # One and the same placeholder stands for every group that rank 3 is not in.
    assert results[3] == (True, True, ["ValueError"] * 2)


def speak_in_a_group():
    rank, _ = ranks()
    group = dist.new_group([2, 3])
    value = torch.ones(1) * rank
    if rank == 0:  # not a member: torch warns and does nothing
        dist.all_reduce(value, group=group)
        return value.item(), outcome(lambda: comm.all_reduce(value, group=group))
    if rank >= 2:
        dist.broadcast(value, src=2, group=group)  # 2 is a global rank
        refused = outcome(lambda: comm.broadcast(value, src=0, group=group))
        comm.broadcast(value, group_src=1, group=group)  # 1 is a rank of the group
        return value.item(), refused
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.verifies("xtrain.comm.p2p:group_rank_of")
def test_ranks_are_global_and_outsiders_are_ignored(world):
    outsider, _, *members = world(4).run(speak_in_a_group)
    assert outsider == (0, "ValueError")
    assert members == [(2, "ValueError")] * 2


def gloo_on_the_cpu():
    rank, size = ranks()
    ones, many = torch.ones(2), torch.ones(2 * size)
    pieces = [torch.ones(2) for _ in range(size)]
    mine = pieces if rank == 0 else None
    rows = [rank if peer == 0 else 0 for peer in range(size)]
    arriving = list(range(size)) if rank == 0 else [0] * size
    calls = {
        "reduce": lambda: dist.reduce(ones, 0),
        "gather": lambda: dist.gather(ones, mine, 0),
        "scatter": lambda: dist.scatter(ones, mine, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(ones, pieces),
        "all_to_all_single": lambda: dist.all_to_all_single(many.clone(), many),
        "all_to_all_single, empty pieces": lambda: dist.all_to_all_single(
            torch.empty(sum(arriving)), torch.ones(sum(rows)), arriving, rows
        ),
    }
    if torch.__version__ >= (2, 12):  # the newest of them
        calls["all_to_all"] = lambda: dist.all_to_all(pieces, pieces)
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
        operation = getattr(dist.ReduceOp, op)
        calls[op] = lambda operation=operation: dist.all_reduce(ones, operation)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64):
        calls[str(dtype)] = lambda dtype=dtype: dist.all_reduce(ones.to(dtype))
    return {name: outcome(call) for name, call in calls.items()}


def test_gloo_serves_the_collectives_on_the_cpu(gloo, world):
    for results in world(4).run(gloo_on_the_cpu):
        assert set(results.values()) == {"ran"}, results


# ------------------------------------------------- E20 to E23: point-to-point


def send_before_the_receive(path, numel):
    rank, _ = ranks()
    store = dist.FileStore(path, 2)
    if rank == 0:
        dist.send(torch.ones(numel), 1)
        store.set("returned", "yes")
        return None
    time.sleep(0.1)  # a send that does not wait returns meanwhile
    returned = store.check(["returned"])
    dist.recv(torch.empty(numel), 0)
    return returned


@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_gloo_send_waits_for_the_receive(gloo, world, tmp_path, numel):
    results = world(2).run(send_before_the_receive, str(tmp_path / "store"), numel)
    assert results[1] is False


def change_before_wait(path):
    rank, _ = ranks()
    store = dist.FileStore(path, 2)
    if rank == 0:
        tensor = torch.ones(1)
        work = dist.isend(tensor, 1)
        tensor.fill_(9)  # the rule broken: the message has not left yet
        store.set("changed", "yes")
        work.wait()
        return None
    store.wait(["changed"])
    arriving = torch.empty(1)
    dist.recv(arriving, 0)
    return arriving.item()


def test_an_isend_buffer_belongs_to_the_message_until_wait(gloo, world, tmp_path):
    results = world(2).run(change_before_wait, str(tmp_path / "store"))
    assert results[1] == 9


def test_batched_p2p_is_called_batch_isend_irecv():
    assert callable(dist.batch_isend_irecv)
    assert callable(dist.P2POp)
    assert not hasattr(dist, "BatchIsendIrecv")
    assert not hasattr(dist.P2POp, "wait")


def receive_three(path, wait_in_the_loop):
    rank, _ = ranks()
    store = dist.FileStore(path, 2)
    if rank == 1:
        works, arriving = [], torch.empty(3, 1)
        for number in range(3):
            work = dist.irecv(arriving[number], 0)
            store.set(f"open {number}", "yes")
            if wait_in_the_loop:
                work.wait()
            else:
                works.append(work)
        for work in works:
            work.wait()
        return arriving.flatten().tolist()
    try:
        store.wait(["open 2"], timedelta(seconds=0.3))
        all_open = True
    except RuntimeError:
        all_open = False
    for number in range(3):
        dist.send(torch.full((1,), float(number)), 1)
    return all_open


@pytest.mark.parametrize("wait_in_the_loop", [True, False])
@pytest.mark.processes("a FileStore is waited for")
def test_waiting_in_the_loop_keeps_one_receive_open(world, tmp_path, wait_in_the_loop):
    if world(2).backend in NCCL:
        pytest.skip("NCCL's first irecv waits for the sender, wait() for nothing")
    path = str(tmp_path / "store")
    all_open, arrived = world(2).run(receive_three, path, wait_in_the_loop)
    assert all_open is not wait_in_the_loop
    assert arrived == [0, 1, 2]


def arrive_late(path, whose):
    rank, _ = ranks()
    store = dist.FileStore(path, 2)
    barrier = dist.barrier if whose == "torch" else comm.barrier
    if rank == 0:
        barrier()
        store.set("passed", "yes")
        return None
    time.sleep(0.1)  # rank 0 must not pass meanwhile: no event tells that
    passed = store.check(["passed"])
    barrier()
    return passed


@pytest.mark.verifies("xtrain.comm.collectives:barrier")
@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_nobody_passes_a_barrier_before_all_arrive(world, tmp_path, whose):
    assert world(2).run(arrive_late, str(tmp_path / "store"), whose)[1] is False


def leave_early(path):
    rank, _ = ranks()
    store = dist.FileStore(path, 2)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)  # the connection stands
    if rank == 0:
        dist.destroy_process_group(group)
        store.set("left", "yes")
        return None
    store.wait(["left"])
    try:
        dist.recv(torch.empty(1), 0, group=group)
    except RuntimeError as error:
        return str(error)
    return "received"


def test_a_rank_that_leaves_early_closes_the_connection(gloo, world, tmp_path):
    message = world(2).run(leave_early, str(tmp_path / "store"))[1]
    assert "closed" in message or "reset" in message


# ---------------------------------------------------- E24 to E27: all-to-all


def swap_letters():
    rank, size = ranks()
    mine = torch.tensor([ord("a") + size * rank + i for i in range(size)])
    answers = []
    for library in (dist, comm):
        arriving = torch.empty_like(mine)
        library.all_to_all_single(arriving, mine)
        answers.append("".join(map(chr, arriving.tolist())))
    scattered = []
    for source in range(size):
        piece = torch.empty_like(mine[:1])
        pieces = list(mine.split(1)) if rank == source else None
        dist.scatter(piece, pieces, src=source)
        scattered.append(chr(piece.item()))
    return (*answers, "".join(scattered))


@pytest.mark.verifies("xtrain.comm.all_to_all:all_to_all_single")
def test_rank_j_gets_item_j_of_every_rank(world):
    columns = ["aeim", "bfjn", "cgko", "dhlp"]
    results = world(4).run(swap_letters)
    assert [torchs for torchs, _, _ in results] == columns
    assert [ours for _, ours, _ in results] == columns


def test_all_to_all_is_one_scatter_from_every_rank(world):
    for torchs, _, scattered in world(4).run(swap_letters):
        assert scattered == torchs


def swap_without_a_table():
    rank, size = ranks()
    generator = torch.Generator("cpu").manual_seed(rank)  # known to this rank alone
    sizes = torch.randint(0, 4, (size,), generator=generator, device="cpu").tolist()
    arriving = comm.exchange_split_sizes(sizes, device=torch.empty(0).device)
    rows = torch.full((sum(sizes),), float(rank))
    landed = torch.empty(sum(arriving))
    comm.all_to_all_single(landed, rows, arriving, sizes)
    return sizes, arriving, landed.tolist()


@pytest.mark.verifies("xtrain.comm.all_to_all:exchange_split_sizes")
def test_split_sizes_are_exchanged_not_known(world):
    results = world(4).run(swap_without_a_table)
    table = [sizes for sizes, _, _ in results]
    assert any(0 in sizes for sizes in table)
    for rank, (_, arriving, landed) in enumerate(results):
        assert arriving == [row[rank] for row in table]
        assert landed == [
            float(src) for src, n in enumerate(arriving) for _ in range(n)
        ]


def test_tokens_start_on_one_rank_and_visit_k(world):
    """With one expert on each rank."""
    size, tokens, choices = 4, 5, 2
    results = world(size).run(dispatch_to_experts, tokens, 1, choices)
    everything = range(size * tokens)
    arrived = [token for _, _, landed in results for token in landed]
    assert [visited for visited, _, _ in results] == [[choices] * tokens] * size
    assert sorted(arrived) == sorted([*everything] * choices)
    assert all(set(landed) < set(everything) for _, _, landed in results)
    assert all(came_back for _, came_back, _ in results)


# ------------------------------------------------ E28, E31, E33: sizes and bits


def reduce_numel(numel):
    rank, _ = ranks()
    tensor = torch.arange(float(numel)) * (rank + 1)
    comm.ring_all_reduce(tensor)
    return tensor.tolist()


def test_pieces_of_two_are_not_one_piece_per_rank(world):
    assert len(torch.arange(12).split(2)) == 6  # four ranks need four pieces
    assert len(torch.arange(12).tensor_split(4)) == 4
    for numel in (3, 7, 12):
        expected = [10.0 * i for i in range(numel)]
        assert world(4).run(reduce_numel, numel) == [expected] * 4


def sync_and_async():
    rank, _ = ranks()
    generator = torch.Generator("cpu").manual_seed(rank)
    tensor = torch.randn(1001, generator=generator, device="cpu")
    tensor = tensor.to(torch.empty(0).device)
    sync, later = tensor.clone(), tensor.clone()
    dist.all_reduce(sync)
    work = dist.all_reduce(later, async_op=True)
    work.wait()
    return tensor, sync, later


def test_an_asynchronous_call_changes_no_bit(world):
    if world(4).backend in NCCL:
        pytest.skip("NCCL promises no order of additions, as with NVLS")
    for _, sync, later in world(4).run(sync_and_async):
        assert torch.equal(sync, later)


def test_sums_agree_on_all_ranks_but_not_with_every_order(world):
    results = world(4).run(sync_and_async)
    inputs = [tensor for tensor, _, _ in results]
    left_to_right = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    right_to_left = inputs[0] + (inputs[1] + (inputs[2] + inputs[3]))
    assert not torch.equal(left_to_right, right_to_left)
    sums = [sync for _, sync, _ in results]
    assert all(torch.equal(sums[0], other) for other in sums)
    exact = sum(tensor.double() for tensor in inputs)
    torch.testing.assert_close(sums[0].double(), exact, rtol=1e-5, atol=1e-5)


def our_sums():
    tensor, _, _ = sync_and_async()
    results = []
    for name in ("ring", "tree", "halving_doubling", "one_shot"):
        copy = tensor.clone()
        getattr(comm, f"{name}_all_reduce")(copy)
        results.append(copy)
    return results


@pytest.mark.verifies(
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.tree:tree_all_reduce",
    "xtrain.comm.tree:halving_doubling_all_reduce",
    "xtrain.comm.one_shot:one_shot_all_reduce",
)
def test_each_of_our_all_reduces_gives_all_ranks_the_same_bits(world):
    first, *others = world(4).run(our_sums)
    for result in others:
        for mine, theirs in zip(first, result, strict=True):
            assert torch.equal(mine, theirs)
    # Another algorithm adds in another order: close, not equal.
    ring, tree, _, _ = first
    assert not torch.equal(ring, tree)
    torch.testing.assert_close(ring, tree, rtol=1e-5, atol=1e-5)
