"""The page on the clock: its records, and the bench that made one of them."""

import pytest

from tests.cluster.simgrid_patterns import PATTERNS, ours
from xtrain.bench import cluster_clock as bench
from xtrain.cluster import VirtualCluster, flat
from xtrain_docs.lectures.cluster import clock as page


@pytest.mark.parametrize(
    "row", page.recorded("simgrid.json"), ids=lambda r: r["pattern"]
)
def test_the_recorded_patterns_come_out_again(row):
    topology, size, make, nbytes = PATTERNS[row["pattern"]]
    assert max(ours(topology, make(size, nbytes))) == pytest.approx(row["seconds"])
    assert row["seconds"] == pytest.approx(row["simgrid_seconds"], rel=0.05)


def test_all_patterns_are_recorded():
    assert [row["pattern"] for row in page.recorded("simgrid.json")] == list(PATTERNS)


@pytest.mark.parametrize("backend", ["xtrain-shm", "gloo"])
def test_the_recorded_virtual_times_come_out_again(backend):
    result = page.results_over(backend)
    found = {
        which: VirtualCluster(bench.RANKS, flat(*network)).run(bench.virtual)[0]
        for which, network in result["networks"].items()
    }
    assert [row["program"] for row in result["rows"]] == list(bench.PROGRAMS)
    for row in result["rows"]:
        again = found[row["network"]][row["program"]]
        assert again == pytest.approx(row["virtual_seconds"], rel=1e-9)


@pytest.mark.verifies("xtrain.bench.cluster_clock:calibrated")
def test_calibration_finds_the_network_that_made_the_times():
    """Virtual ranks in place of real ones: their network comes out."""
    times = VirtualCluster(bench.RANKS, flat(3e-6, 2e9)).run(bench.virtual)[0]
    for which in ("of all", "of two"):
        assert bench.calibrated(times, which) == pytest.approx((3e-6, 2e9))


def test_the_bench_measures_each_program_in_its_rounds():
    found = VirtualCluster(bench.RANKS, flat(3e-6, 2e9)).run(bench.measured, 21)[0]
    for name, (_, every) in bench.PROGRAMS.items():
        assert len(found[name]) == len(range(0, 21, every))
    assert bench.quiet([3.0, 1.0, *[5.0] * 18]) == 2.0
