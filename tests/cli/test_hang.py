"""`xtrain hang`: faults of real processes are told from the files that they leave."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from xtrain import cli
from xtrain.comm.flight_recorder import FlightRecorder
from xtrain.comm.flight_recorder_files import read_dumps
from xtrain.comm.flight_recorder_report import diagnose
from xtrain.testing import World
from xtrain.testing.errors import RankError

HANG = "xtrain.cli.hang:run"
DIAGNOSE = "xtrain.comm.flight_recorder_report:diagnose"
READ = "xtrain.comm.flight_recorder_files:read_dumps"


def healthy(rank, group, first, second):
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_gather([torch.ones(2)] * 3, torch.ones(2), group=first)
    if rank:
        dist.send(torch.ones(2), 0, group=second)
    else:
        for source in (1, 2):
            dist.recv(torch.ones(2), source, group=second)


def skipped(rank, group, first, second):
    if rank != 1:
        dist.all_reduce(torch.ones(3), group=group)


def other_call(rank, group, first, second):
    if rank == 1:
        dist.broadcast(torch.ones(3), 0, group=group)
    else:
        dist.all_reduce(torch.ones(3), group=group)


def other_shape(rank, group, first, second):
    dist.all_reduce(torch.ones(3 + (rank == 2)), group=group)


def swapped(rank, group, first, second):
    for one in (second, first) if rank == 1 else (first, second):
        dist.all_reduce(torch.ones(2), group=one)


def no_receive(rank, group, first, second):
    if rank == 0:
        dist.send(torch.ones(100_000), 1, group=group)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=first)


def no_send(rank, group, first, second):
    if rank == 0:
        work = dist.irecv(torch.ones(2), 2, group=group)
        work.wait()


def circle(rank, group, first, second):
    dist.recv(torch.ones(2), (rank + 1) % 3, group=group)


def raises(rank, group, first, second):
    if rank == 2:
        raise KeyError("no such batch")
    dist.all_reduce(torch.ones(3), group=group)


def signalled(rank, group, first, second, number):
    if rank == 1:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(3), group=group)


def stopped(*args):
    signalled(*args, signal.SIGSTOP)


def killed(*args):
    signalled(*args, signal.SIGKILL)


def recorded(folder, program):
    seconds = timedelta(seconds=2)
    groups = [dist.new_group([0, 1, 2], timeout=seconds) for _ in range(3)]
    dist.barrier()
    with FlightRecorder(folder, stuck_after=1.1):
        dist.barrier(group=groups[0])
        program(dist.get_rank(), *groups)


def fault(program, world: World, folder, capsys, timeout=30) -> str:
    """What the command prints about the files of a program."""
    with contextlib.suppress(RankError):
        world.run(recorded, folder, program, timeout=timeout)
    code = cli.main(["hang", str(folder)])
    printed = capsys.readouterr().out
    assert code == int("no fault" not in printed)
    return re.sub(r"\S*test_hang.py:\d+ in ", "", printed)


STUCK = r"stuck at call 2, all_reduce\(float32\[3\]\)\n"
TELLS = {
    healthy: r"^no fault: the \d+ recorded calls of ranks 0 to 2 agree",
    skipped: STUCK + "  ranks 0 and 2 wait at skipped\n  rank 1 is missing: its last "
    "call there is number 1, and it has ended, last seen at recorded",
    other_call: r"differ first at call 2\n  ranks 0 and 2: all_reduce\(float32\[3\]\) "
    r"at other_call\n  rank 1: broadcast\(float32\[3\]\) at other_call",
    other_shape: r"differ first at call 2\n  ranks 0 and 1: all_reduce\(float32\[3\]\) "
    r"at other_shape\n  rank 2: all_reduce\(float32\[4\]\) at other_shape",
    swapped: "each of these calls waits for the next: rank 0 -> rank 1 -> rank 0\n"
    r"  rank 0: all_reduce\(float32\[2\]\) at swapped in group '(\d+)'.* waits for "
    r"rank 1\n  rank 1: all_reduce\(float32\[2\]\) at swapped in group '(?!\1)",
    no_receive: r"rank 0 waits in send\(float32\[100000\]\) to rank 1 at no_receive\n"
    r"  rank 1 has not received it: it waits in all_reduce\(float32\[1\]\) at no_rec",
    no_send: r"rank 0 waits in recv\(float32\[2\]\) from rank 2 at no_send\n"
    "  rank 2 has not sent it: it has ended",
    circle: "each of these calls waits for the next: rank 0 -> rank 1 -> rank 2 -> "
    r"rank 0\n  rank 0: recv\(float32\[2\]\) from rank 1 at circle",
    raises: f"(?s)rank 2 raised KeyError: 'no such batch' at raises\n.*{STUCK}"
    "  ranks 0 and 1 wait at raises\n  rank 2 is missing: .* it raised KeyError",
    stopped: f"{STUCK}  ranks 0 and 2 wait at signalled\n  rank 1 left no file: it was "
    "killed, is stopped",
    killed: f"{STUCK}  ranks 0 and 2 wait at signalled\n  rank 1 left no file: it was "
    "killed",
}  # fmt: skip
IN_PROCESSES = {stopped, killed}


@pytest.mark.parametrize("program", TELLS, ids=lambda program: program.__name__)
@pytest.mark.verifies(HANG)
@pytest.mark.verifies(DIAGNOSE)
@pytest.mark.verifies("xtrain.comm.flight_recorder:FlightRecorder")
def test_what_is_wrong(world, program, tmp_path, capsys):
    ranks = world(3)
    if program is no_receive and ranks.backend != "gloo":
        pytest.skip("other backends keep what is sent until it is received")
    if program in IN_PROCESSES and ranks.backend == "xtrain-virtual":
        pytest.skip("its ranks are threads of this process")
    printed = fault(program, ranks, tmp_path, capsys, 4 if program is stopped else 30)
    assert re.search(TELLS[program], printed), printed


# -- torch's own files


def entry(
    number: int, name: str, sizes, state="completed", group=("0", "default_pg"), **more
):
    message = name.startswith(("send", "recv"))
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/d", "line": 9},
            {"name": "train", "filename": "/home/u/train.py", "line": number},
        ],
        "record_id": number, "process_group": list(group), "is_p2p": message,
        "collective_seq_id": number, "p2p_seq_id": 0, "profiling_name": f"nccl:{name}",
        "time_created_ns": number, "input_sizes": sizes, "output_sizes": sizes,
        "input_dtypes": ["Float"] * len(sizes), "output_dtypes": ["Float"] * len(sizes),
        "state": state, "retired": state == "completed", **more,
    }  # fmt: skip


def torch_file(folder, rank: int, entries) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
              "7": {"name": "7", "desc": "mesh_tensor", "ranks": "[0, 2]"}}  # fmt: skip
    dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


TENSOR = ("7", "mesh_tensor")
OF_TORCH = {
    "healthy": ([(0, entry(0, "barrier", [])), (1, entry(0, "barrier", [])),
                 (2, entry(0, "barrier", [])),
                 # not counted by peer: they may be two messages
                 (0, entry(1, "send 0->1", [[4]], group=TENSOR)),
                 (2, entry(1, "recv 1<-0", [[8]], group=TENSOR))], "no fault"),
    "missing": ([(0, entry(0, "barrier", [])), (1, entry(0, "barrier", [])),
                 (0, entry(1, "all_reduce", [[4, 2]], "started")),
                 (1, entry(1, "all_reduce", [[4, 2]], "scheduled"))],
                r"stuck at call 1, all_reduce\(float\[4, 2\]\)\n  ranks 0 and 1 wait "
                r"at /home/u/train.py:1 in train\n  rank 2 left no file"),
    "differs": ([(0, entry(1, "all_reduce", [[4]])), (2, entry(1, "broadcast", [[4]])),
                 (1, entry(1, "all_reduce", [[4]]))],
                r"at call 1\n  ranks 0 and 1: all_reduce.*\n  rank 2: broadcast"),
    "message": ([(0, entry(0, "recv 0<-1", [[4]], "started", TENSOR)),
                 (2, entry(0, "coalesced", [], is_p2p=True)),
                 (2, entry(1, "all_reduce", [[4]], "started", TENSOR)),
                 (1, entry(0, "barrier", []))],
                r"rank 0 waits in recv\(float\[4\]\) from rank 2 at /home/u/train.py:0 "
                r"in train\n  rank 2 has not sent it: it waits in all_reduce\("
                r"float\[4\]\) at /home/u/train.py:1 in train in group "
                r"'7 mesh_tensor' \(ranks 0 and 2\)"),
    "dropped": ([(0, entry(5, "send 0->1", [[4]], "started", TENSOR)),
                 (2, entry(6, "recv 1<-0", [[4]], "completed", TENSOR))],
                "has not received it: it is at"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_TORCH)
@pytest.mark.verifies(READ)
@pytest.mark.verifies(DIAGNOSE)
def test_files_of_torch_for_nccl(case, tmp_path):
    calls, expected = OF_TORCH[case]
    for rank in {rank for rank, _ in calls}:
        torch_file(tmp_path, rank, [e for owner, e in calls if owner == rank])
    report = diagnose(read_dumps([tmp_path]))
    assert re.search(expected, str(report)), report
    assert report.fault == (case != "healthy")


OWN = """
import sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2, 3))
open(sys.argv[1], "wb").write(c10d._dump_fr_trace())
"""


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="of torch 2.13"
)
@pytest.mark.verifies(READ)
def test_a_file_that_torch_has_written(tmp_path):
    file = tmp_path / "trace_0"
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    subprocess.run([sys.executable, "-c", OWN, file], check=True, env=environment)
    (dump,) = read_dumps([file])
    (call,) = dump.calls
    assert (dump.rank, dump.ranks, call.state) == (0, 1, "completed")
    assert str(call) == "all_reduce(float[2, 3]) at <string>:5 in <module>"


class Harmful:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}/it-ran",)


def damaged(folder) -> dict[str, bytes]:
    torch_file(folder, 0, [entry(0, "barrier", [])])
    whole = (folder / "nccl_trace_rank_0").read_bytes()
    missing = {"version": "2.10", "pg_config": {}, "entries": [{"record_id": 0}]}
    return {
        "cut_1": whole[: len(whole) // 2], "empty_1": b"", "noise_1": b"\x80\x04\xff",
        "rank-1.json": b'{"entries": [', "list_1": b"[1]", "unnamed": whole,
        "fields_1": pickle.dumps(missing),
        "fields-1.json": json.dumps(missing).encode(),
        "harm_1": pickle.dumps({"entries": [], "pg_config": Harmful(folder)}),
    }  # fmt: skip


@pytest.mark.verifies(READ)
def test_a_damaged_file_is_named_and_nothing_in_it_runs(tmp_path, capsys):
    for name, content in damaged(tmp_path).items():
        file = tmp_path / name
        file.write_bytes(content)
        assert cli.main(["hang", str(file)]) == 2, name
        told = capsys.readouterr().err
        assert name in told and "damaged or no file of a flight recorder" in told
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.verifies(READ)
def test_files_that_do_not_go_together_are_refused(tmp_path, capsys):
    torch_file(tmp_path, 0, [])
    file = tmp_path / "nccl_trace_rank_0"
    (tmp_path / "again_0").write_bytes(file.read_bytes())
    (tmp_path / "none").mkdir()
    for words, why in (
        (tmp_path, "two files are of rank 0"),
        (tmp_path / "none", "no file of a flight recorder"),
        (tmp_path / "missing_0", "No such file"),
    ):
        assert cli.main(["hang", str(words)]) == 2
        assert why in capsys.readouterr().err
