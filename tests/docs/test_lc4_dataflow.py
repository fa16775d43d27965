"""The data-flow pictures of lc4: states found by numbers; broken modules refused."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from xtrain.tensor_parallel import ParallelSwiGLU, RowParallelLinear
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import dataflow
from xtrain_docs.lectures.lc4.runs_dataflow import data_flow, flow_of
from xtrain_docs.lectures.lc4.runs_dataflow_match import state_of
from xtrain_docs.lectures.lc4.runs_dataflow_modules import CASES

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
)
REPLICATED, PARTIAL = "replicated", "partial"
X = ("tensor", "x", REPLICATED, REPLICATED)
X_INSIDE = ("tensor", "x", REPLICATED, PARTIAL)
F_BAND = ("band", "", "all-reduce", "")
G_BAND = ("band", "all-reduce", "", "")
Y_INSIDE = ("tensor", "y", PARTIAL, REPLICATED)
Y = ("tensor", "y", REPLICATED, REPLICATED)


def brief(rows):
    """Rows as short tuples."""
    keys = {"tensor": ("name", "forward", "backward"), "product": ("weights",),
            "band": ("forward", "backward", "again")}  # fmt: skip
    return [(r["kind"], *(r[key] for key in keys[r["kind"]])) for r in rows]


def all_flows(names):
    return {name: data_flow(name) for name in names}


def flows(world, ranks, *names):
    found = world(ranks).run(all_flows, names or list(CASES))
    assert all(one == found[0] for one in found)
    return found[0]


def split(name, dim):
    return ("tensor", name, f"split {dim}", f"split {dim}")


def check_drawings(found, ranks):
    """They say what was found, and fit a phone."""
    for name, flow in found.items():
        drawing = dataflow.flow_chart(flow, name)
        assert "min-width:0" in drawing
        assert re.search(r'viewBox="0 0 (\d+)', drawing)[1] == str(dataflow.WIDTH)
        for kind in (PARTIAL, REPLICATED):
            boxes = sum(kind in (row.get("forward"), row.get("backward"))
                        for row in flow["rows"])  # fmt: skip
            assert (boxes == 0) == (f">{kind}<" not in drawing)
    drawing = dataflow.flow_chart(found["swiglu"], "swiglu")
    assert "f: nothing sent forward, all-reduce backward" in drawing
    assert "g: all-reduce forward, nothing sent backward" in drawing
    assert "x is replicated, its gradient partial" in drawing
    assert f"[B, S, F/{ranks}]" in drawing
    assert drawing.count("identity_all_reduce") == 1


@pytest.mark.verifies(*LAYERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_module_is_drawn_as_it_is_split_summed_and_gathered(world, ranks):
    whole = flows(world, ranks)
    check_drawings(whole, ranks)
    found = {name: flow["rows"] for name, flow in whole.items()}
    assert brief(found["column_linear"]) == [
        X, F_BAND, X_INSIDE, ("product", ["weight"]), split("x Wᵀ", 2), split("y", 2)
    ]  # fmt: skip
    product = ("tensor", "x Wᵀ", PARTIAL, REPLICATED)
    assert brief(found["row_linear"]) == [
        split("x", 2), ("product", ["weight"]), product, G_BAND,
        ("tensor", "x Wᵀ", REPLICATED, REPLICATED), Y
    ]  # fmt: skip
    ids = ("tensor", "ids", REPLICATED, None)
    assert brief(found["vocab_parallel_embedding"]) == [ids, Y_INSIDE, G_BAND, Y]
    assert brief(found["hidden_parallel_embedding"]) == [
        ids, split("y", 2), ("band", "all-gather", "", ""), Y
    ]  # fmt: skip
    up = ("product", ["gate_proj.weight", "up_proj.weight"])
    assert brief(found["swiglu"]) == [
        X, F_BAND, X_INSIDE, up, split("gate, up", 2), split("silu(gate) · up", 2),
        ("product", ["down_proj.weight"]), Y_INSIDE, G_BAND, Y
    ]  # fmt: skip
    cross_entropy = brief(found["cross_entropy"])
    assert cross_entropy[0] == split("logits", 1)
    assert cross_entropy[2] == ("band", "all-reduce MAX", "", "")
    assert cross_entropy[5:] == [
        G_BAND, ("tensor", "sum of exp, label's", REPLICATED, None),
        ("tensor", "loss", REPLICATED, REPLICATED)
    ]  # fmt: skip
    bands = [row[1:] for row in brief(found["decoder_layer"]) if row[0] == "band"]
    assert bands == [F_BAND[1:], G_BAND[1:]] * 2
    sequence = brief(found["decoder_layer_sequence_parallel"])
    assert [row[1:] for row in sequence if row[0] == "band"] == [
        ("all-gather", "reduce-scatter", "all-gather"),
        ("reduce-scatter", "all-gather", ""),
    ] * 2
    between = [row for row in sequence if row[0] == "tensor" and "norm" in row[1]]
    assert between[0] == split("norm of x", 1)
    assert between[1] == ("tensor", "norm of x", REPLICATED, PARTIAL)


@pytest.mark.verifies(
    "xtrain.tensor_parallel.attention:ParallelAttention",
    "xtrain.comm.autograd:identity_sum",
)
def test_a_key_head_on_two_ranks_has_its_gradient_summed_there(world):
    flow = flows(world, 4, "attention")["attention"]
    rows = {row["name"]: row for row in flow["rows"] if row["kind"] == "tensor"}
    assert (rows["q"]["forward"], rows["q"]["backward"]) == ("split 2", "split 2")
    keys = rows["k, v"]
    assert (keys["forward"], keys["backward"]) == ("split 2 by 2", "partial 2 by 2")
    weights = {row["name"]: row for row in flow["weights"]}
    key = weights["k_proj.weight"]
    assert (key["before_sum"], key["grad"]) == ("partial 0 by 2", "split 0 by 2")
    assert weights["q_proj.weight"]["before_sum"] is None


@pytest.mark.verifies("xtrain.tensor_parallel.norm:ParallelRMSNorm")
def test_a_norms_gradient_is_summed_only_where_the_sequence_is_split(world):
    names = ("decoder_layer", "decoder_layer_sequence_parallel")
    found = flows(world, 2, *names)
    for name, before in zip(names, (None, "partial"), strict=True):
        norms = [w for w in found[name]["weights"] if "norm" in w["name"]]
        assert len(norms) == 2
        for row in norms:
            assert row["value"] == row["grad"] == "replicated"
            assert row["before_sum"] == before


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
        dist.all_reduce(y.detach())
        return y


def without_sum(whole):
    block = ParallelSwiGLU.from_full(whole)
    block.down_proj = NoSum.from_full(whole.down_proj)
    return block


class WrongSlices(nn.Module):
    """Every rank has the first rank's slice."""

    def __init__(self, whole):
        super().__init__()
        half = whole.gate_proj.weight.shape[0] // dist.get_world_size()
        self.gate_proj = nn.Linear(1, 1, bias=False)
        self.gate_proj.weight = nn.Parameter(whole.gate_proj.weight[:half].detach())

    def forward(self, x):
        return x + F.linear(x, self.gate_proj.weight).sum(-1, keepdim=True)


def messages_of(broken):
    case = CASES["swiglu"]
    found = []
    for cut in broken:
        try:
            flow_of(case, cut)
        except EvidenceError as problem:
            found.append(str(problem))
        else:
            found.append("nothing was wrong")
    return found


@pytest.mark.verifies(*LAYERS[:2])
def test_a_broken_module_is_refused(world):
    broken = [without_sum, NoSumOfGradients.from_full, TwiceTheSum.from_full,
              WrongSlices, ParallelSwiGLU.from_full]  # fmt: skip
    for found in world(2).run(messages_of, broken):
        assert found == [
            "swiglu: y stays partial in forward",
            "swiglu: x stays partial in backward",
            "swiglu: ['all-reduce'] are in no band",
            "swiglu: the gradient of x is nothing of the dense gradient",
            "nothing was wrong",
        ]


def test_states_are_told_by_numbers():
    dense = torch.randn(4, 6, dtype=torch.float64)
    own = torch.randn(4, 4, 6, dtype=torch.float64)
    rest = dense - own[:3].sum(0)
    rows, columns = dense.chunk(2, 0), dense.chunk(2, 1)
    for held, state in (
        ([dense] * 4, "replicated"),
        (dense.chunk(4, 0), "split 0"),
        (dense.chunk(2, 1), "split 1"),
        ([rows[0], rows[0], rows[1], rows[1]], "split 0 by 2"),
        ([*own[:3], rest], "partial"),
        ([columns[0] - 1, columns[0] * 0 + 1, columns[1] - 2, columns[1] * 0 + 2],
         "partial 1 by 2"),
        ([dense, dense - 1], "largest"),
        ([torch.cat(columns).flatten()] * 2, "replicated"),
        ([columns[1], columns[0]], None),
        ([dense, dense * 2], None),
        ([dense * 1.0001] * 2, None),
    ):  # fmt: skip
        assert state_of(held, dense) == state
