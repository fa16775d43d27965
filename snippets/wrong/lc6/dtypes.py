# python snippets/wrong/lc6/dtypes.py
import torch


def summed(blocks):
    """The sum of dK blocks in fp32; each is computed into one buffer, as kernels do."""
    buffer, total = torch.empty_like(blocks[0]), None
    for block in blocks:
        buffer.copy_(block)
        if total is None:
            total = buffer.to(torch.float32)  # the bug: in fp32 this is the buffer
        else:
            total += buffer
    return total


def summed_right(blocks):
    total = torch.zeros_like(blocks[0], dtype=torch.float32)
    for block in blocks:
        total += block
    return total


def given_back(dq):
    return dq.to(torch.bfloat16)  # the bug: what the author's model has


def given_back_right(dq, dtype):
    return dq.to(dtype)


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        blocks = [torch.full((1,), float(n)).to(dtype) for n in (1, 2, 4)]
        print(f"{str(dtype)[6:]:8}: sum of 1, 2 and 4: {summed(blocks).item()}, "
              f"right is {summed_right(blocks).item()}")  # fmt: skip
    for value in (1.0, 1.001):
        dq = torch.tensor([value])
        print(f"dq {value} in an fp32 run: {given_back(dq).item()}, "
              f"{given_back(dq).dtype}")  # fmt: skip
