"""Text that a model writes, token by token.

    prompt -> logits of the last token -> softmax(logits / temperature) -> draw -> ...

Every rank draws the same, from the whole logits and a seed. The sequence is padded on
the right to one length, which causal attention does not see; beyond that length the
oldest tokens are dropped.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm.autograd import all_gather_split
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
        ValueError: the prompt is empty.
    """
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
        if model.is_whole:
            logits = model(padded, gather_logits=True)[0, len(window) - 1]
            token = drawn(logits, temperature, generator)
        else:
            token = drawn_by_stages(
                model, padded, len(window) - 1, temperature, generator
            )
        ids.append(token)
        if token == end:
            break
    model.train(was_training)
    return ids[len(prompt) :]


def drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token, from the logits of the whole vocabulary."""
    logits = logits_V.double().cpu()
    if temperature == 0:
        return int(logits.argmax())
    p = torch.softmax(logits / temperature, -1)
    return int(p.multinomial(1, generator=generator))


def drawn_by_stages(
    model: WrappedModel,
    padded: Tensor,
    place: int,
    temperature: float,
    generator: torch.Generator,
) -> int:
    """The same where the last stage is; the other stages' ranks are told.

    Tensor and context ranks of that stage gather the logits of all columns and tokens.
    """
    assert model.schedule is not None and model.mesh is not None
    schedule, group = model.schedule, model.mesh["pipeline"].get_group()
    rows = padded.expand(schedule.micro_batches, -1)
    outputs = model.runner().forward(rows)
    source = schedule.rank_of(schedule.stages - 1, 0)
    token = torch.zeros(1, dtype=torch.int64, device=padded.device)
    if group.rank() == source:
        first = outputs[0]
        logits = first[0] if isinstance(first, tuple) else first
        last = next(part for part in model.parts if part.has_head)
        if last.tensor is not None:
            logits = all_gather_split(logits, -1, last.tensor)
        if last.context is not None:
            logits = last.context.of_batch(padded.shape[1], None).unshard(logits)
        columns = logits[0, place, : model.config.vocab_size]
        token.fill_(drawn(columns, temperature, generator))
    dist.broadcast(token, group=group, group_src=source)
    return int(token)
