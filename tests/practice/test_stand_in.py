"""The stand-in for torch in a page gives, and refuses, what torch does."""

import math
from pathlib import Path

import pytest
import torch

from tests.practice.in_page import in_page

BEFORE = """
import torch
import torch.nn.functional as F
torch.set_default_dtype(torch.float64)
def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
x, y, z = drawn(4, 6), drawn(4, 6, seed=1), drawn(2, 3, 4, seed=2)
n = torch.tensor([[3, 0, 2], [1, 1, 0]])
def written(change, like=x):
    made = like.clone()
    change(made)
    return made
def differentiated(fn, *leaves):
    asking = [leaf.clone().requires_grad_() for leaf in leaves]
    result = fn(*asking)
    result.backward(drawn(*result.shape, seed=9))
    return torch.cat([leaf.grad.flatten() for leaf in asking])
"""
VALUES = (Path(__file__).parent / "expressions.txt").read_text(encoding="utf-8")
REFUSED = """
x.view(5) · x + z · x[4] · x[:, 6] · torch.cat([x, z[0]]) · x @ y · x.T.view(-1)
bool(x)
x.split([1, 2]) · x.gather(1, n.repeat(2, 1) + 6) · x.item() · x.expand(3, 6) · n.mean()
x[0].add_(x) · n.add_(0.5) · x.narrow(0, 3, 2) · x.transpose(0, 2) · x[[4]] · x[1, 2, 3]
"""
SHOWN = """
def shown(text):
    try:
        value = eval(text, namespace)
    except Exception as error:
        return [type(error).__name__]
    if not isinstance(value, torch.Tensor):
        return ["value", [], [float(value)]]
    numbers = value.double().flatten().tolist()
    kind = str(value.dtype).removeprefix("torch.")
    return [kind, list(value.shape), [float(number) for number in numbers]]
"""


def expressions(text: str) -> list[str]:
    return [part.strip() for line in text.splitlines() if line
            for part in line.split(" · ")]  # fmt: skip


def both(text: str) -> list[tuple[str, list, list]]:
    """Each expression, and what the stand-in and torch give for it."""
    asked = expressions(text)
    program = (
        f"namespace = {{'math': __import__('math')}}\nexec({BEFORE!r}, namespace)\n"
        f"{SHOWN}\nfound = [shown(text) for text in given]"
    )
    namespace: dict = {"math": math, "torch": torch}
    default = torch.get_default_dtype()
    try:
        exec(BEFORE, namespace)
        exec(SHOWN, namespace | {"namespace": namespace}, namespace)
        namespace["namespace"] = namespace
        wanted = [namespace["shown"](part) for part in asked]
    finally:
        torch.set_default_dtype(default)
    return list(zip(asked, in_page(program, asked), wanted, strict=True))


def close(found: list, wanted: list) -> bool:
    """The same dtype and shape, and numbers to 14 digits."""
    if len(found) != 3 or len(wanted) != 3:
        return found == wanted
    pairs = zip(found[2], wanted[2], strict=True)
    return found[:2] == wanted[:2] and all(
        a == b
        or (a != a and b != b)
        or math.isclose(a, b, rel_tol=1e-13, abs_tol=1e-14)
        for a, b in pairs
    )


def test_it_gives_what_torch_gives():
    results = both(VALUES)
    assert len(results) > 200
    assert not [text for text, _, wanted in results if len(wanted) < 3]
    wrong = [one for one in results if not close(one[1], one[2])]
    assert not wrong, "\n".join(map(str, wrong))


def test_random_numbers_are_those_of_torch_bit_for_bit():
    drawn = [text for text in expressions(VALUES) if text.startswith("drawn(")]
    for text, found, wanted in both("\n".join(drawn)):
        assert all(
            math.isclose(a, b, rel_tol=4e-16)
            for a, b in zip(found[2], wanted[2], strict=True)
        ), text


def test_it_refuses_what_torch_refuses():
    for text, found, wanted in both(REFUSED):
        assert wanted[0].endswith("Error"), text
        assert found == wanted, (text, found)


def test_what_it_lacks_is_named():
    program = """
found = []
for text in ("torch.fft", "torch.zeros(1).cholesky()"):
    try:
        eval(text)
    except AttributeError as error:
        found.append(str(error))
"""
    missing, method = in_page(program)
    assert "torch.fft cannot be had in a page" in missing
    assert "`cholesky`" in method


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_sampler_to_compare_with_is_torchs(count):
    from torch.utils.data import DistributedSampler

    program = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from xtrain.practice.replay_ranks import Ranks
def program():
    made = DistributedSampler(range(given[0]), drop_last=given[1])
    made.set_epoch(3)
    return list(made)
found = Ranks(given[2]).run(program)
"""
    for length in (1, 10, 101):
        for drop in (False, True):
            found = in_page(program, [length, drop, count])
            for rank in range(count):
                sampler = DistributedSampler(range(length), count, rank, drop_last=drop)
                sampler.set_epoch(3)
                assert found[rank] == list(sampler)
