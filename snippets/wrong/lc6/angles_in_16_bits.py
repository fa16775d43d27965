# python snippets/wrong/lc6/angles_in_16_bits.py
import torch


def cos_sin(positions, frequencies, dtype):
    angles = positions.to(dtype).unsqueeze(-1) * frequencies.to(dtype)
    return angles.cos(), angles.sin()  # the bug: the table is in the model's dtype


def cos_sin_right(positions, frequencies, dtype):
    angles = positions.double().unsqueeze(-1) * frequencies.double()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scores_at(distance, positions, table, dtype):
    """The score of one query and one key, `distance` before it, at each position."""
    frequencies = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    ones = torch.ones(4, dtype=torch.complex128)
    turned = []
    for place in (positions, positions - distance):
        cos, sin = (t.double() for t in table(place, frequencies, dtype))
        turned.append(torch.complex(cos, sin) * ones)
    query, key = turned
    return (query * key.conj()).real.sum(-1)


if __name__ == "__main__":
    positions = torch.tensor([10, 100, 1_000, 10_000, 100_000])
    print("positions:", positions.tolist())
    for dtype in (torch.float32, torch.bfloat16):
        for table in (cos_sin, cos_sin_right):
            scores = scores_at(5, positions, table, dtype)
            print(f"{str(dtype)[6:]:8} {table.__name__:13}: "
                  f"{[f'{x:.2f}' for x in scores.tolist()]}")  # fmt: skip
