# python snippets/wrong/lc7/balance_loss.py
import torch
import torch.nn.functional as F


def shares(p, k):
    """p [T, E]. Which experts each token has chosen, and each one's share f."""
    chosen = F.one_hot(p.topk(k).indices, p.shape[1]).sum(1).to(p)
    return chosen, chosen.mean(0) / k


def of_selected(p, k):
    chosen, f = shares(p, k)
    # The bug: a sum over tokens, which is divided by the number of experts.
    return (k * f * (p * chosen).sum(0)).sum() / p.shape[1]


def of_counts(p, k):
    f = shares(p, k)[1]
    return p.shape[1] * (f * f).sum()  # the bug: counts have no gradient


def switch_loss(p, k):
    f = shares(p, k)[1]
    return p.shape[1] * (f * p.mean(0)).sum()


def balanced(tokens, experts, k):
    """Scores of a router whose experts all get equally many tokens."""
    scores = torch.zeros(tokens, experts)
    for t in range(tokens):
        scores[t, [(k * t + j) % experts for j in range(k)]] = 1e-4
    return scores.requires_grad_()


if __name__ == "__main__":
    for rule in (of_selected, of_counts, switch_loss):
        found = [rule(balanced(t, 8, 2).softmax(-1), 2) for t in (8, 64, 512)]
        said = ", ".join(f"{loss.item():.2f}" for loss in found)
        print(f"{rule.__name__:11}: uniform routing of 8, 64, 512 tokens {said}; "
              f"has a gradient: {found[0].requires_grad}")  # fmt: skip
