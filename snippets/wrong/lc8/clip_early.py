# torchrun --nproc-per-node 2 snippets/wrong/lc8/clip_early.py
import os

import torch
import torch.distributed as dist


def clipped(grad, limit):
    return grad * (limit / grad.norm()).clamp(max=1)


def before(grad, limit):
    """This rank's part of the gradient; the sum of all parts, clipped."""
    grad = clipped(grad, limit)  # the bug: a part has another norm than the sum
    dist.all_reduce(grad)
    return grad


def after(grad, limit):
    grad = grad.clone()
    dist.all_reduce(grad)
    return clipped(grad, limit)


def parts(size):
    """Rank 0 has a document that it cannot predict at all."""
    easy, hard = torch.tensor([0.9, 0.1]), torch.tensor([0.0, 5.0])
    return [hard, *[easy] * (size - 1)]


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, own = dist.get_rank(), parts(dist.get_world_size())
    right = clipped(sum(own), 1.0)
    for rule in (before, after):
        found = rule(own[rank], 1.0)
        alike = found @ right / found.norm()
        print(f"rank {rank}, clipped {rule.__name__:6} the sum: norm "
              f"{found.norm():.2f}, cosine to the right one {alike:.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
