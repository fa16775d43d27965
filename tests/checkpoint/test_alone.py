"""One process without a process group saves and loads; into other dtypes, too."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from xtrain.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, whole
from xtrain.zero import AdamW

SAVE = "xtrain.checkpoint.training_state:save_checkpoint"
LOAD = "xtrain.checkpoint.training_state:load_checkpoint"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OPTIMIZERS = {"torch": torch.optim.AdamW, "ours": AdamW}


def made(dtype, kind=torch.optim.AdamW, **options):
    torch.manual_seed(5)
    model = nn.Linear(5, 3, dtype=dtype)
    shards = [whole(*named) for named in model.named_parameters()]
    return model, shards, kind(model.parameters(), **({"lr": 0.1} | options))


def step(model, optimizer, seed):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, generator=generator, device=generator.device).to(
        model.weight.dtype
    )
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.verifies(SAVE, LOAD, "xtrain.comm.agreement:is_alone")
def test_a_process_alone_goes_on_where_it_was(tmp_path):
    model, shards, optimizer = made(torch.float64)
    step(model, optimizer, 0)
    save_checkpoint(tmp_path, 1, shards, optimizer, {"epoch": 2})
    drawn = torch.rand(3)
    step(model, optimizer, 1)
    other, into, its = made(torch.float64, lr=0.7)
    assert load_checkpoint(tmp_path, into, its) == (1, {"epoch": 2})
    assert torch.equal(torch.rand(3), drawn), "the random state is another"
    step(other, its, 1)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.verifies("xtrain.comm.agreement:is_alone")
def test_a_rank_that_has_not_met_the_others_does_not_save_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, shards, optimizer = made(torch.float64)
    with pytest.raises(ValueError, match="no process group: call"):
        save_checkpoint(tmp_path, 1, shards, optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.verifies(LOAD, "xtrain.checkpoint.optimizer_state:saved_state")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_into_another_dtype_moments_are_those_of_the_optimizer_that_receives(
    tmp_path, kind
):
    for there, here in itertools.product(DTYPES, DTYPES):
        model, shards, optimizer = made(there, OPTIMIZERS[kind])
        step(model, optimizer, 0)
        folder = tmp_path / f"{there}-{here}"
        save_checkpoint(folder, 1, shards, optimizer)
        other, into, its = made(here, OPTIMIZERS[kind])
        load_checkpoint(folder, into, its)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs.to(here))
            for key, value in optimizer.state[theirs].items():
                found = its.state[mine][key]
                wanted = here if value.dim() else value.dtype
                assert found.dtype == wanted, (there, here, key)
                assert torch.equal(found, value.to(wanted))
        step(other, its, 1)  # which moments of another dtype would stop
        assert all(p.isfinite().all() for p in other.parameters())


@pytest.mark.verifies("xtrain.checkpoint.optimizer_state:saved_state")
def test_state_wider_than_its_parameter_stays_so(tmp_path):
    model, shards, optimizer = made(torch.bfloat16)
    step(model, optimizer, 0)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-7
    save_checkpoint(tmp_path, 1, shards, optimizer)
    other, into, its = made(torch.bfloat16)
    load_checkpoint(tmp_path, into, its)
    state, found = optimizer.state[model.weight], its.state[other.weight]
    assert found["exp_avg"].dtype == torch.float32
    assert torch.equal(found["exp_avg"], state["exp_avg"])
    assert found["exp_avg_sq"].dtype == torch.bfloat16


WRONG = {
    "momentum": ({}, r"of optimizer 'AdamW', which does not fit SGD: one has no ams"),
    "lr": ({"lr": "x"}, "has lr='x', the optimizer 0.1"),
    "a bool": ({"lr": True}, "has lr=True, the optimizer 0.1"),
    "betas": ({"betas": [0.9]}, r"has betas=\[0.9\], the optimizer \(0.9, 0.999\)"),
    "no numbers": ({"betas": [0.9, "x"]}, r"has betas=\[0.9, 'x'\]"),
    "a switch": ({"amsgrad": "no"}, "has amsgrad='no', the optimizer False"),
}


@pytest.mark.verifies("xtrain.checkpoint.optimizer_state:check_groups")
@pytest.mark.parametrize("what", WRONG)
def test_an_optimizer_that_is_another_or_has_no_numbers_is_refused(tmp_path, what):
    changes, said = WRONG[what]
    model, shards, optimizer = made(torch.float32)
    step(model, optimizer, 0)
    optimizer.param_groups[0].update(changes)
    save_checkpoint(tmp_path, 1, shards, optimizer)
    kind = torch.optim.AdamW if changes else torch.optim.SGD
    other, into, its = made(torch.float32, kind)
    before = other.weight.detach().clone() + 0
    with torch.no_grad():
        other.weight += 1
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(tmp_path, into, its)
    assert torch.equal(other.weight, before + 1) and not its.state


@pytest.mark.verifies(LOAD)
def test_random_states_of_two_ranks_are_not_those_of_one():
    """`format_1` was saved by two: one that loads it keeps its own."""
    shapes = {"cube": (2, 3, 5), "vector": (7,), "none": (0, 3), "number": ()}
    shards = [whole(name, torch.zeros(shape)) for name, shape in shapes.items()]
    shards.append(whole("matrix", torch.zeros(5, 3, dtype=torch.float64)))
    shards.append(whole("count", torch.tensor(0)))
    torch.manual_seed(77)
    before = torch.get_rng_state()
    load_checkpoint(Path(__file__).parent / "format_1", shards)
    assert torch.equal(torch.get_rng_state(), before)
