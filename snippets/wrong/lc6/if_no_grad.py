# python snippets/wrong/lc6/if_no_grad.py
import torch


def attended(x, weight, cache):
    """Attention of one more token over the cache, which grows by its key and value."""
    q, *kv = (x @ weight).chunk(3, -1)
    k, v = (torch.cat(pair, -2) for pair in zip(cache, kv, strict=True))
    return (q @ k.mT).softmax(-1) @ v, [k, v]


def decoded(x, weight, cache):
    if torch.no_grad():  # the bug: an object is true; `with` would have entered it
        return attended(x, weight, cache)


def decoded_right(x, weight, cache):
    with torch.no_grad():
        return attended(x, weight, cache)


def operations(tensor):
    """How many operations autograd remembers behind a tensor, with their tensors."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [parent for parent, _ in node.next_functions]
    return len(found)


def kept(step, tokens, trained=True):
    """What autograd remembers after each token."""
    torch.manual_seed(0)
    weight = torch.randn(4, 12, requires_grad=trained)
    cache, found = [torch.zeros(1, 0, 4)] * 2, []
    for x in torch.randn(tokens, 1, 1, 4):
        out, cache = step(x, weight, cache)
        found.append(operations(out))
    return found


if __name__ == "__main__":
    for step in (decoded, decoded_right):
        found = kept(step, 64)
        print(f"{step.__name__:13}: autograd remembers {found[0]} operations after "
              f"1 token, {found[-1]} after 64")  # fmt: skip
