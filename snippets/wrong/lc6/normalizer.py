# python snippets/wrong/lc6/normalizer.py
import torch


def not_normalized(scores, lse):
    return scores.exp()  # the bug: softmax divides by the sum, e^lse


def of_the_block(scores, lse):
    return scores.softmax(-1)  # the bug: the sum of these keys, and not of all


def of_all_keys(scores, lse):
    return (scores - lse.unsqueeze(-1)).exp()


def backward(dO, q, k, v, out, lse, probabilities, blocks):
    """dq, dk, dv of softmax(q k^T) v, one block of keys at a time."""
    D = (dO * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), [], []
    for keys, values in zip(k.chunk(blocks), v.chunk(blocks)):
        P = probabilities(q @ keys.mT, lse)
        dS = P * (dO @ values.mT - D)
        dq += dS @ keys
        dk.append(dS.mT @ q)
        dv.append(P.mT @ dO)
    return dq, torch.cat(dk), torch.cat(dv)


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 4, requires_grad=True) for _ in range(3))
    dO, scores = torch.randn(8, 4), q @ k.mT
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    expected = torch.autograd.grad(out, (q, k, v), dO, retain_graph=True)
    for blocks in (1, 4):
        for probabilities in (not_normalized, of_the_block, of_all_keys):
            with torch.no_grad():
                found = backward(dO, q, k, v, out, lse, probabilities, blocks)
            sizes = [f"{x.norm() / y.norm():5.2f}" for x, y in zip(found, expected)]
            print(f"{blocks} blocks, {probabilities.__name__:14}: size of dq, dk, dv "
                  f"over the right one: {', '.join(sizes)}")  # fmt: skip
