"""What the tests of `xtrain.comm` share: inputs, layouts, and the right answer.

The answer is computed by one process in float64 (or int64) from everybody's inputs,
which every rank can build because they depend on the rank's number alone. Errors are
held against the bound that any order of summation obeys, not against a tuned number.
"""

import hashlib
import itertools
import socket

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
SHAPES = ((), (0,), (1,), (2,), (3,), (7,), (31,), (4, 6), (0, 5), (3, 1, 5))
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


def ranks() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def legal(op, dtype) -> bool:
    """AVG is for floats, bitwise operations are for integers."""
    if dtype.is_floating_point:
        return op not in BITS
    return op != ReduceOp.AVG


def input_of(rank: int, shape, dtype, seed: int = 0) -> Tensor:
    """What `rank` brings: different on every rank and at every place."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator, device="cpu")
    elif dtype.is_floating_point:
        values = torch.randn(
            shape, generator=generator, dtype=torch.float64, device="cpu"
        )
    else:
        info = torch.iinfo(dtype)
        low, high = max(info.min, -1000), min(info.max, 1000)
        values = torch.randint(low, high, shape, generator=generator, device="cpu")
    return values.to(dtype).to(torch.get_default_device())


class Laid:
    """`values` in a memory layout, amid memory that nobody may touch."""

    def __init__(self, values: Tensor, layout: str):
        shape, numel = values.shape, values.numel()
        strides = list(torch.empty(shape, device="meta").stride())
        offset, step = 5, 1
        if layout == "transposed" and values.dim() >= 2:
            shape_T = (*shape[:-2], shape[-1], shape[-2])
            strides = list(
                torch.empty(shape_T, device="meta").transpose(-1, -2).stride()
            )
        elif layout == "strided":
            step = 3
        elif layout == "contiguous":
            offset = 0
        self.base = torch.ones(
            offset + numel * step + (7 if offset else 0),
            dtype=values.dtype,
            device=values.device,
        )
        view = (shape, [step * stride for stride in strides], offset)
        self.tensor = self.base.as_strided(*view)
        self.tensor.copy_(values)
        outside = torch.ones_like(self.base, dtype=torch.bool)
        outside.as_strided(*view).fill_(False)
        self._outside = outside
        self._before = self.base.clone()

    def assert_surroundings_untouched(self) -> None:
        assert torch.equal(self.base[self._outside], self._before[self._outside]), (
            "memory around the tensor changed"
        )

    def assert_untouched(self) -> None:
        assert torch.equal(self.base, self._before), "an input changed"


def reduced(tensors: list[Tensor], op) -> Tensor:
    """The reduction of all tensors, by one process in float64 or int64."""
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([t.to(wide) for t in tensors])
    if op == ReduceOp.SUM:
        return stack.sum(0) if dtype != torch.bool else stack.amax(0)
    if op == ReduceOp.AVG:
        return stack.sum(0) / len(tensors)
    if op == ReduceOp.PRODUCT:
        return stack.prod(0)
    if op == ReduceOp.MIN:
        return stack.amin(0)
    if op == ReduceOp.MAX:
        return stack.amax(0)
    answer = stack[0]
    for other in stack[1:]:
        if op == ReduceOp.BAND:
            answer = answer & other
        elif op == ReduceOp.BOR:
            answer = answer | other
        else:
            answer = answer ^ other
    return answer


def assert_reduced(actual: Tensor, tensors: list[Tensor], op, what="") -> None:
    """`actual` is the reduction, within what rounding in any order can do."""
    expected, dtype = reduced(tensors, op), tensors[0].dtype
    assert actual.dtype == dtype
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not dtype.is_floating_point:
        assert torch.equal(actual, expected.to(dtype)), (what, actual, expected)
        return
    size = torch.stack([t.double().abs() for t in tensors])
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        bound = torch.zeros_like(expected)
    else:
        scale = size.prod(0) if op == ReduceOp.PRODUCT else size.sum(0)
        info = torch.finfo(dtype)
        bound = len(tensors) * (info.eps * scale + info.smallest_normal)
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), (what, error.max(), actual, expected)


class SameEverywhere:
    """Collects results; at the end, asserts that all ranks saw the same bits."""

    def __init__(self, group=None):
        self.group, self.digest = group, hashlib.sha256()

    def add(self, tensor: Tensor) -> None:
        raw = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        raw.copy_(tensor.detach().reshape(-1))
        self.digest.update(bytes(raw.view(torch.uint8).tolist()))

    def check(self) -> None:
        digests = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(digests, self.digest.digest(), group=self.group)
        assert len(set(digests)) == 1, f"ranks differ: {digests}"


def assert_same_on_all_ranks(tensor: Tensor, group=None) -> None:
    """Bitwise equality across the group."""
    same = SameEverywhere(group)
    same.add(tensor)
    same.check()


def check_all_reduce(
    all_reduce, group=None, shapes=SHAPES, ops=ARITHMETIC + BITS, layouts=LAYOUTS
) -> None:
    """All operations with all dtypes, in turn with all shapes and layouts."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = members.index(dist.get_rank())
    shapes_in_turn = itertools.cycle(shapes)
    layouts_in_turn = itertools.cycle(layouts)
    pairs = itertools.product(ops, FLOATS + INTS)
    legal_pairs = [pair for pair in pairs if legal(*pair)]
    same = SameEverywhere(group)
    for case, (op, dtype) in enumerate(legal_pairs * 2):
        shape, layout = next(shapes_in_turn), next(layouts_in_turn)
        what = (all_reduce.__name__, op, dtype, shape, layout)
        inputs = [input_of(rank, shape, dtype, case) for rank in members]
        laid = Laid(inputs[me], layout)
        assert all_reduce(laid.tensor, op, group) is None
        assert_reduced(laid.tensor, inputs, op, what)
        laid.assert_surroundings_untouched()
        same.add(laid.tensor)
        exact = not dtype.is_floating_point or op in (ReduceOp.MIN, ReduceOp.MAX)
        if exact and op not in BITS and case < len(legal_pairs):  # NCCL has no BITS
            twin = inputs[me].clone()
            dist.all_reduce(twin, op, group=group)
            assert torch.equal(laid.tensor, twin), what
    same.check()


def check_all_reduce_extras(all_reduce, layouts=LAYOUTS) -> None:
    """Every layout, a large tensor, default arguments, and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for layout, shape in itertools.product(layouts, SHAPES):
        inputs = [input_of(r, shape, torch.float32, 7) for r in range(size)]
        laid = Laid(inputs[rank], layout)
        all_reduce(laid.tensor)  # SUM over the whole world
        assert_reduced(laid.tensor, inputs, ReduceOp.SUM, (layout, shape))
        laid.assert_surroundings_untouched()

    inputs = [input_of(r, (30_011,), torch.float32, 8) for r in range(size)]
    large = inputs[rank].clone()
    all_reduce(large, ReduceOp.AVG)
    assert_reduced(large, inputs, ReduceOp.AVG, "large")
    assert_same_on_all_ranks(large)

    # Whole numbers add without rounding, so torch's result must be matched bit by bit.
    whole = torch.arange(1000.0) * (rank + 1)
    twin = whole.clone()
    all_reduce(whole)
    dist.all_reduce(twin)
    assert torch.equal(whole, twin)

    parameter = torch.nn.Parameter(torch.full((5,), float(rank)))
    all_reduce(parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert torch.equal(parameter.detach(), torch.full((5,), size * (size - 1) / 2))
