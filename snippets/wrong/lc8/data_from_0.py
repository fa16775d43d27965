# python snippets/wrong/lc8/data_from_0.py
import torch


def anew(order, batch, step):
    """The batches that a run takes from step `step` on."""
    return iter(order.split(batch))  # the bug: weights go on, the data does not


def from_the_step(order, batch, step):
    return iter(order.split(batch)[step:])


def trained_on(samples, batch, stop, batches_from):
    """Samples of an epoch, in a run that stops after some steps and is resumed."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    seen, checkpoint = [], 0
    for last in (stop, samples // batch):
        batches = batches_from(order, batch, checkpoint)
        for _ in range(checkpoint, last):
            seen += next(batches).tolist()
        checkpoint = last
    return seen


if __name__ == "__main__":
    for rule in (anew, from_the_step):
        seen = trained_on(12, 2, 4, rule)
        never = sorted(set(range(12)) - set(seen))
        print(f"{rule.__name__:13}: {seen}, never {never}")
