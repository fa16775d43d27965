"""The three ways to multiply rows by their expert's matrix: one result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.expert_parallel import grouped
from xtrain.expert_parallel.grouped import (
    CALL_WORK,
    GROUPED_MM,
    PATHS,
    SMALL_PADDING,
    choose_path,
    rows_of,
)

MODULE = "xtrain.expert_parallel.grouped"
WAYS = [f"{MODULE}:{name}" for name in ("LoopRows", "PaddedRows", "GroupedRows")]
# Rows of 4 experts. The last: torch's grouped product wants multiples of 16 bytes.
COUNTS = ([3, 1, 4, 2], [0, 5, 0, 1], [7, 0, 0, 0], [0, 0, 0, 6], [0, 0, 0, 0])
INPUTS, OUTPUTS = 8, 16


def dtypes_of(path: str) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, *[torch.float64] * (path != "grouped")]


def made(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + counts[0])
    shapes = (sum(counts), INPUTS), (sum(counts), OUTPUTS), (4, OUTPUTS, INPUTS)
    return [torch.randn(s, generator=generator, device="cpu").to(dtype) for s in shapes]


def by_loops(counts, x_NI, dy_NO, w_EOI) -> list[torch.Tensor]:
    """y, dx and dw in float64, row by row."""
    x_NI, dy_NO, w_EOI = (t.double() for t in (x_NI, dy_NO, w_EOI))
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    y_NO, dx_NI = torch.zeros_like(dy_NO), torch.zeros_like(x_NI)
    dw_EOI = torch.zeros_like(w_EOI)
    for row, expert in enumerate(experts):
        y_NO[row] = w_EOI[expert] @ x_NI[row]
        dx_NI[row] = dy_NO[row] @ w_EOI[expert]
        dw_EOI[expert] += torch.outer(dy_NO[row], x_NI[row])
    return [y_NO, dx_NI, dw_EOI]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.verifies(*WAYS, f"{MODULE}:rows_of")
def test_products_and_gradients_of_each_way(path, counts):
    if path == "grouped" and GROUPED_MM is None:
        pytest.skip("this torch has no grouped product")
    for dtype in dtypes_of(path):
        x_NI, dy_NO, w_EOI = made(counts, dtype)
        rows = rows_of(torch.tensor(counts), x_NI, OUTPUTS, path)
        assert type(rows) is PATHS[path]
        x, dy = rows.pack(x_NI), rows.pack(dy_NO)
        assert torch.equal(rows.unpack(x), x_NI)
        found = [
            rows.unpack(rows.linear(x, w_EOI)),
            rows.unpack(rows.input_gradient(dy, w_EOI)),
            rows.weight_gradient(dy, x),
        ]
        for one, other in zip(found, by_loops(counts, x_NI, dy_NO, w_EOI), strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            limit = TOLERANCE[dtype]
            torch.testing.assert_close(one.double(), other, rtol=limit, atol=limit * 4)
        for e, count in enumerate(counts):
            if not count:
                assert not found[2][e].any(), "an expert without rows learns nothing"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
@pytest.mark.verifies(f"{MODULE}:PaddedRows")
def test_the_table_holds_each_row_once_and_zeros_elsewhere(counts):
    x_NI = torch.arange(1.0, sum(counts) + 1)[:, None]
    table = PATHS["padded"](torch.tensor(counts)).pack(x_NI)
    assert table.shape == (len(counts), max(counts), 1)
    first = 0
    for expert, count in enumerate(counts):
        rows = list(range(first + 1, first + count + 1))
        padding = [0] * (max(counts) - count)
        assert table[expert].flatten().tolist() == rows + padding
        first += count


def chosen(counts: list[int], width: int = 4, inner: int = 8, **options) -> str:
    return choose_path(
        torch.tensor(counts), torch.zeros(sum(counts), width, **options), inner
    )


@pytest.mark.verifies(f"{MODULE}:choose_path", f"{MODULE}:grouped_takes")
def test_the_way_is_chosen_by_size():
    def wide(counts, **options):
        return chosen(counts, dtype=torch.float64, **options)

    assert wide([3, 2, 4]) == "padded", "small and even"
    assert wide([0, 0, 0]) == "loop", "nothing to compute"
    assert wide([]) == "loop", "no experts"
    assert wide([20, 0, 0, 0]) == "padded", "four times the rows, and no more"
    assert wide([20, 0, 0, 0, 0]) == "loop", "most of the table would be padding"
    most = SMALL_PADDING // (2 * 8)
    assert wide([most, most]) == "padded"
    assert wide([most + 1, most]) == "loop", "large: calls cost little"
    assert wide([most + 1, most], inner=2, width=2) == "padded"
    assert chosen([2, 2], dtype=torch.bfloat16) == "padded", "no GPU"


@pytest.mark.verifies(f"{MODULE}:choose_path", f"{MODULE}:grouped_takes")
def test_padding_may_cost_as_much_as_the_calls_it_saves(monkeypatch):
    experts, width = 16, 64
    padding = CALL_WORK * experts // (width * width)  # rows, of all experts together
    spare = padding // (experts - 1)
    even, uneven = ([n + spare] + [9] * 15 for n in (9, 10))
    for dtype in (torch.float64, torch.bfloat16):
        assert chosen(even, width, width, dtype=dtype) == "padded"
        assert chosen(uneven, width, width, dtype=dtype) == "loop"
    assert chosen(even, width, width) == chosen(uneven, width, width) == "grouped"
    assert chosen(uneven, width, 66) == "loop", "not a multiple of 16 bytes"
    assert chosen(uneven, 66, width) == "loop"
    monkeypatch.setattr(grouped, "GROUPED_MM", None)
    assert chosen(uneven, width, width) == "loop"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.verifies(*WAYS)
def test_a_gradient_is_added_to_what_is_there(path):
    counts = [3, 0, 4, 2]
    x_NI, dy_NO, w_EOI = made(counts, torch.float32)
    rows = rows_of(torch.tensor(counts), x_NI, OUTPUTS, path)
    there = rows.pack(x_NI)
    dx = rows.input_gradient(rows.pack(dy_NO), w_EOI)
    total = rows.input_gradient(rows.pack(dy_NO), w_EOI, onto=there.clone())
    torch.testing.assert_close(rows.unpack(total), rows.unpack(there + dx))


@pytest.mark.parametrize(
    ("dtype", "width", "inner", "path"),
    [(torch.bfloat16, 8, 16, "grouped"), (torch.float32, 8, 16, "padded"),
     (torch.bfloat16, 12, 16, "padded"), (torch.bfloat16, 8, 12, "padded")],
)  # fmt: skip
@pytest.mark.verifies(f"{MODULE}:choose_path")
def test_a_gpu_gets_the_grouped_product_where_it_is_aligned(
    dtype, width, inner, path, monkeypatch
):
    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    x_NI = torch.zeros(4, width, dtype=dtype).as_subclass(OnGPU)
    monkeypatch.setattr(grouped, "GROUPED_MM", print)
    assert choose_path(torch.tensor([2, 2]), x_NI, inner) == path
    monkeypatch.setattr(grouped, "GROUPED_MM", None)
    assert choose_path(torch.tensor([2, 2]), x_NI, inner) == "padded"


@pytest.mark.verifies(f"{MODULE}:rows_of")
def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="'fast' is not one of"):
        rows_of(torch.tensor([1]), torch.zeros(1, 4), 4, "fast")
