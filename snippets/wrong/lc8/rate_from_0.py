# python snippets/wrong/lc8/rate_from_0.py
import torch
from torch.optim.lr_scheduler import LambdaLR


def rate(step):
    return min((step + 1) / 4, 1)  # warm-up


def new_schedule(optimizer, step):
    """The learning rate of each further step of a run that was resumed at `step`."""
    schedule = LambdaLR(optimizer, rate)  # the bug: its count is not in the checkpoint
    while True:
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


def of_the_step(optimizer, step):
    while True:
        yield rate(step) * optimizer.defaults["lr"]
        step += 1


def rates(stop, steps, resume):
    """Of a run that is saved and resumed after `stop` steps."""
    optimizer, found, state = None, [], None
    for first, last in ((0, stop), (stop, steps)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        if state is not None:
            optimizer.load_state_dict(state)
        each = resume(optimizer, first)
        found += [next(each) for _ in range(first, last)]
        state = optimizer.state_dict()
    return found


if __name__ == "__main__":
    for resume in (new_schedule, of_the_step):
        print(f"{resume.__name__:12}: {rates(6, 10, resume)}")
