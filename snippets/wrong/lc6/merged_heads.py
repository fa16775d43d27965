# python snippets/wrong/lc6/merged_heads.py
import torch


def merged(out):
    """[B, H, S, D] as [B, S, H D]: the features of a token, head after head."""
    batch, heads, length, head_dim = out.shape
    return out.reshape(batch, length, heads * head_dim)  # the bug: tokens are mixed


def merged_right(out):
    return out.transpose(1, 2).flatten(2)


if __name__ == "__main__":
    # Element [head, token] tells which head and token it is of.
    heads, tokens = torch.arange(2).view(1, 2, 1, 1), torch.arange(3).view(1, 1, 3, 1)
    out = (10 * heads + tokens).float()
    for merge in (merged, merged_right):
        features = merge(out)[0].int().tolist()
        print(f"{merge.__name__:12}: token 0 {features[0]}, 1 {features[1]}, "
              f"2 {features[2]}")  # fmt: skip
    same = torch.equal(merged(out[:, :1]), merged_right(out[:, :1]))
    print(f"with one head, both are equal: {same}")
