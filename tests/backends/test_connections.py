"""A TCP connection waits for no more data, and a host that vanished is noticed."""

import socket

import pytest

from xtrain.backends.connections import WATCH, tune


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


@pytest.mark.verifies("xtrain.backends.connections:tune")
def test_a_tuned_connection_sends_at_once_and_probes_in_silence(pair):
    near, far = pair
    nodelay = socket.IPPROTO_TCP, socket.TCP_NODELAY
    assert not near.getsockopt(*nodelay)
    tune(near)
    assert near.getsockopt(*nodelay)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for name, value in WATCH.items():
        if hasattr(socket, name):
            found = near.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            assert found == value, name
    near.sendall(b"x")
    assert far.recv(1) == b"x"
