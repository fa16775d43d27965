# python snippets/wrong/lc6/shift_inside.py
import torch


def zigzag(x, rank, size):
    """A rank's tokens of the last dim: an early and a late piece."""
    pieces = x.chunk(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], -1)


def shifted(tokens):
    """The next token of each; the last one has none."""
    return torch.cat([tokens[1:], torch.tensor([-100])])


def cut_then_shift(tokens, rank, size):
    mine = zigzag(tokens, rank, size)
    return mine, shifted(mine)  # the bug: the next token may be on another rank


def shift_then_cut(tokens, rank, size):
    return zigzag(tokens, rank, size), zigzag(shifted(tokens), rank, size)


if __name__ == "__main__":
    text = torch.arange(8)  # token t is followed by t + 1
    for rule in (cut_then_shift, shift_then_cut):
        wrong = counted = 0
        for rank in range(2):
            tokens, labels = rule(text, rank, 2)
            pairs = list(zip(tokens.tolist(), labels.tolist()))
            counted += sum(label != -100 for _, label in pairs)
            wrong += sum(label not in (-100, token + 1) for token, label in pairs)
            print(f"{rule.__name__}, rank {rank}: {pairs}")
        print(f"{rule.__name__}: {counted} labels count, {wrong} of them wrong")
