"""What the original notes on data parallelism say, and what is right.

Each test is the proof of one entry of the errata page; more proofs of that page are in
test_ddp.py, test_sampler.py, test_interview_lc2.py and tests/docs/test_errata.py.
"""

from xtrain.plan import zero_memory

BILLION = 10**9


def test_seven_billion_do_not_fit_under_ddp():
    """E53: model state alone, before activations."""
    assert zero_memory(7 * BILLION, 8, 0) == 112 * BILLION  # however many ranks
    assert zero_memory(7 * BILLION, 1024, 0) > 80 * BILLION
    assert zero_memory(5 * BILLION, 8, 0) == 80 * BILLION  # nothing left for the rest
    assert zero_memory(7 * BILLION, 8, 2) == 26.25 * BILLION
