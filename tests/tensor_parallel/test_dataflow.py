"""The table behind the data-flow pictures of lecture 4, state by state on real ranks.

A replicated tensor equals the whole one of one process, split ones are its slices,
partial ones add up to it. A wrong declaration fails, and so does a broken module.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.tensor_parallel.flow_cases import CASES, Found, Point, holds, record
from xtrain.tensor_parallel import ParallelSwiGLU, RowParallelLinear
from xtrain_docs.lectures.lc4.dataflow import MODULES, Row, rows_of, weights_of

LAYERS = (
    "xtrain.tensor_parallel.linear:ColumnParallelLinear",
    "xtrain.tensor_parallel.linear:RowParallelLinear",
    "xtrain.tensor_parallel.embedding:VocabParallelEmbedding",
    "xtrain.tensor_parallel.embedding:HiddenParallelEmbedding",
    "xtrain.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
    "xtrain.tensor_parallel.mlp:ParallelSwiGLU",
    "xtrain.tensor_parallel.attention:ParallelAttention",
    "xtrain.tensor_parallel.norm:ParallelRMSNorm",
    "xtrain.tensor_parallel.functions:column_linear",
    "xtrain.tensor_parallel.functions:row_linear",
    "xtrain.comm.autograd:identity_sum",
)
STATES = ("replicated", "partial", "largest", "split 0", "split 1", "split 2",
          "split 0 by 2", "split 2 by 2", "partial 0 by 2",
          "partial 2 by 2")  # fmt: skip


@dataclass
class Claim:
    """A state of the table, what the ranks hold, and the whole tensor."""

    what: str
    state: str
    held: list[Tensor | None]
    whole: Tensor

    def wrong(self, state: str | None = None) -> bool:
        known = all(one is not None for one in self.held)
        return not known or not holds(state or self.state, self.held, self.whole)


class Claims:
    """What the table says, beside what was found; `of` are all claims on states."""

    def __init__(self, module: str, found: list[Found], dense: dict[str, Point]):
        self.found, self.dense = found, dense
        self.rows = rows_of(module, len(found))
        self.of: list[Claim] = []
        self.at = {"points": 0, "forward": 0}
        self.bands = [i for i, row in enumerate(self.rows) if row.kind == "band"]
        self.backward = list(range(len(found[0].ways["backward"])))
        self.tensors()
        for band in self.bands:
            self.forward(band)
        for band in reversed(self.bands):
            self.back(band)
        self.weights(module)

    def entering(self, band: int) -> bool:
        """Whether a product follows; then the tensor above is the outer one."""
        return self.rows[band + 2 : band + 3] != [] and (
            self.rows[band + 2].kind == "product"
        )

    def claim(self, row: Row, way: str, name: str, held: list) -> None:
        state = getattr(row, way)
        whole = getattr(self.dense[name], {"forward": "value", "backward": "grad"}[way])
        if state is not None:
            self.of.append(Claim(f"{name}, {way}", state, held, whole))

    def tensors(self) -> None:
        """Those outside of the functions that communicate, in order of appearance."""
        inner = {i + 1 if self.entering(i) else i - 1 for i in self.bands}
        inner |= {i + side for i in self.bands if not self.rows[i].pair
                  for side in (-1, 1)}  # fmt: skip
        for at, row in enumerate(self.rows):
            if row.kind == "tensor" and at not in inner:
                for name in row.name.split(", "):
                    points = [one.points[self.at["points"]] for one in self.found]
                    self.at["points"] += 1
                    for near in (at, *self.beside(at)):
                        self.both(self.rows[near], near, at, name, points)

    def beside(self, at: int) -> list[int]:
        """The inner row of a band, if it shares a tensor or a gradient with `at`."""
        return [band + (1 if band > at else -1) for band in self.bands
                if abs(band - at) == 1 and self.rows[band].pair]  # fmt: skip

    def both(self, row: Row, near: int, at: int, name: str, points: list) -> None:
        band = self.rows[(near + at) // 2]
        if near == at or not band.forward:
            self.claim(row, "forward", name, [one.value for one in points])
        if near == at or not (band.backward or self.sliced(row, at)):
            self.claim(row, "backward", name, [one.grad for one in points])

    def sliced(self, row: Row, at: int) -> bool:
        """A slice of a gradient needs no message, but is another tensor."""
        return row.backward != self.rows[at].backward

    def forward(self, band: int) -> None:
        above, row, below = self.rows[band - 1 : band + 2]
        if row.forward:
            sent = [one.ways["forward"][self.at["forward"]] for one in self.found]
            self.at["forward"] += 1
            assert {one.kind for one in sent} == {row.forward}
            self.claim(above, "forward", above.name, [one.before for one in sent])
            self.claim(below, "forward", above.name, [one.after for one in sent])
            if sent[0].point is not None:
                grads = [one.point.grad for one in sent]
                self.claim(above, "backward", above.name, grads)

    def back(self, band: int) -> None:
        above, row, below = self.rows[band - 1 : band + 2]
        if row.backward:
            sent = [one.ways["backward"][self.backward[0]] for one in self.found]
            del self.backward[0]
            assert {one.kind for one in sent} == {row.backward}
            self.claim(below, "backward", above.name, [one.before for one in sent])
            self.claim(above, "backward", above.name, [one.after for one in sent])
        if row.again:
            sent = [one.ways["backward"][self.backward[0]] for one in self.found]
            del self.backward[0]
            assert {one.kind for one in sent} == {row.again}
            self.claim(above, "forward", above.name, [one.before for one in sent])
            self.claim(below, "forward", above.name, [one.after for one in sent])

    def weights(self, module: str) -> None:
        weights = weights_of(module, len(self.found))
        for w in weights:
            own = [one.weights[w.name] for one in self.found]
            whole = self.dense[w.name]
            states = [(w.value, [p.value for p in own], whole.value),
                      (w.grad, [p.grad for p in own], whole.grad)]  # fmt: skip
            if w.before_sum:
                parts = [one.before_sum[w.name].grad for one in self.found]
                states.append((w.before_sum, parts, whole.grad))
            self.of += [Claim(w.name, *state) for state in states]
        summed = {w.name for w in weights if w.before_sum}
        self.summed = sum("norm" in name for name in summed)
        assert {*self.found[0].weights} == {w.name for w in weights}
        assert {*self.found[0].before_sum} == summed

    def problems(self) -> list[str]:
        """States that do not hold; messages and tensors that are in no row."""
        wrong = [f"{one.what} is not {one.state}" for one in self.of if one.wrong()]
        bands = [self.rows[i] for i in self.bands]
        ahead = [row.forward.removesuffix(" MAX") for row in bands if row.forward]
        back = [kind for row in bands for kind in (row.backward, row.again) if kind]
        back += ["all-reduce"] * self.summed
        for way, kinds in (("forward", ahead), ("backward", back)):
            calls = self.found[0].calls[way]
            if sorted(calls) != sorted(kinds):
                wrong.append(f"{way}: {calls} sent, {kinds} in the table")
        if self.at["points"] != len(self.found[0].points):
            wrong.append("a tensor is in no row")
        return wrong


def problems_of(modules):
    found = {}
    for module in modules:
        claims = Claims(module, *record(CASES[module]))
        found[module] = (claims.problems(), mistaken(claims))
    return found


def mistaken(claims: Claims) -> list[str]:
    """Other states that would have passed in place of a declared one."""
    return [
        f"{one.what}: {state} for {one.state}"
        for one in claims.of
        for state in STATES
        if state != one.state and fits(state, one, len(claims.found))
        and not one.wrong(state)
    ]  # fmt: skip


def fits(state: str, claim: Claim, ranks: int) -> bool:
    """Whether the tensor can be in such a state at all."""
    _, *rest = state.split()
    if not rest:
        return True
    dim, copies = int(rest[0]), int(rest[2]) if len(rest) > 1 else 1
    shape = claim.whole.shape
    return copies < ranks and dim < len(shape) and shape[dim] >= ranks // copies


@pytest.mark.verifies(*LAYERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_state_of_the_table_holds_and_no_other_would(world, ranks):
    for found in world(ranks).run(problems_of, MODULES):
        assert set(found) == set(CASES)
        for module, (wrong, passing) in found.items():
            assert (module, wrong, passing) == (module, [], [])


def test_what_is_partial_is_on_its_way_to_a_sum():
    for ranks in (2, 4):
        for module in MODULES:
            rows = [Row("none"), *rows_of(module, ranks), Row("none")]
            for above, row, below in zip(rows, rows[1:], rows[2:], strict=False):
                if row.forward in ("partial", "largest") and row.kind == "tensor":
                    assert below.kind == "band" and below.forward
                if row.backward == "partial" and row.kind == "tensor":
                    assert above.kind == "band" and above.backward


@pytest.mark.verifies("xtrain.tensor_parallel.norm:ParallelRMSNorm")
def test_a_norms_gradient_is_summed_only_where_the_sequence_is_split():
    """The states that the first test has found true."""
    for module, before in (("decoder_layer", None),
                           ("decoder_layer_sequence_parallel", "partial")):  # fmt: skip
        norms = [w for w in weights_of(module, 2) if "norm" in w.name]
        assert len(norms) == 2
        for norm in norms:
            assert (norm.value, norm.grad) == ("replicated", "replicated")
            assert norm.before_sum == before


class NoSum(RowParallelLinear):
    """Each rank keeps its own product."""

    def forward(self, x):
        return F.linear(x, self.weight)


class NoSumOfGradients(ParallelSwiGLU):
    """f is missing: each rank's dX is its own part."""

    def forward(self, x):
        gate, up = self.gate_proj.weight, self.up_proj.weight
        return self.down_proj(F.silu(F.linear(x, gate)) * F.linear(x, up))


class TwiceTheSum(ParallelSwiGLU):
    """The sum is made once more, where nothing is left to sum."""

    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y.detach().clone())
        return y


class SummedTwice(ParallelSwiGLU):
    """The result is the ranks' number times too large."""

    def forward(self, x):
        y = super().forward(x)
        return y * dist.get_world_size()


def without_sum(whole):
    block = ParallelSwiGLU.from_full(whole)
    block.down_proj = NoSum.from_full(whole.down_proj)
    return block


def wrong_slices(whole):
    """Every rank has the first rank's slice."""
    block = ParallelSwiGLU.from_full(whole)
    with torch.no_grad():
        half = len(block.up_proj.weight)
        block.up_proj.weight.copy_(whole.up_proj.weight[:half])
    return block


def broken_are_refused(broken):
    refused = []
    for cut in broken:
        try:
            refused.append(Claims("swiglu", *record(CASES["swiglu"], cut)).problems())
        except (AssertionError, IndexError) as problem:
            refused.append([type(problem).__name__])
    return refused


@pytest.mark.verifies(*LAYERS[:2])
def test_a_broken_module_is_refused(world):
    broken = [without_sum, NoSumOfGradients.from_full, TwiceTheSum.from_full,
              SummedTwice.from_full, wrong_slices,
              ParallelSwiGLU.from_full]  # fmt: skip
    for found in world(2).run(broken_are_refused, broken):
        *wrong, right = found
        assert all(wrong) and right == []
        assert wrong[2] == [
            "forward: ['all-reduce', 'all-reduce'] sent, ['all-reduce'] in the table"
        ]
        assert "up, forward is not split 2" in wrong[4]


def test_states_are_told_apart():
    dense = torch.randn(4, 6, dtype=torch.float64)
    own = torch.randn(4, 4, 6, dtype=torch.float64)
    rows, columns = dense.chunk(2, 0), dense.chunk(2, 1)
    zero = columns[0] * 0
    cases: dict[str, list[Tensor]] = {
        "replicated": [dense] * 4,
        "split 0": list(dense.chunk(4, 0)),
        "split 0 by 2": [rows[0], rows[0], rows[1], rows[1]],
        "partial": [*own[:3], dense - own[:3].sum(0)],
        "partial 1 by 2": [columns[0] - 1, zero + 1, columns[1] - 2, zero + 2],
        "largest": [dense, dense - 1, dense - 2, dense - 3],
    }
    for state, held in cases.items():
        assert [other for other in cases if holds(other, held, dense)] == [state]
    assert not holds("replicated", [dense * 1.0001] * 4, dense)
    assert not holds("split 1", [columns[1], columns[0]], dense)
    assert not holds("replicated", [dense.flatten()] * 4, dense)
