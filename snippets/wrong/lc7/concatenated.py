# python snippets/wrong/lc7/concatenated.py
import torch


def concatenated(chunks, counts):
    """The outputs that came back from each expert."""
    return torch.cat(chunks)  # the bug: [e] is now row e, and not chunk e


def split_again(chunks, counts):
    return torch.cat(chunks).split(counts)


def combine(chunks, tokens, gates, length, received):
    """y [T, H]: the rows of expert e go to its tokens, each times its gate."""
    counts = [len(chosen) for chosen in tokens]
    back, y = received(chunks, counts), torch.zeros(length, chunks[0].shape[1])
    for e, (chosen, g) in enumerate(zip(tokens, gates, strict=True)):
        y[chosen] += g[:, None] * back[e]  # one row broadcasts to all tokens
    return y


if __name__ == "__main__":
    # The output of expert e for token t is 10 e + t.
    for tokens in ([[1], [0], [2]], [[0, 2, 3], [1], [0, 3]]):
        tokens = [torch.tensor(chosen) for chosen in tokens]
        chunks = [(10.0 * e + t)[:, None] for e, t in enumerate(tokens)]
        gates = [torch.ones(len(chosen)) for chosen in tokens]
        for received in (concatenated, split_again):
            y = combine(chunks, tokens, gates, 4, received)
            print(f"tokens of experts {[len(t) for t in tokens]}, "
                  f"{received.__name__:12}: {y.flatten().int().tolist()}")  # fmt: skip
