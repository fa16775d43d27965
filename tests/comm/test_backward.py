"""The end of backward, without any rank: when reductions leave, and in which order."""

import pytest
import torch
from torch import nn

from xtrain.comm.backward import Reducer


class OneBucket:
    def __init__(self, parameters):
        self.parameters, self.waiting = parameters, set(parameters)


class Watched:
    """A model of four factors; notes what its reducer does, in order."""

    def __init__(self, in_flight=None, fails=False):
        self.factors = [nn.Parameter(torch.ones(2)) for _ in range(4)]
        self.seen, self.fails = [], fails
        self.reducer = Reducer(self.issue, self.reducer_finish, in_flight)
        last_first = self.factors[::-1]
        self.buckets = [OneBucket([last_first[1]]), OneBucket([last_first[0]])]
        self.buckets += [OneBucket(last_first[2:])]
        self.reducer.buckets = self.buckets
        for number, factor in enumerate(self.factors):
            factor.register_post_accumulate_grad_hook(
                lambda p, number=number: self.ready(number, p)
            )

    def ready(self, number, parameter):
        if self.reducer.enter_backward():
            self.seen.append("first")
        self.seen.append(number)
        for bucket in self.buckets:
            bucket.waiting -= {parameter}
        self.reducer.issue_complete()
        if self.fails and number == 2:
            raise RuntimeError("on purpose")

    def issue(self, bucket):
        name = "abc"[self.buckets.index(bucket)]
        self.seen.append(f"issue {name}")
        seen = self.seen

        class Work:
            def wait(self):
                seen.append(f"wait {name}")

            def abandon(self):
                seen.append(f"abandon {name}")

        return Work()

    def reducer_finish(self):
        self.seen.append("end")
        self.reducer.finish()

    def backward(self, used=(0, 1, 2, 3)):
        """Gradients arrive from factor 3 to factor 0."""
        self.seen.clear()
        x = torch.ones(2)
        for number in used:
            x = torch.tanh(x * self.factors[number])
        x.sum().backward()
        return self.seen


@pytest.mark.verifies("xtrain.comm.backward:Reducer")
def test_buckets_leave_in_order_and_are_waited_for_at_the_end():
    """Bucket b is complete first, and waits for a."""
    steps = ["first", 3, 2, "issue a", "issue b", 1, 0, "issue c"]
    waits = ["end", "wait a", "wait b", "wait c"]
    watched = Watched()
    for _ in range(2):
        assert watched.backward() == steps + waits


@pytest.mark.verifies("xtrain.comm.backward:Reducer")
def test_what_is_incomplete_leaves_at_the_end_in_order():
    watched = Watched()
    expected = ["first", 3, 0, "end", "issue a", "issue b", "issue c"]
    assert watched.backward(used=(0, 3)) == [*expected, "wait a", "wait b", "wait c"]
    assert watched.backward()[:5] == ["first", 3, 2, "issue a", "issue b"]


@pytest.mark.verifies("xtrain.comm.backward:Reducer")
def test_no_more_than_the_limit_are_under_way():
    expected = ["first", 3, 2, "issue a", "issue b", "wait a", 1, 0, "issue c"]
    assert Watched(in_flight=1).backward() == [*expected, "wait b", "end", "wait c"]


@pytest.mark.verifies("xtrain.comm.backward:Reducer")
def test_a_backward_that_failed_is_forgotten_by_the_next():
    watched = Watched(fails=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        watched.backward()
    assert watched.seen == ["first", 3, 2, "issue a", "issue b"]
    watched.fails = False
    expected = ["abandon a", "abandon b"]  # their memory is used again
    expected += ["first", 3, 2, "issue a", "issue b", 1, 0, "issue c"]
    assert watched.backward() == [*expected, "end", "wait a", "wait b", "wait c"]
