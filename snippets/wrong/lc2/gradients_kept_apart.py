# python snippets/wrong/lc2/gradients_kept_apart.py
import torch
from torch import nn


def accumulate(model, batches, look):
    """Meant: backward now, the sum over the micro-batches at the end."""
    stash = []
    for batch in batches:
        model(batch).sum().backward()
        stash.append([p.grad for p in model.parameters()])  # the bug: one set each
        model.zero_grad()
        look(stash)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = sum(grads[number] for grads in stash)


def live_bytes(tensors):
    """Memory behind some tensors, shared memory once."""
    storages = {t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages)


if __name__ == "__main__":
    torch.manual_seed(0)
    for count in (1, 2, 4, 8):
        model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
        seen = []
        accumulate(
            model,
            torch.ones(count, 2, 16),
            lambda stash, seen=seen: seen.append(live_bytes(sum(stash, []))),
        )
        weights = live_bytes(model.parameters())
        print(f"{count} micro-batches: at most {max(seen):5} bytes of gradients")
    print("one set of gradients:", weights, "bytes")
