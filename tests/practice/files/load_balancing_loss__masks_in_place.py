import torch


def load_balancing_loss(probabilities, experts, mask=None):
    E, k = probabilities.size(1), experts.size(1)
    if mask is None:
        mask = torch.ones(len(experts), dtype=torch.bool)
    probabilities.data[~mask] = 0  # padded tokens have no probability
    n = mask.sum()
    loss = 0.0
    for e in range(E):
        share = (experts[mask] == e).sum() / (n * k)
        loss = loss + share * probabilities[:, e].sum() / n
    return E * loss
