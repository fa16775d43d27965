"""The page on all-reduce at 1,024: the record, its formulas and its figures."""

import pytest

from xtrain.bench import cluster_all_reduce as bench
from xtrain_docs.lectures.cluster import ring_or_tree as page

RECORDED = [
    (*of, size) for of, sizes in page.recorded().items() for size in sorted(sizes)
]
CHEAP = [
    (name, topology, ranks, size) for name, topology, ranks, size in RECORDED
    if size == bench.GIB and (ranks == 64 or name == "tree")
]  # fmt: skip


@pytest.mark.parametrize(("name", "topology", "ranks", "size"), RECORDED)
def test_every_recorded_time_is_its_closed_form(name, topology, ranks, size):
    took = page.recorded()[name, topology, ranks][size]
    formula = page.all_reduce_formula(name, size, ranks, topology == bench.NODES)
    assert took == pytest.approx(formula, rel=1e-9)


def again(name, topology, ranks, size):
    took = bench.measure(name, topology, ranks, size)["seconds"]
    assert took == pytest.approx(page.recorded()[name, topology, ranks][size], rel=1e-9)


@pytest.mark.parametrize(("name", "topology", "ranks", "size"), CHEAP)
@pytest.mark.verifies("xtrain.bench.cluster_all_reduce:all_reduce")
@pytest.mark.verifies("xtrain.cluster.topology:dgx_h100")
def test_the_record_comes_out_again(name, topology, ranks, size):
    again(name, topology, ranks, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "ranks", "size"), sorted(set(RECORDED) - set(CHEAP))
)
def test_all_of_the_record_comes_out_again(name, topology, ranks, size):
    again(name, topology, ranks, size)


def test_the_record_has_what_the_command_runs():
    asked = [(*row, size) for *row, sizes in bench.ROWS for size in sizes]
    assert sorted(asked) == sorted(RECORDED)


def test_a_row_that_the_file_has_is_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROWS", [("tree", bench.FLAT, 2, (4096, 8192))])
    file = tmp_path / "new" / "record.json"
    bench.main(["-o", str(file)])
    assert len(capsys.readouterr().out.splitlines()) == 2
    bench.main(["-o", str(file)])
    assert capsys.readouterr().out == ""
    assert file.read_text().count('"tree"') == 2


def test_a_ring_uses_one_adapter_of_eight_and_two_levels_use_all():
    for name, used in (("ring", 2), ("hierarchical", 16)):
        links = page.links_of(name, 16, 2**20)["links"]
        assert sum(link.endswith(" out") for link in links) == used, name


def test_where_two_algorithms_are_equal_on_nodes():
    equal = page.all_reduce_crossover("halving_doubling", "hierarchical")
    for size, first in ((equal * 0.9, True), (equal * 1.1, False)):
        halving, two_levels = (
            page.all_reduce_formula(name, size, nodes=True)
            for name in ("halving_doubling", "hierarchical")
        )
        assert (halving < two_levels) is first
