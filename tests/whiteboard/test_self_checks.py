"""Every form passes its self-check: at all its sizes, in groups, in other dtypes.

A reader runs the same check on 4 ranks, in float64, from the file he downloads.
"""

import importlib
import re
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.whiteboard.test_rules import form_of
from xtrain.cluster.per_rank import replaced
from xtrain.copying.forms import check_file, forms, header
from xtrain.copying.self_checks import harness

FORMS = {n: path for n, path in forms().items() if path.parent.name != "schedules"}
SIZES = (1, 2, 3, 4, 8)
SENT = re.compile(r"rank \d: \d+ messages, [\d,]+ bytes sent; (?P<formula>.+): [\d,]+")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HALVES = ([0, 2], [1, 3])
WIDE_IN_16_BITS = {
    *("all_gather_attention", "decode_attention", "flash_attention_backward"),
    *("flash_attention_forward", "online_softmax"),
    *("ring_attention_backward", "ring_attention_forward"),
    *("rotary_embedding", "top_k_router", "vocab_parallel_cross_entropy"),
    *("moe_backward", "moe_forward"),
}
"""Forms that give or send fp32 in 16 bits, and experts, whose scores may be equal
there: the tests of their folders compare them."""


def checks_of(name: str) -> ModuleType:
    stem = check_file(name).stem
    return importlib.import_module(f"xtrain.copying.self_checks.{stem}")


def cases(*sizes: int) -> list:
    """Each form at each of the sizes that its check is for, with its mark."""
    found = []
    for name, path in FORMS.items():
        form = form_of(path)
        mark = pytest.mark.verifies(f"{form.__module__}:{form.__name__}")
        for size in sizes:
            if size in getattr(checks_of(name), "SIZES", {}).get(name, SIZES):
                found.append(pytest.param(name, size, marks=mark))
    return found


def checked(name: str, halves: bool = False) -> list[str]:
    """Run a self-check on every rank; the formulas of what is sent."""
    group, said = None, []
    if halves:
        groups = [dist.new_group(half) for half in HALVES]
        group = groups[dist.get_rank() % 2]
    check = getattr(checks_of(name), f"check_{name}")
    before = torch.get_default_dtype()
    try:
        with replaced(harness, "say", said.append):
            for dtype in DTYPES[: 2 if name in WIDE_IN_16_BITS else 3]:
                torch.set_default_dtype(dtype)
                harness.in_group(check, form_of(FORMS[name]), group)
    except SystemExit as problem:  # how a check says what is wrong
        raise AssertionError(f"{dtype}: {problem}") from None
    finally:
        torch.set_default_dtype(before)
    return said


@pytest.mark.parametrize(("name", "size"), cases(1, 2, 3, 4, 8))
def test_a_form_is_right_at_every_size_and_sends_what_its_header_says(
    world, name, size
):
    promised = header(FORMS[name].read_text())["Sends"]
    for said in world(size).run(checked, name):
        assert any(line.startswith("right on every rank: ") for line in said)
        formulas = [SENT.fullmatch(line) for line in said]
        formulas = [match["formula"] for match in formulas if match]
        assert formulas
        assert [f for f in formulas if f not in promised] == []


IN_GROUPS = [c for c in cases(2) if harness.takes_group(form_of(FORMS[c.values[0]]))]


@pytest.mark.parametrize(("name", "size"), IN_GROUPS)
def test_a_form_is_right_in_two_groups_side_by_side(world, name, size):
    world(2 * size).run(checked, name, True)
