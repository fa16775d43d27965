"""Text that a model writes, token by token.

    prompt -> logits of the last token -> softmax(logits / temperature) -> draw -> ...

Every rank draws the same, from the whole logits and a seed. The sequence is padded on
the right to one length, which causal attention does not see; beyond that length the
oldest tokens are dropped.
"""

from collections.abc import Sequence

import torch

from xtrain.train.wrap import WrappedModel


@torch.no_grad()
def generate(
    model: WrappedModel,
    prompt: Sequence[int],
    count: int,
    *,
    sequence: int,
    temperature: float = 0.8,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """The ids that follow a prompt; every rank of the mesh calls it.

    Args:
        prompt: at least one id.
        count: at most so many.
        sequence: the length that the model is called with.
        temperature: 0 takes the most probable token.
        end: the id after which it stops.

    Raises:
        ValueError: the model is in stages of a pipeline, or the prompt is empty.
    """
    if not model.is_whole:
        raise ValueError("text is written by a whole model: one pipeline rank")
    if not prompt:
        raise ValueError("the prompt has no token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    ids = list(prompt)
    for _ in range(count):
        window = ids[-sequence:]
        padded = torch.tensor([window + [0] * (sequence - len(window))], device=device)
        logits = model(padded, gather_logits=True)[0, len(window) - 1].double().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            p = torch.softmax(logits / temperature, -1)
            token = int(torch.multinomial(p, 1, generator=generator))
        ids.append(token)
        if token == end:
            break
    model.train(was_training)
    return ids[len(prompt) :]
