"""Can ranks meet, and all-reduce over each CPU backend? Tried, with two ranks."""

import socket
import time

from xtrain.doctor.finding import Finding

OWN_BACKENDS = ("xtrain-socket", "xtrain-shm")


def check_loopback() -> Finding:
    """Connect to a free port of this machine, as ranks do to meet."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(5)
                    client.sendall(b"x")
                    if peer.recv(1) != b"x":
                        raise OSError("the byte that was sent did not arrive")
    except OSError as error:
        return Finding("loopback", "problem", f"127.0.0.1 does not work: {error}")
    return Finding("loopback", "ok", f"127.0.0.1 works; port {port} was free")


def check_backends() -> Finding:
    """Which backends of torch.distributed are there, torch's and ours."""
    import torch.distributed as dist

    names = ("gloo", "nccl", "mpi", "ucc")
    there = [name for name in names if dist.is_backend_available(name)]
    missing = [name for name in names if name not in there]
    text = f"torch has {', '.join(there) or 'none'}"
    text += f", not {', '.join(missing)}" if missing else ""
    return Finding("backends", "ok", f"{text}; ours: {', '.join(OWN_BACKENDS)}")


def _sum_of_ranks() -> int:
    """Runs on every rank of the trial World."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    return int(tensor.item())


def check_gloo() -> Finding:
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return Finding("gloo", "problem", "this torch was built without gloo")
    return check_backend("gloo")


def check_backend(backend: str) -> Finding:
    """Start two ranks on a CPU backend and add up a tensor across them."""
    from xtrain.testing import World

    started = time.perf_counter()
    try:
        with World(2, backend) as world:
            sums = world.run(_sum_of_ranks)
    except Exception as error:
        return Finding(backend, "problem", f"two ranks could not all-reduce: {error}")
    seconds = time.perf_counter() - started
    if sums != [3, 3]:
        return Finding(backend, "problem", f"1 + 2 across two ranks gave {sums}")
    return Finding(backend, "ok", f"two ranks all-reduced, {seconds:.1f} s with start")
