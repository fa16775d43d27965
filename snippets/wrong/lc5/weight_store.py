# python snippets/wrong/lc5/weight_store.py
import torch


def by_layer(y, layers, dy):
    """W of a stage whose layers are weights: one after another."""
    for w in layers:
        (grad,) = torch.autograd.grad(y, w, dy, retain_graph=True)
        w.grad = grad if w.grad is None else w.grad + grad  # the bug: w is twice there


def always_stored(y, layers, dy, actions):
    """Backward of micro-batches; a schedule without W has BW: both parts at once."""
    store = []
    for action in actions:
        store.append(lambda: by_layer(y, list(dict.fromkeys(layers)), dy))
        if action == "W":  # the bug: BW has put its part away, and it stays there
            store.pop(0)()


if __name__ == "__main__":
    w, v = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    for name, layers in (("two weights", [w, v]), ("one weight, twice", [w, w])):
        w.grad = v.grad = None
        y = torch.ones(1) * layers[0] * layers[1]
        by_layer(y, layers, torch.ones(1))
        (right,) = torch.autograd.grad(y, w)
        print(f"{name}: gradient {w.grad.item()}, right is {right.item()}")
    w.grad = None
    always_stored(w * v, [w, v], torch.ones(1), ["BW", "BW"])
    print(f"two BW and no W: gradient {w.grad}, right is {2 * v.item()}")
