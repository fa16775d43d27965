"""`xtrain plan`, as it is typed: tables, data, and errors."""

import json

import pytest

from xtrain.cli import main
from xtrain.plan import Layout, ModelShape, estimate, sent_by_axis, traffic_per_step

COMMAND = "xtrain.cli.plan:run"
WORDS = ["plan", "--model", "llama-3-70b", "--gpus", "64", "--gpu", "a100-80gb",
         "--sequence", "8192"]  # fmt: skip


@pytest.mark.verifies(COMMAND)
def test_the_tables(capsys):
    assert main([*WORDS, "--top", "3"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 88
    assert "70.55 B parameters, 64 x a100-80gb of 74.5 GiB" in lines[0]
    assert "4.19 M tokens" in lines[1]
    ranked = [line for line in lines if line[:2] in (" 1", "1 ", "2 ", "3 ", "4 ")]
    assert [line.split()[0] for line in ranked] == ["1", "2", "3"]
    for words in ("zero-with-pipeline", "6543 layouts tried", "M main gradients",
                  "of which 4 should stay free", "seconds of 1: compute"):  # fmt: skip
        assert words in said
    bar = next(line for line in lines if line.startswith("[WW"))
    assert len(bar) == 88 and bar.endswith("]")


@pytest.mark.verifies(COMMAND)
def test_the_same_as_data(capsys):
    words = ["--json", "--top", "2", "--tensor", "8", "--pipeline", "2", "--zero", "1",
             "--context", "1", "--recompute", "none", "--memory", "79.2"]  # fmt: skip
    assert main([*WORDS, *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 70_553_706_496 and len(data["layouts"]) == 2
    assert "and a device has 79.2" in data["rejected"][0]["why"]
    first = data["layouts"][0]
    assert first["name"] == "TP8 PP2 DP4 ZeRO-1"
    fields = {name: first[name] for name in Layout.__dataclass_fields__}
    layout, shape = Layout(**fields), ModelShape.preset("llama-3-70b")
    found = estimate(shape, layout, "a100-80gb", 8192)
    assert first["seconds"] == found.seconds and first["mfu"] == found.mfu
    assert first["memory"] == found.memory.total
    assert first["memory_by_part"] == found.memory.parts()
    sent = traffic_per_step(shape, layout, 8192)
    assert first["sent_by_axis"] == sent_by_axis(sent)
    assert sum(one["count"] for one in data["rejected"]) + data["fit"] == data["tried"]


@pytest.mark.verifies(COMMAND)
def test_the_range_the_run_and_why(capsys):
    words = ["--explain", "--tokens", "1e12", "--price", "2", "--tensor", "8"]
    assert main([*WORDS, *words]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 88
    text = " ".join(said.split())
    for part in ("eight of ten published runs with this estimate measured",
                 "1,000 B tokens:", "dollars;", "goodput", "Chinchilla: 1,411 B",
                 " beats ", "Compute takes", "half the network"):  # fmt: skip
        assert part in text
    assert main([*WORDS, "--json", "--tokens", "1e12", "--tensor", "8"]) == 0
    data = json.loads(capsys.readouterr().out)
    first = data["layouts"][0]
    low, high = first["tokens_per_second_range"]
    assert low < first["tokens_per_second"] < high
    assert data["whole_run"]["dollars"] is None and data["whole_run"]["days"] > 100


@pytest.mark.verifies(COMMAND)
def test_no_mfu_above_100_is_printed(capsys):
    words = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--sequence", "262144",
             "--batch", "1", "--context", "8", "--gpu", "b200"]  # fmt: skip
    assert main([*words, "--json", "--top", "1"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert first["causal_mfu"] < 1
    assert main([*words, "--top", "1"]) == 0
    row = next(
        x
        for x in capsys.readouterr().out.splitlines()
        if x.startswith("1 ") and "ZeRO" in x
    )
    assert f"{100 * first['causal_mfu']:.1f}%" in row
    assert (f"{100 * first['mfu']:.1f}%" in row) is (first["mfu"] <= 1)


@pytest.mark.verifies(COMMAND)
def test_no_layout_fits(capsys):
    words = ["plan", "--model", "llama-3-70b", "--gpus", "2", "--gpu", "v100"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "no layout fits; why not:" in said and "memory" in said


@pytest.mark.verifies(COMMAND)
def test_offload_and_overlap_change_what_is_found(capsys):
    words = ["plan", "--model", "llama-3-70b", "--gpus", "8", "--batch", "8", "--json"]
    assert main(words) == 1 and not json.loads(capsys.readouterr().out)["fit"]
    assert main([*words, "--offload", "--top", "50"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert found and all(one["offload"] for one in found)
    cut = [*words, "--offload", "--tensor", "4", "--top", "1"]
    seconds = []
    for more in ([], ["--tensor-overlap"]):
        assert main([*cut, *more]) == 0
        (one,) = json.loads(capsys.readouterr().out)["layouts"]
        seconds.append(one["seconds_by_part"]["tensor"])
    assert seconds[1] < seconds[0] / 4


@pytest.mark.verifies(COMMAND)
def test_chunks_and_hybrid_sharding_are_tried_where_asked(capsys):
    words = ["plan", "--model", "llama-3-8b", "--gpus", "32", "--batch", "64",
             "--json", "--top", "1000"]  # fmt: skip
    assert main([*words, "--chunks", "8", "--pipeline", "4"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert {one["chunks"] for one in found} == {1, 8}
    assert main([*words, "--hybrid", "--zero", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert {one["replicate"] for one in found} == {1, 4}
    with pytest.raises(SystemExit):
        main([*words, "--chunks", "few"])
