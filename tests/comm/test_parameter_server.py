"""All-reduce through one rank."""

import pytest

from tests.comm.reference import check_all_reduce, check_all_reduce_extras
from xtrain.comm import parameter_server_all_reduce


def cases() -> None:
    check_all_reduce(parameter_server_all_reduce)
    check_all_reduce_extras(parameter_server_all_reduce)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies("xtrain.comm.parameter_server:parameter_server_all_reduce")
def test_equals_one_process(world, size):
    world(size).run(cases)
