"""Our decoder against the Llama of `transformers`, tiny and with random weights.

`transformers` runs in this process only; the ranks get files and plain tensors. Its
norms, rotary tables and softmax compute in fp32 whatever the model's dtype. To compare
to the last digits of float64, the names of fp32 in its modules are bound to float64.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.devices import randint
from tests.model.test_hf import written
from xtrain.comm import init_mesh
from xtrain.model import (
    RopeScaling,
    XtrainConfig,
    XtrainModel,
    load_hf,
    load_hf_stages,
    save_hf,
)
from xtrain.model.hf_names import hf_name
from xtrain.schedules import SCHEDULES

LOAD = "xtrain.model.hf_load:load_hf"
SAVE = "xtrain.model.hf_save:save_hf"
CONFIG = "xtrain.model.hf_config:config_from_hf"
MODEL = "xtrain.model.decoder:XtrainModel"

VOCABULARY, STEPS = 24, 3
ALL_EQUAL = {"rtol": 1e-10, "atol": 1e-10}
IN_FP32 = {"rtol": 1e-6, "atol": 1e-6}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.3,  # at 0.02 so small a model does not see its attention
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The wavelengths of 3 pairs are 6, 63 and 628: one kept, one on the ramp, one slowed.
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 5.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 120,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
CASES = {
    "two key heads": {"rope_parameters": PLAIN},
    "one key head, tied": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": STRETCHED,
    },
    "as many key heads": {"num_key_value_heads": 8, "rope_parameters": STRETCHED},
}


@pytest.fixture(scope="session")
def llama() -> SimpleNamespace:
    """Its classes; imported here because the import takes seconds.

    A user's machine may do without it. Where CI is set, a missing one is an error.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
        from transformers import modeling_rope_utils
        from transformers.models.llama import modeling_llama
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"transformers cannot be imported here: {error}")
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return SimpleNamespace(
        config=transformers.LlamaConfig,
        model=transformers.LlamaForCausalLM,
        modules=(modeling_llama, modeling_rope_utils),
    )


class AllInFloat64:
    """torch, as a module sees it, in which fp32 means float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


@pytest.fixture
def exact(llama, monkeypatch):
    """The same classes, with nothing left in fp32."""
    for module in llama.modules:
        monkeypatch.setattr(module, "torch", AllInFloat64())
    return llama


def built(llama, dtype=torch.float64, **changes):
    """A model with random weights, norms included."""
    torch.manual_seed(3)
    model = llama.model(llama.config(**(SIZES | changes))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def batch(seed: int):
    """Tokens and labels, [2, 7]; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = randint(VOCABULARY, (2, 2, 7), generator)
    labels[1, :3] = -100
    return tokens, labels


def by_our_names(model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model."): parameter
        for name, parameter in model.named_parameters()
    }


def logits_and_loss(model, tokens, labels):
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def split(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by our names: a Mixtral's one for gate and up is two here."""
    found = {}
    for name, tensor in theirs.items():
        name = name.replace(".mlp.gate.", ".mlp.router.")
        if name.endswith(".gate_up_proj"):
            both = tensor.chunk(2, 1)
            for part, own in zip(("gate_proj", "up_proj"), both, strict=True):
                found[name.replace("gate_up_proj", part)] = own.contiguous()
        else:
            found[name] = tensor
    return found


def trained(model, batch_of=batch, forward=logits_and_loss) -> list[dict]:
    """Logits, loss and gradients of each step of AdamW, and the weights after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = []
    for step in range(STEPS):
        logits, loss = forward(model, *batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        parameters = by_our_names(model)
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in parameters.items()}
        steps.append(
            {
                "loss": loss.detach().double(),
                "logits": logits.detach(),
                "gradients": split(gradients),
                "weights": split(weights),
            }
        )
    return steps


def equal(found, expected, tolerance, what) -> None:
    torch.testing.assert_close(
        found, expected, **tolerance, msg=lambda text: f"{what}: {text}"
    )


def trains_as(folder: Path, expected, layouts, tolerance: dict, batch_of) -> None:
    """Load the checkpoint on these ranks and follow the steps that were recorded."""
    for sizes, axes in layouts:
        model = load_hf(folder, init_mesh(sizes, axes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = model.data
        here, size = (0, 1) if data is None else (data.rank(), data.size())
        for step, right in enumerate(expected):
            what = f"{axes} step {step}"
            logits = right["logits"].chunk(size)[here]
            tokens, labels = (t.chunk(size)[here] for t in batch_of(step))
            equal(model(tokens, gather_logits=True), logits, tolerance, "logits")
            optimizer.zero_grad()
            loss = model.loss(tokens, labels)
            equal(loss.detach(), right["loss"], tolerance, f"{what}, loss")
            loss.backward()
            model.sync_gradients()
            names = [name for name, _ in model.named_parameters()]
            assert sorted(names) == sorted(right["gradients"])
            follows([model], right["gradients"], tolerance, f"{what} gradient", True)
            optimizer.step()
            follows([model], right["weights"], tolerance, what, False)


def follows(modules, right: dict, tolerance: dict, what: str, gradients: bool) -> None:
    """Every parameter, or its gradient, is its slice of the whole model's."""
    for module in modules:
        for name, parameter in module.named_parameters():
            found = parameter.grad if gradients else parameter.detach()
            place = module.placement(name).of(right[name])
            assert place.abs().max() > 1e-6, f"{name} has nothing to compare"
            equal(found, place, tolerance, f"{what} {name}")


@pytest.mark.verifies(LOAD, MODEL)
@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps_are_those_of_transformers(
    world, exact, tmp_path, name
):
    model = built(exact, **CASES[name])
    model.save_pretrained(tmp_path)
    expected = trained(model)
    for size in (1, 2, 4):
        layouts = [((size,), ("tensor",))]
        world(size).run(trains_as, tmp_path, expected, layouts, ALL_EQUAL, batch)


@pytest.mark.verifies(LOAD, MODEL)
def test_as_it_comes_with_parts_in_fp32_the_logits_agree_to_six_digits(llama, tmp_path):
    for changes in CASES.values():
        model = built(llama, **changes)
        model.save_pretrained(tmp_path)
        tokens, _ = batch(0)
        theirs, ours = model(tokens).logits, load_hf(tmp_path)(tokens)
        equal(ours, theirs, IN_FP32, changes)
        assert not torch.allclose(ours, theirs, **ALL_EQUAL), "nothing was in fp32"


def both_spellings(folder: Path, rope: dict):
    """config.json with the base and the scaling in one entry, then in two."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rest = {k: v for k, v in values.items() if not k.startswith("rope_")}
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = scaling == {"rope_type": "default"}
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling,
    }
    for spelling in ({"rope_parameters": rope}, older):
        path.write_text(json.dumps(rest | spelling))
        yield


@pytest.mark.verifies(LOAD, CONFIG)
@pytest.mark.parametrize("rope", [PLAIN, STRETCHED], ids=["plain", "Llama 3.1"])
def test_both_spellings_of_rotary_positions_mean_what_transformers_reads(
    exact, tmp_path, rope
):
    built(exact, rope_parameters=rope).save_pretrained(tmp_path)
    tokens, _ = batch(0)
    found = []
    for _ in both_spellings(tmp_path, rope):
        theirs = exact.model.from_pretrained(tmp_path, dtype="auto")
        equal(load_hf(tmp_path)(tokens), theirs(tokens).logits, ALL_EQUAL, rope)
        found.append(load_hf(tmp_path).config)
    assert found[0] == found[1]
    assert (found[0].rope_scaling is None) == (rope is PLAIN)


def load_and_save(folder: Path, target: Path, most: int, sizes, axes) -> None:
    mesh = init_mesh(sizes, axes)
    if "pipeline" in axes:
        stages = load_hf_stages(folder, mesh, SCHEDULES["one_f_one_b"](2, 2))
        save_hf(stages, target, max_file_bytes=most)
    else:
        save_hf(load_hf(folder, mesh), target, max_file_bytes=most)


def round_trip(world, classes, model, folder, dtype, most, sizes, axes):
    """Their files through our shards: the same bits and names; both opened by them."""
    theirs, ours = folder / "theirs", folder / "ours"
    model.save_pretrained(theirs, max_shard_size=most)
    ranks = torch.Size(sizes).numel()
    world(ranks).run(load_and_save, theirs, ours, most, sizes, axes)
    for files in (theirs, ours):
        several = len(list(files.glob("*.safetensors"))) > 1
        assert (files / "model.safetensors.index.json").exists() == several
        assert several == (most < 10_000)
    before, after = written(theirs), written(ours)
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in before) != model.config.tie_word_embeddings
    for key, tensor in before.items():
        assert after[key].dtype == dtype and torch.equal(after[key], tensor), key
    return [opened_by_them(classes, files) for files in (theirs, ours)]


@pytest.mark.verifies(LOAD, SAVE)
@pytest.mark.parametrize(
    ("name", "dtype", "size", "most"),
    [
        ("two key heads", torch.float32, 2, 10**9),
        ("one key head, tied", torch.bfloat16, 4, 1500),
        ("as many key heads", torch.bfloat16, 2, 3000),
        ("two key heads", torch.float16, 4, 10**9),
    ],
)
def test_what_they_save_comes_back_bit_for_bit_under_the_same_names(
    world, llama, tmp_path, name, dtype, size, most
):
    """Out of one file or several, through shards, and into theirs again."""
    model = built(llama, dtype, **CASES[name])
    cut = (size,), ("tensor",)
    model, again = round_trip(world, llama, model, tmp_path, dtype, most, *cut)
    assert again.dtype == dtype
    assert again.config.tie_word_embeddings == model.config.tie_word_embeddings
    tokens, _ = batch(0)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def opened_by_them(llama, folder: Path):
    """What `from_pretrained` makes of a directory; nothing missing, nothing new."""
    again, report = llama.model.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    return again


@pytest.mark.verifies(SAVE)
def test_a_new_model_of_ours_opens_in_transformers(exact, tmp_path):
    """A model that begins here."""
    for tied in (False, True):
        save_hf(new_model(tied), tmp_path / str(tied))
        ours = load_hf(tmp_path / str(tied))
        tokens, _ = batch(1)
        theirs = opened_by_them(exact, tmp_path / str(tied))
        equal(theirs(tokens).logits, ours(tokens), ALL_EQUAL, "logits")
        names = {name for name, _ in theirs.named_parameters()}
        assert names == {hf_name(name) for name, _ in ours.named_parameters()}


def new_model(tied: bool) -> XtrainModel:
    config = XtrainConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        rope_scaling=RopeScaling(factor=5.0, original_max_position_embeddings=120),
        tie_word_embeddings=tied,
    )
    return XtrainModel(config, dtype=torch.float64)
