"""The flight recorder: what it keeps of calls, and when it writes it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, ring_all_reduce
from xtrain.comm.flight_recorder import FlightRecorder
from xtrain.comm.flight_recorder_watch import frame_of
from xtrain.testing import World

RECORDER = "xtrain.comm.flight_recorder:FlightRecorder"
CALL = "xtrain.comm.flight_recorder_calls:RecordedCall"
WATCH = "xtrain.comm.flight_recorder_watch:Watch"
in_processes = pytest.mark.processes("a rank waits in C++, and has a main thread")


def read(folder, rank: int) -> dict:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def is_freed() -> bool:
    """Whether an asynchronous call lets go of its tensor soon after its end."""
    kept = torch.ones(100)
    work, alive = dist.all_reduce(kept, async_op=True), weakref.ref(kept)
    work.wait()
    del kept, work
    limit = time.monotonic() + 0.5  # gloo's thread may still have it
    while alive() is not None and time.monotonic() < limit:
        time.sleep(0.001)
    return alive() is None


def calls_of_all_kinds(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    other, tensor = rank ^ 1, torch.ones(2, 3)
    methods = {
        cls: dict(vars(cls)) for cls in (dist.ProcessGroup, type(dist.group.WORLD))
    }
    dist.barrier()
    freed_alone = is_freed()  # nccl-rules keeps its last calls for a while
    with FlightRecorder(folder):
        dist.all_reduce(tensor)
        if rank < 2:
            dist.broadcast(tensor.double(), 1, group=pair)
            sent = dist.P2POp(dist.isend, tensor, other)
            received = dist.P2POp(dist.irecv, tensor * 1, other)
            works = dist.batch_isend_irecv([sent, received])
            for work in works:
                work.wait()
        freed = is_freed()
        lists = [torch.empty(1) for _ in range(size)]
        dist.all_gather(lists, torch.ones(1))
    dist.barrier()  # ranks may be threads: the last one unwraps
    for cls, before in methods.items():
        assert vars(cls) == before
    return read(folder, rank), freed == freed_alone


@pytest.mark.world_sizes(2, 3)
@pytest.mark.verifies(RECORDER)
@pytest.mark.verifies(CALL)
def test_a_file_tells_what_a_rank_has_called(world, world_size, tmp_path):
    for rank, (found, freed_as_alone) in enumerate(
        world(world_size).run(calls_of_all_kinds, tmp_path)
    ):
        assert freed_as_alone, "a recorded call keeps no tensor alive"
        assert found["reason"] == "ended" and found["rank"] == rank
        entries = {e["profiling_name"].split(":")[1]: e for e in found["entries"]}
        names = ["all_reduce", "all_gather"]
        if rank < 2:
            names += [
                "broadcast",
                f"send {rank}->{rank ^ 1}",
                f"recv {rank}<-{rank ^ 1}",
            ]
            broadcast = entries["broadcast"]
            assert broadcast["collective_seq_id"] == 1 and broadcast["root"] == 1
            assert broadcast["input_dtypes"] == ["float64"]
            group = found["pg_config"][broadcast["process_group"][0]]
            assert group["ranks"] == "[0, 1]"
            assert entries[f"send {rank}->{rank ^ 1}"]["p2p_seq_id"] == 1
        assert entries.keys() == set(names)
        assert entries["all_reduce"]["collective_seq_id"] == 2
        gather = entries["all_gather"]
        assert (
            gather["input_sizes"] == [[1]]
            and gather["output_sizes"] == [[1]] * world_size
        )
        assert {entry["state"] for entry in found["entries"]} == {"completed"}
        frame = entries["all_reduce"]["frames"][0]
        assert frame["filename"] == __file__ and frame["name"] == "is_freed"


def ring_of_three(folder):
    with FlightRecorder(folder, capacity=3):
        for _ in range(5):
            dist.barrier()
        ring_all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(1))
    entries = read(folder, dist.get_rank())["entries"]
    return [e["profiling_name"].partition(":")[2] for e in entries], entries[-1]


@pytest.mark.verifies(RECORDER)
def test_the_last_calls_are_kept_and_ours_are_their_messages(world, tmp_path):
    for rank, (names, last) in enumerate(world(2).run(ring_of_three, tmp_path)):
        assert len(names) == 3 and names[-1] == "all_reduce"
        assert {name.split(" ")[0] for name in names[:-1]} == {"send", "recv"}
        assert last["collective_seq_id"] == 6
        assert str(rank) in names[0]


class Done(dist.Work):
    def is_completed(self):
        return True


class Batching(dist.ProcessGroup):
    """As NCCL's: the calls of a batch return nothing, its end the work of them all."""

    group_name = group_desc = "batching"

    def name(self):
        return "none"

    def allreduce(self, tensors, options=None):
        return None

    def _end_coalescing(self, device):
        return Done()


def batched(folder):
    group, found = Batching(0, 1), []
    with FlightRecorder(folder) as recorder:
        for call in (group.allreduce, group.allreduce, group._end_coalescing):
            call([torch.ones(1)])
            recorder.dump()
            entries = read(folder, dist.get_rank())["entries"]
            found.append([entry["state"] for entry in entries])
    return found


@pytest.mark.verifies(RECORDER)
def test_the_calls_of_a_batch_end_with_it(world, tmp_path):
    found = [["started"], ["started"] * 2, ["completed"] * 2]
    assert world(2).run(batched, tmp_path) == [found] * 2


def from_a_thread(folder):
    with FlightRecorder(folder):
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        thread.start()
        thread.join()
    return read(folder, dist.get_rank())["entries"]


@in_processes
@pytest.mark.verifies(RECORDER)
def test_a_thread_that_is_no_rank_is_recorded(world, tmp_path):
    for entries in world(2).run(from_a_thread, tmp_path):
        assert [e["profiling_name"].split(":")[1] for e in entries] == ["all_reduce"]


def stuck_until_written(folder, stuck_after: float, signalled: bool):
    """Rank 0 waits until rank 1, which computes, sees a file of rank 0."""
    with FlightRecorder(folder, stuck_after=stuck_after) as recorder:
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 0:
            received = torch.zeros(1)
            # NCCL's recv returns at once: what reads the tensor waits
            assert dist.recv(received, 1) == received.item()
            return None
        time.sleep(0.3)
        if signalled:
            os.kill(pids[0], signal.SIGUSR2)
        for rank in (0, 1):
            limit = time.monotonic() + 20
            while not (folder / f"rank-{rank}.json").exists():
                assert time.monotonic() < limit, f"rank {rank} writes nothing"
                time.sleep(0.01)
        files = [read(folder, rank) for rank in (0, 1)]
        dist.send(torch.ones(1), 0)
        assert recorder.path == folder / "rank-1.json"
        return files


@in_processes
@pytest.mark.parametrize("signalled", [True, False])
@pytest.mark.verifies(RECORDER)
@pytest.mark.verifies(WATCH)
def test_a_rank_that_waits_in_cpp_writes(world, tmp_path, signalled):
    stuck_after = 60.0 if signalled else 0.5
    files = world(2).run(stuck_until_written, tmp_path, stuck_after, signalled)[1]
    reason = "SIGUSR2" if signalled else "a call has not ended after 0.5 s"
    assert files[0]["reason"] == reason
    assert files[1]["reason"] == "another rank asked for it"
    last = files[0]["entries"][-1]
    assert last["state"] == "started" and "recv 0<-1" in last["profiling_name"]
    for file in files:
        assert file["frames"][0]["name"] == "stuck_until_written"
    assert files[0]["frames"] == last["frames"]


def raises(folder, started: bool):
    if started:
        recorder = FlightRecorder(folder).start()
        with pytest.raises(ValueError, match="started already"):
            recorder.start()
        recorder.stop()
        recorder.stop()
        assert read(folder, dist.get_rank())["reason"] == "ended"
    with FlightRecorder(folder):
        dist.barrier()
        raise KeyError("lost")


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.verifies(RECORDER)
def test_an_exception_is_written_with_its_line(world, tmp_path, started):
    with pytest.raises(KeyError):
        world(2).run(raises, tmp_path, started)
    for rank in (0, 1):
        found = read(tmp_path, rank)
        assert found["reason"] == "raised KeyError: 'lost'"
        assert found["frames"][0]["name"] == "raises"


SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from xtrain.comm.flight_recorder import FlightRecorder
from xtrain.testing import World
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen = []
signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
FlightRecorder(sys.argv[1]).start().stop()
os.kill(os.getpid(), signal.SIGUSR2)
FlightRecorder(sys.argv[1]).start()
os.kill(os.getpid(), signal.SIGUSR2)
assert seen == [1, 1], "a handler that was there is called"
dist.all_reduce(torch.ones(2))
raise OSError("unhandled")
"""


@pytest.mark.verifies(RECORDER)
def test_an_unhandled_exception_is_written_at_exit(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True
    )
    assert "OSError: unhandled" in ended.stderr
    found = read(tmp_path, 0)
    assert found["reason"] == "raised OSError: unhandled"
    assert found["entries"][-1]["state"] == "completed"


def bad(folder):
    for wrong in ({"capacity": 0}, {"stuck_after": 0.0}, {"stuck_after": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FlightRecorder(folder, **wrong)
    (folder / f"file{dist.get_rank()}").touch()
    with pytest.raises(FileExistsError):
        FlightRecorder(folder / f"file{dist.get_rank()}").start()
    dist.all_reduce(torch.ones(1))  # nothing of it is left
    return True


@pytest.mark.verifies(RECORDER)
def test_bad_arguments_are_refused_on_every_rank(world, tmp_path):
    assert world(2).run(bad, tmp_path) == [True, True]
    with pytest.raises(ValueError, match="after init_process_group"):
        FlightRecorder(tmp_path).start()


def watched(folder):
    with FlightRecorder(folder), CommLedger() as ledger:
        dist.all_reduce(torch.ones(2))
    return len(read(folder, dist.get_rank())["entries"]), len(ledger.events)


@pytest.mark.verifies(RECORDER)
def test_a_call_that_goes_through_the_dispatcher_is_recorded_once(tmp_path):
    with World(2, "xtrain-socket") as ranks:
        assert ranks.run(watched, tmp_path) == [(1, 1)] * 2


THREADS = """
import gc, threading, time
from xtrain.comm.flight_recorder_watch import frame_of

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.001)  # other threads run

def look():
    for _ in range(200):
        Garbage()
        frame_of(threading.main_thread().ident)

looking = threading.Thread(target=look)
gc.set_threshold(1)
looking.start()
while looking.is_alive():
    other = threading.Thread(target=int)
    other.start()
    other.join()
"""


@pytest.mark.verifies("xtrain.comm.flight_recorder_watch:frame_of")
def test_looking_at_a_thread_stops_none_that_starts_or_ends():
    event = threading.Event()
    other = threading.Thread(target=event.wait)
    other.start()
    assert frame_of(other.ident).f_code.co_filename == threading.__file__
    event.set()
    other.join()
    assert frame_of(other.ident) is None
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=300)
