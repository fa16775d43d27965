"""What lies below the collectives: process groups, sub-groups, and the store."""

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import free_port
from xtrain.comm import (
    all_gather_object,
    barrier,
    broadcast,
    broadcast_object,
    rank_and_size,
    ring_all_reduce,
)
from xtrain.testing import World, expect_error


def initialise(method: str, path: str) -> tuple[int, int, str, list[float]]:
    """Leave the group of this World and meet again by `method`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = broadcast_object(free_port() if rank == 0 else None, src=0)
    barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        rank_and_size()

    wait = timedelta(seconds=20)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if method == "env":
        os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", timeout=wait)
    else:
        url = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{path}"}[method]
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=size, timeout=wait
        )
    assert dist.is_initialized()
    assert rank_and_size() == (rank, size)
    tensor = torch.arange(3.0) + rank
    ring_all_reduce(tensor)
    result = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    barrier()  # all ranks stay until the last message has arrived
    dist.destroy_process_group()
    return *result, tensor.tolist()


@pytest.mark.verifies(
    "xtrain.comm.checks:rank_and_size",
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.collectives:barrier",
)
@pytest.mark.processes("gloo connects its ranks")
def test_three_ways_to_meet(tmp_path):
    size = 3
    with World(size) as world:
        for method in ("env", "tcp", "file"):
            results = world.run(initialise, method, str(tmp_path / "meeting"))
            total = [3.0, 6.0, 9.0]
            assert results == [(rank, size, "gloo", total) for rank in range(size)]


def env_without(name: str) -> None:
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="0", WORLD_SIZE="1"
    )
    del os.environ[name]
    dist.init_process_group("gloo")


@pytest.mark.processes("gloo connects its ranks")
def test_a_missing_variable_is_named_on_every_rank():
    with World(2) as world:
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            expect_error(world, env_without, name, match=name)


def groups() -> None:
    """All ranks build all groups in one order; members use theirs, alone."""
    rank = dist.get_rank()
    lists = [[2, 3], [1, 3], [0, 2], [3, 1, 0], [2]]
    made = [dist.new_group(members) for members in lists]
    for members, group in zip(lists, made, strict=True):
        if rank not in members:
            assert not isinstance(group, dist.ProcessGroup)
            with pytest.raises(ValueError, match="not a member of this group"):
                rank_and_size(group)
            continue
        members = sorted(members)  # torch orders a group by global rank
        me = members.index(rank)
        assert rank_and_size(group) == (me, len(members))
        assert dist.get_process_group_ranks(group) == members
        assert [dist.get_global_rank(group, r) for r in range(len(members))] == members
        assert [dist.get_group_rank(group, r) for r in members] == list(
            range(len(members))
        )
        stranger = next(r for r in range(4) if r not in members)
        with pytest.raises(ValueError, match=str(stranger)):
            dist.get_group_rank(group, stranger)
        assert all_gather_object(rank, group) == members
        for root in members:
            tensor = torch.tensor([10.0 * rank])
            broadcast(tensor, src=root, group=group)
            assert tensor.item() == 10 * root
        tensor = torch.ones(5)
        ring_all_reduce(tensor, group=group)
        assert tensor.tolist() == [len(members)] * 5

    # Two groups at work at the same time do not hear each other.
    half = made[0] if rank >= 2 else None
    pair = dist.new_group([0, 1])
    mine = half if rank >= 2 else pair
    for _ in range(20):
        tensor = torch.tensor([float(rank)])
        ring_all_reduce(tensor, group=mine)
        assert tensor.item() == (5 if rank >= 2 else 1)


@pytest.mark.verifies(
    "xtrain.comm.checks:rank_and_size",
    "xtrain.comm.rooted:broadcast",
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.objects:all_gather_object",
)
def test_groups_and_their_ranks(world):
    world(4).run(groups)


def key_value_stores() -> None:
    """One store for all ranks: the group's own, and one that rank 0 serves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    key = broadcast_object(os.urandom(8).hex() if rank == 0 else None, src=0)
    own = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
    use_store(own)
    if dist.get_backend() == "xtrain-virtual":
        return  # ranks of one process cannot wait in C++ for one another

    port = broadcast_object(free_port() if rank == 0 else None, src=0)
    served = dist.TCPStore(
        "127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=20)
    )
    use_store(served)
    barrier()  # the server leaves last


def use_store(store) -> None:
    """Counters, first come first served, waiting, and a deadline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = all_gather_object(store.add("counter", 1))
    assert sorted(places) == list(range(1, size + 1))
    assert store.add("counter", 0) == size
    barrier()

    winners = all_gather_object(store.compare_set("leader", "", str(rank)))
    assert len(set(winners)) == 1
    assert int(winners[0]) in range(size)

    if rank == size - 1:
        store.set("late", b"\x00binary")
    store.wait(["late"], timedelta(seconds=20))
    assert store.get("late") == b"\x00binary"
    assert store.check(["late"])
    assert not store.check(["never"])
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.wait(["never"], timedelta(milliseconds=50))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.verifies(
    "xtrain.comm.objects:broadcast_object", "xtrain.comm.objects:all_gather_object"
)
def test_a_store_is_shared(world, size):
    world(size).run(key_value_stores)


# -------------------------------------------------------------- several machines


def test_one_torchrun_on_each_node_makes_one_job():
    """Two agents with other node ranks, here on one machine: four ranks, two a node."""
    root, port = Path(__file__).parents[2], free_port()
    common = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
              "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
              "--master-port", str(port)]  # fmt: skip
    script = "snippets/lc1/process_group.py"
    agents = [
        subprocess.Popen(
            [*common, "--node-rank", str(node), script],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    told = [agent.communicate(timeout=240) for agent in agents]
    for node, (out, errors) in enumerate(told):
        for local in range(2):
            line = f"RANK={2 * node + local}  LOCAL_RANK={local}  WORLD_SIZE=4"
            assert line in out, out + errors
        assert out.count("the ranks add up to 6") == 2


# -------------------------------------------------------------- what a store call sends


class Relay:
    """Stands before a store and remembers which side sent, in order."""

    def __init__(self, port: int) -> None:
        self.senders: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._store = port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        store = socket.create_connection(("127.0.0.1", self._store))
        for ends in ((client, store, "client"), (store, client, "store")):
            threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, name: str) -> None:
        while data := source.recv(4096):
            self.senders.append(name)  # before it goes on, so before it is answered
            to.sendall(data)

    def during(self, call) -> list[str]:
        self.senders.clear()
        call()
        return list(self.senders)


def test_a_store_call_is_a_few_messages_to_one_process():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    relay = Relay(server.port)
    store = dist.TCPStore("127.0.0.1", relay.port, wait_for_workers=False)
    question = ["client", "store"]
    assert relay.during(lambda: store.add("count", 1)) == question
    assert relay.during(lambda: store.wait(["count"])) == question
    assert relay.during(lambda: store.compare_set("key", "", "a")) == question
    assert relay.during(lambda: store.check(["key"])) == question
    assert relay.during(lambda: store.get("key")) == 2 * question
    # A set is not answered: the one answer is that of the question behind it.
    both = relay.during(lambda: (store.set("key", "b"), store.check(["key"])))
    assert both.count("store") == 1
    assert server.get("key") == b"b"


ENDS = """
import gc, os, sys, time
import torch
import torch.distributed as dist
import xtrain.comm

class Wrapper:  # in a cycle, so that only the garbage collector frees it
    def __init__(self, group):
        self.group, self.itself = group, self

def program(rank, end):
    store = dist.FileStore(os.path.join(sys.argv[1], end), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group()
    used = group if "wrapper" in end else dist.group.WORLD
    dist.all_reduce(torch.ones(1), group=used)
    from torch.distributed import nn  # as the first step of an optimizer does
    dist.barrier()
    if rank == 1:  # rank 0 has ended, or is about to
        time.sleep(1.0)
    work = dist.all_reduce(torch.ones(1), group=used, async_op=True)
    work.get_future().then(lambda done: done.value())  # on a thread of gloo
    if rank == 1:
        work.wait()
        os._exit(0)
    if "wrapper" in end:
        Wrapper(group)
    del work, group, used
    if "collected" in end:
        gc.collect()
    if "destroyed" in end:
        dist.destroy_process_group()

gc.disable()  # it collects where we say so
codes = {}
for end in sys.argv[2:]:
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            program(rank, end)
            sys.exit()
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    codes[end] = ended[0]
print(codes)
"""


def test_a_program_that_destroys_its_groups_ends_in_good_order(tmp_path):
    """gloo's thread comes to Python while the interpreter ends: that is an abort."""
    good = ["destroyed", "wrapper, collected, destroyed"]
    bad = ["left", "wrapper, destroyed"]
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path), *good, *bad],
        capture_output=True,
        text=True,
        timeout=200,
    )
    codes = eval(ran.stdout)
    assert [codes[end] for end in good] == [0, 0], ran.stderr
    if sys.version_info < (3, 14):  # from then on such a thread hangs instead
        assert [codes[end] for end in bad] == [-signal.SIGABRT] * 2, ran.stderr
        assert "terminate called without an active exception" in ran.stderr
