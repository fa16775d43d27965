"""The bytes of a tensor, as the transports read and write them."""

import gc

import pytest
import torch

from xtrain.backends.messages import DTYPES, raw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_the_tensors_own(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    view = raw(tensor)
    assert view.nbytes == 3 * tensor.element_size()
    view[0] = 1
    assert tensor.view(torch.uint8)[0] == 1
    assert raw(tensor[:0]).nbytes == 0
    assert raw(torch.zeros(4, 1, dtype=dtype)[1]).nbytes == tensor.element_size()


def test_the_bytes_keep_the_tensor_alive():
    view = raw(torch.full((1 << 16,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(4)]
    assert set(bytes(view)) == {7}
    assert len(others) == 4


def test_storage_may_be_resized_afterwards():
    """Sharded training gives a gathered buffer's memory back and takes it again."""
    tensor = torch.ones(8)
    raw(tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(32)
