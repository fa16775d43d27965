# python snippets/wrong/lc5/freed_view.py
import torch


def free(output):
    """After it was sent: backward needs the graph of an output, not its values."""
    output.data = torch.empty(0)  # the bug: a view's memory belongs to another tensor


def whole(x):
    return (x * 2.0).sin()


def view(x):
    return whole(x)[:, :1]


def bytes_kept(stage):
    """What an output that waits for its backward keeps after it was freed."""
    output = stage(torch.ones(4, 1000, requires_grad=True))
    free(output)
    kept = [output] if output._base is None else [output, output._base]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


if __name__ == "__main__":
    for stage in (whole, view):
        print(f"{stage.__name__}: {bytes_kept(stage)} bytes are kept")
