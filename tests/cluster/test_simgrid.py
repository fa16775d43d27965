"""The virtual clock against SimGrid's, with and without contention."""

import subprocess

import pytest

from tests.cluster.simgrid_patterns import PATTERNS, PYTHON, line, ours, simgrids


def has_simgrid() -> bool:
    try:
        asked = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True)
    except OSError:
        return False
    return asked.returncode == 0


@pytest.fixture(scope="module", autouse=True)
def needs_simgrid():
    if not has_simgrid():
        pytest.skip(f"{PYTHON} has no simgrid: apt-get install python3-simgrid")


@pytest.mark.slow
@pytest.mark.verifies("xtrain.cluster.network:SharedLinks")
@pytest.mark.parametrize("name", PATTERNS)
def test_every_rank_ends_where_simgrid_says(name):
    """5 % is the aim; they share bandwidth by one rule and differ by rounding."""
    topology, size, make, nbytes = PATTERNS[name]
    ranks = make(size, nbytes)
    assert ours(topology, ranks) == pytest.approx(simgrids(topology, ranks), rel=1e-6)


@pytest.mark.slow
def test_where_latencies_differ_simgrid_shares_as_tcp_does():
    """Two flows on a link, of routes with 3 and with 1 latencies: TCP's get rates as 1
    to 3, ours alike. 2 and 1 MB: by 1/4 and 3/4, or by halves, of 1 GB/s.
    """
    topology = line(4, latency=1e-6)
    sent = [[3, 2_000_000], [1, 1_000_000]], []
    ranks = [[sent], [([], [[0, 1_000_000]])], [], [([], [[0, 2_000_000]])]]
    found, theirs = ours(topology, ranks), simgrids(topology, ranks)
    assert found[1] == pytest.approx(2e-3, rel=1e-2)
    assert theirs[1] == pytest.approx(1e-3 / 0.75, rel=1e-2)
    assert found[3] == pytest.approx(theirs[3], rel=1e-2)
