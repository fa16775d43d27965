"""What counts as an error of a transport."""

import pytest
import torch.distributed as dist

from xtrain.comm.transport_errors import PeersLost, is_of_transport, is_timeout

LOST = [
    PeersLost("rank 1 ended", [1]),
    dist.DistBackendError("NCCL"),
    dist.DistNetworkError("reset"),
    dist.DistStoreError("wait timed out after 8000ms"),
    RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed"),
    RuntimeError("Application timeout caused pair closure"),
]
OTHERS = [ValueError("gloo/"), RuntimeError("shape"), KeyError("Application timeout")]


@pytest.mark.verifies("xtrain.comm.transport_errors:is_of_transport")
@pytest.mark.parametrize("error", LOST + OTHERS, ids=repr)
def test_errors_of_a_backend_are_told_from_others(error):
    assert is_of_transport(error) == (error in LOST)
    assert is_timeout(error) == ("timed out" in str(error))
