"""`xtrain cluster`: scripts for torchrun, unchanged, on the ranks of one process."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from xtrain import cli
from xtrain.cluster import VirtualCluster
from xtrain.cluster.script import Body, place_of, run_script
from xtrain.cluster.topology_text import topology_of

SNIPPETS = Path(__file__).resolve().parents[2] / "snippets"
HEAD = "import os, sys, torch, torch.distributed as dist\n"
RING = f"""{HEAD}
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
from xtrain.cluster import advance
advance(1e-6 * rank)
total = torch.ones(1000) * rank
dist.all_reduce(total)
if rank == 0:
    dist.send(total, 1)
elif rank == 1:
    dist.recv(total, 0)
print(rank, int(total[0]))
dist.destroy_process_group()
"""


def script(folder, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def ran(capsys, *words, code: int = 0) -> tuple[str, str]:
    """What a command printed; its exit code is `code`."""
    try:
        ended = cli.main(["cluster", *map(str, words)])
    except SystemExit as end:
        ended = end.code
    said = capsys.readouterr()
    assert ended == code, said.err
    return said.out, said.err


def printed(out: str) -> list[str]:
    """The lines of the script, less the report below them."""
    return sorted(out.partition("\n\nranks ")[0].splitlines())


@pytest.mark.verifies("xtrain.cluster.script:run_script")
def test_a_script_runs_on_every_rank_and_the_report_is_below(tmp_path, capsys):
    out, _ = ran(capsys, script(tmp_path, RING), "--ranks", 4, "--topology",
                 "flat:1e-6,1e9")  # fmt: skip
    assert printed(out) == [f"{rank} 6" for rank in range(4)]
    report = dict(re.findall(r"^([a-z_, ]+?)  +(.+)$", out, re.MULTILINE))
    assert report["ranks"] == "4 on flat(1e-06, 1e+09)"
    # the last rank begins at 3 us; 4 ranks: the trees take 2 log2(4) latencies and
    # the bytes of the tensor, or the ring 6 and 3/2 of them; then a message of 4 kB
    trees, ring = 4 + 4, 6 + 6
    assert report["virtual time"] == f"{3 + min(trees, ring) + 5} us (rank 0 ends last)"
    assert report["messages"] == "1, 4 kB in all"
    assert report["all_reduce"] == "1, 4 kB in all"
    assert "to" in report["busiest link"] and "load" in report["busiest link"]


def test_operators_take_the_time_of_an_accelerator(tmp_path, capsys):
    text = f'{HEAD}dist.init_process_group("gloo")\ntorch.ones(10_000_000) + 1\n'
    out, _ = ran(capsys, script(tmp_path, text), "--ranks", 2, "--accelerator", "h100")
    # filled: 40 MB written; added: 40 MB read and 40 MB written, 3.35 TB a second
    assert "compute, at most  35.8 us" in out
    *_, err = ran(capsys, script(tmp_path, text), "--accelerator", "h1", code=2)
    assert "unknown accelerator 'h1'" in err


@pytest.mark.parametrize(
    "init",
    [
        'dist.init_process_group("gloo")',
        'dist.init_process_group("nccl")',
        "dist.init_process_group()",
        'dist.init_process_group("cpu:gloo,cuda:nccl")',
        'dist.init_process_group("gloo", init_method="env://")',
        'dist.init_process_group("gloo", "tcp://10.0.0.1:29500", rank=int('
        'os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))',
        'dist.init_process_group("gloo", store=dist.HashStore(), rank=int('
        'os.environ["RANK"]), world_size=3)',
        "from torch.distributed import init_process_group as init; init('gloo')",
    ],
)
def test_groups_of_any_backend_are_made_on_the_cluster(init, tmp_path, capsys):
    text = f"""{HEAD}
assert not dist.is_initialized()
{init}
assert dist.get_backend() == "xtrain-virtual"
rank = dist.get_rank()
assert (rank, 3) == (int(os.environ["RANK"]), dist.get_world_size())
pair = dist.new_group([0, 2], backend="gloo")
total = torch.tensor(1 + rank)
if rank != 1:
    dist.all_reduce(total, group=pair)
dist.barrier()
mesh = dist.init_device_mesh("cpu", (3,))
dist.all_reduce(total, group=mesh.get_group())
print(int(total))
dist.destroy_process_group()
assert not dist.is_initialized()
dist.init_process_group("gloo")
dist.barrier()
"""
    out, _ = ran(capsys, script(tmp_path, text), "--ranks", 3)
    assert printed(out) == ["10"] * 3


def test_each_rank_has_its_own_globals_main_arguments_and_environment(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("shared = []\n")
    text = f"""{HEAD}
import pickle, beside
counter = 0
class Mine:
    pass
def count():
    global counter
    counter += 1
    return counter
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(rank + 1):
    count()
    dist.barrier() if False else dist.all_gather_object([None] * 10, Mine())
    if _ == 0: first = counter
    if rank == 0: break
""".replace("if rank == 0: break", "break")
    text += """
assert counter == 1 and type(pickle.loads(pickle.dumps(Mine()))) is Mine
assert sys.modules["__main__"].count is count and __name__ == "__main__"
beside.shared.append(rank)
place = [os.environ[n] for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
print(rank, *place, os.environ["MASTER_ADDR"], *sys.argv[1:])
assert sys.argv[0] == __file__
"""
    before = sys.argv, list(sys.path), sys.modules["__main__"], dict(os.environ)
    helpers = c10d._new_process_group_helper, c10d.rendezvous
    path = script(tmp_path, text)
    out, _ = ran(capsys, path, "one", "--ranks", 10, "--", "--lr", "0.1", "--ranks")
    assert printed(out) == sorted(
        f"{r} {r % 8} {8 if r < 8 else 2} {r // 8} 127.0.0.1 one --lr 0.1 --ranks"
        for r in range(10)
    )
    after = sys.argv, list(sys.path), sys.modules["__main__"], dict(os.environ)
    assert after[:3] == before[:3]
    assert after[3] == before[3] | {"CUDA_VISIBLE_DEVICES": ""}
    assert (c10d._new_process_group_helper, c10d.rendezvous) == helpers
    assert not dist.is_initialized()


@pytest.mark.parametrize("place", [place_of(1, 4, 4), place_of(9, 12, 8)])
def test_places_are_those_that_torchrun_gives(place):
    rank, local = int(place["RANK"]), int(place["LOCAL_RANK"])
    node, size = int(place["GROUP_RANK"]), int(place["LOCAL_WORLD_SIZE"])
    assert local < size <= int(place["WORLD_SIZE"])
    assert rank == local + node * (rank - local if node else 1) or node == 0


def test_options_may_stand_before_the_script_too(tmp_path, capsys):
    path = script(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    out, _ = ran(capsys, "--ranks", 2, path, "--topology", "none", "a", "b")
    assert printed(out) == ["['a', 'b']"] * 2
    assert "2 on no topology" in out


# ------------------------------------------------------------------------- drawings


def test_a_timeline_a_trace_and_a_heat_map_are_written(tmp_path, capsys):
    files = [tmp_path / name for name in ("a.svg", "b.json", "c.svg")]
    svg, trace, heat = files
    ran(capsys, script(tmp_path, RING), "--ranks", 16, "--svg", svg, "--trace", trace,
        "--heat", heat)  # fmt: skip
    for file in (svg, heat):
        assert ET.fromstring(file.read_text()).tag.endswith("svg")
    assert "script.py: 16 ranks" in svg.read_text()
    assert "gpu 8 in: " in heat.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["name"] == "thread_name" for e in events) == 16
    assert [e["tid"] for e in events if e["ph"] in "sf"] == [0, 1]


def test_the_timeline_of_a_deadlock_is_drawn(tmp_path, capsys):
    text = f"""{HEAD}
from xtrain.cluster import advance
dist.init_process_group()
advance(1e-3)
dist.send(torch.zeros(4), (dist.get_rank() + 1) % 3)
"""
    svg = tmp_path / "a.svg"
    out, err = ran(
        capsys, script(tmp_path, text), "--ranks", 3, "--svg", svg, code=1
    )  # fmt: skip
    assert out == "" and "deadlock" in err.lower() and "script.py:6" in err
    assert "rank 2" in err and "send([4] float32, dst=0)" in err
    assert "3 ranks, 1 ms" in svg.read_text()


# --------------------------------------------------------------------------- errors


def test_an_error_of_a_rank_is_shown_with_its_line_and_the_code_is_1(tmp_path, capsys):
    text = f"{HEAD}\ndist.init_process_group()\nif dist.get_rank() == 1:\n    1 / 0\n"
    text += "dist.barrier()\n"
    out, err = ran(capsys, script(tmp_path, text), "--ranks", 2, code=1)
    assert "ZeroDivisionError" in err and "script.py" in err and "rank 1" in err
    assert "ranks  " not in out


@pytest.mark.parametrize(("exit_", "code"), [("0", 0), ("", 0), ("3", 1), ("'no'", 1)])
def test_sys_exit_ends_a_rank(exit_, code, tmp_path, capsys):
    path = script(tmp_path, f"import sys\nprint('here')\nsys.exit({exit_})\n")
    out, err = ran(capsys, path, "--ranks", 2, code=code)
    assert printed(out)[:2] == ["here", "here"]
    assert (f"sys.exit({exit_})" in err) == bool(code)


def test_another_place_than_the_ranks_own_is_refused(tmp_path, capsys):
    text = f"{HEAD}dist.init_process_group('gloo', rank=0, world_size=1)\n"
    _, err = ran(capsys, script(tmp_path, text), "--ranks", 2, code=1)
    assert "rank 0 of world_size 1, but this is rank 0 of a cluster of 2" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "at least one rank, got 0"),
        (["--ranks", "many"], "invalid int value"),
        (["--topology", "star"], "no topology 'star'; there are dgx_h100"),
        (["--topology", "flat"], "missing a required argument: 'latency'"),
        (["--topology", "flat:x,1"], "latency='x' is not a number"),
        (["--topology", "fat_tree:2,leafs=3"], "'leafs'"),
        (["--topology", "dgx_h100(2.5)"], "nodes=2.5"),
        (["--topology", "nvlink:4"], "nvlink(4) joins 4 ranks, the cluster has 8"),
        (["--topology", "gone.json"], "No such file or directory: gone.json"),
        (["--lr", "0.1"], "no option --lr; words of the script that begin with -"),
        (["--rank", "4"], "no option --rank"),
        (["--svg", "/gone/a.svg"], "No such file or directory: /gone/a.svg"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words, said, tmp_path, capsys):
    path = script(tmp_path, "pass\n")
    out, err = ran(capsys, path, *words, code=2)
    assert said in err and err.count("\n") == 1 and "Traceback" not in err
    assert out == ""


def test_a_script_that_is_not_there_or_not_python_is_one_line(tmp_path, capsys):
    _, err = ran(capsys, tmp_path / "gone.py", code=2)
    assert "gone.py" in err and err.count("\n") == 1
    _, err = ran(capsys, script(tmp_path, "a = = 1\n"), code=2)
    assert "script.py, line 1" in err and err.count("\n") == 1


def test_a_closed_pipe_ends_it_in_silence(tmp_path):
    path = script(tmp_path, "for n in range(20000): print('word', n, flush=True)\n")
    line = f"{sys.executable} -m xtrain cluster {path} --ranks 2 | head -1"
    ended = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("word 0\n", "")


# ----------------------------------------------------------------------- topologies


@pytest.mark.verifies("xtrain.cluster.topology_text:topology_of")
@pytest.mark.parametrize(
    ("text", "ranks", "name", "size"),
    [
        ("dgx_h100", 64, "dgx_h100(8)", 64),
        ("dgx_h100", 9, "dgx_h100(2)", 16),
        ("dgx_h100:4", 9, "dgx_h100(4)", 32),
        ("dgx_h100(nodes=4)", 9, "dgx_h100(4)", 32),
        ("nvlink", 5, "nvlink(5)", 5),
        ("flat:1e-6,50e9", 5, "flat(1e-06, 5e+10)", None),
        ("flat(latency=1e-6, bandwidth=50e9)", 5, "flat(1e-06, 5e+10)", None),
        ("fat_tree", 64, "fat_tree(8, leaf=4, oversubscription=1)", 64),
        ("fat_tree:2,leaf=1,oversubscription=2.5", 4,
         "fat_tree(2, leaf=1, oversubscription=2.5)", 16),
        ("tpu_torus:4,2", 8, "tpu_torus(4, 2)", 8),
    ],
)  # fmt: skip
def test_topologies_by_name(text, ranks, name, size):
    found = topology_of(text, ranks)
    assert (found.name, found.size) == (name, size)


def test_a_table_of_links_in_a_file(tmp_path):
    path = tmp_path / "links.json"
    path.write_text('{"links": [[0, 1, 1e-6, 5e9], [1, 2, 2e-6, 5e9]]}')
    route = topology_of(str(path), 3).route(0, 2)
    assert route.links == ("0 to 1", "1 to 2") and route.latency == pytest.approx(3e-6)
    assert topology_of("none", 3) is None
    for wrong in ("[]", "{", '{"links": [[0, 1]]}', '{"links": 3}', '{"a": 1}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"links.json: a topology is"):
            topology_of(str(path), 3)
    path.write_text('{"size": 3, "links": [[0, 1, 1e-6, 5e9]], "both": true}')
    with pytest.raises(ValueError, match="rank 0 cannot reach ranks \\[2\\]"):
        topology_of(str(path), 3)


# ------------------------------------------------------------------- our own scripts


@pytest.mark.parametrize(
    "name",
    ["lc1/all_gather", "lc1/groups", "lc1/hierarchical", "lc1/async_sgd"],
)
def test_snippets_for_torchrun_run_unchanged(name, capsys):
    path = SNIPPETS / f"{name}.py"
    ranks = re.search(r"--nproc-per-node (\d+)", path.read_text())[1]
    out, _ = ran(capsys, path, "--ranks", ranks, "--topology", "nvlink")
    expected = path.with_suffix(".out").read_text().splitlines()
    assert printed(out) == sorted(expected)


def test_a_cluster_may_run_a_script_without_the_command(tmp_path):
    cluster = VirtualCluster(2)
    run_script(cluster, Path(script(tmp_path, f"{HEAD}dist.init_process_group()\n")))
    assert cluster.seconds == [0.0, 0.0] and Body.__doc__
