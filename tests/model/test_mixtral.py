"""Our decoder with experts against the Mixtral of `transformers`, tiny and random.

As for the Llama: `transformers` runs in this process only, and to compare to the last
digits of float64 what it computes in fp32 is bound to float64.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.model.stage_training import no_loss
from tests.model.test_transformers import (
    ALL_EQUAL,
    IN_FP32,
    PLAIN,
    SIZES,
    STRETCHED,
    AllInFloat64,
    batch,
    equal,
    follows,
    llama,  # noqa: F401  its fixture imports transformers, or skips
    opened_by_them,
    round_trip,
    trained,
    trains_as,
)
from tests.model.twins import LOSSES as COEFFICIENTS
from tests.model.twins import MIXTRAL, config_of
from xtrain.comm import init_mesh
from xtrain.model import (
    XtrainConfig,
    XtrainModel,
    batch_group,
    load_hf,
    load_hf_stages,
    save_hf,
)
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

LOAD = "xtrain.model.hf_load:load_hf"
LOAD_STAGES = "xtrain.model.hf_load:load_hf_stages"
SAVE = "xtrain.model.hf_save:save_hf"
MODEL = "xtrain.model.decoder:XtrainModel"
LOSSES = "xtrain.model.balance:auxiliary_loss"
NAMES = "xtrain.model.hf_names:hf_sources"
CONFIG = "xtrain.model.hf_config:config_from_hf"

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
CASES = {
    "two of four": EXPERTS | {"rope_parameters": PLAIN},
    "balanced, tied": EXPERTS
    | BALANCED
    | {"tie_word_embeddings": True, "rope_parameters": STRETCHED},
    "three of eight": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 8,
        "rope_parameters": PLAIN,
    },
}
Layout = tuple[tuple[int, ...], tuple[str, ...]]
LAYOUTS: dict[int, list[Layout]] = {
    1: [((1,), ("expert",))],
    2: [((2,), ("expert",))],
    4: [((4,), ("expert",)), ((2, 2), ("expert", "tensor"))],
}


@pytest.fixture(scope="session")
def mixtral(llama) -> SimpleNamespace:  # noqa: F811
    """Its classes."""
    import transformers
    from transformers import modeling_rope_utils
    from transformers.models.mixtral import modeling_mixtral

    return SimpleNamespace(
        config=transformers.MixtralConfig,
        model=transformers.MixtralForCausalLM,
        modules=(modeling_mixtral, modeling_rope_utils),
    )


@pytest.fixture
def exact(mixtral, monkeypatch):
    """The same classes, with nothing left in fp32; their loss, too, is in float64."""
    from transformers.loss import loss_utils

    for module in mixtral.modules:
        monkeypatch.setattr(module, "torch", AllInFloat64())
    monkeypatch.setattr(loss_utils, "torch", AllInFloat64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return mixtral


def built(mixtral, dtype=torch.float64, **changes):
    """A model with random weights, norms included, whose experts are a loop."""
    torch.manual_seed(3)
    config = mixtral.config(**(SIZES | changes), experts_implementation="eager")
    model = mixtral.model(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
    return model


def their_loss(model, tokens, labels):
    output = model(tokens, labels=labels, shift_labels=labels)
    return output.logits, output.loss


def batches(step: int):
    """Tokens and labels of all ranks, [8, 7]."""
    pairs = [batch(4 * step + part) for part in range(4)]
    return [torch.cat(tensors) for tensors in zip(*pairs, strict=True)]


@pytest.mark.verifies(LOAD, MODEL, LOSSES, NAMES)
@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_steps_are_those_of_transformers(
    world, exact, tmp_path, name
):
    """On one rank, 2 and 4 expert ranks, and 2 with 2 tensor ranks each."""
    model = built(exact, **CASES[name])
    model.save_pretrained(tmp_path)
    expected = trained(model, batches, their_loss)
    assert set(load_hf(tmp_path).state_dict()) - {"lm_head.weight"} == set(
        expected[0]["weights"]
    ) - {"lm_head.weight"}
    for size, layouts in LAYOUTS.items():
        world(size).run(trains_as, tmp_path, expected, layouts, ALL_EQUAL, batches)


@pytest.mark.verifies(LOAD, MODEL)
def test_as_it_comes_with_parts_in_fp32_it_agrees_to_six_digits(
    world, mixtral, tmp_path
):
    for number, changes in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        model = built(mixtral, **changes)
        model.save_pretrained(folder)
        expected = trained(model, batches, their_loss)
        world(2).run(trains_as, folder, expected[:1], LAYOUTS[2], IN_FP32, batches)
        theirs, ours = expected[0]["logits"], load_hf(folder)(batches(0)[0])
        assert not torch.allclose(ours, theirs, **ALL_EQUAL), "nothing was in fp32"


def stages_train_as(folder: Path, expected: list[dict], name: str) -> None:
    """Two pipeline ranks of two expert ranks each."""
    mesh, schedule = (
        init_mesh((2, 2), ("pipeline", "expert")),
        SCHEDULES[name](2, 4),
    )
    stages = load_hf_stages(folder, mesh, schedule)
    modules = [stage.module for stage in stages]
    last = next((m for m in modules if m.has_head), None)
    runner = PipelineRunner(
        stages,
        schedule,
        last.loss_fn if last else no_loss,
        mesh["pipeline"].get_group(),
        data_group=batch_group(mesh),
    )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=0.01)
    here = mesh["expert"].get_local_rank()
    for step, right in enumerate(expected):
        optimizer.zero_grad()
        loss = runner.step(*(t.chunk(2)[here] for t in batches(step)))
        equal(loss, right["loss"], ALL_EQUAL, f"step {step}, loss")
        for module in modules:
            module.sync_gradients()
        follows(modules, right["gradients"], ALL_EQUAL, "gradient", True)
        optimizer.step()
        follows(modules, right["weights"], ALL_EQUAL, f"step {step}", False)


@pytest.mark.verifies(LOAD_STAGES, NAMES)
def test_stages_train_as_transformers_does(world, exact, tmp_path):
    model = built(exact, **CASES["two of four"])
    model.save_pretrained(tmp_path)
    expected = trained(model, batches, their_loss)
    for name in ("one_f_one_b", "dualpipe"):
        world(4).run(stages_train_as, tmp_path, expected, name)


@pytest.mark.verifies(LOAD, SAVE, NAMES, "xtrain.model.hf_names:hf_name")
@pytest.mark.parametrize(
    ("name", "dtype", "most", "sizes", "axes"),
    [
        ("two of four", torch.float32, 10**9, (2,), ("expert",)),
        ("balanced, tied", torch.bfloat16, 1500, (2, 2), ("expert", "tensor")),
        ("three of eight", torch.float16, 900, (2, 2), ("expert_data", "expert")),
        ("three of eight", torch.bfloat16, 10**9, (2, 2, 2),
         ("pipeline", "expert", "tensor")),
    ],
)  # fmt: skip
def test_what_they_save_comes_back_bit_for_bit_under_the_same_names(
    world, mixtral, tmp_path, name, dtype, most, sizes, axes
):
    """Out of one file or several, through shards of experts, and into theirs again."""
    model = built(mixtral, dtype, **CASES[name])
    cut = sizes, axes
    model, again = round_trip(world, mixtral, model, tmp_path, dtype, most, *cut)
    for opened in (model, again):
        opened.set_experts_implementation("eager")
    for key in ("router_aux_loss_coef", "output_router_logits", *EXPERTS):
        if key != "router_aux_loss_coef" or model.config.output_router_logits:
            assert getattr(again.config, key) == getattr(model.config, key), key
    tokens, _ = batch(0)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.verifies(SAVE, CONFIG)
def test_a_new_model_of_ours_opens_in_transformers(exact, tmp_path):
    losses = COEFFICIENTS | {"router_sequence_loss_coef": 0.25}
    config = config_of(**MIXTRAL, **losses)
    ours = XtrainModel(config, dtype=torch.float64)
    save_hf(ours, tmp_path)
    again = load_hf(tmp_path).config
    assert losses == {name: getattr(again, name) for name in losses}
    assert not again.router_aux_loss_pooled
    theirs = opened_by_them(exact, tmp_path)
    theirs.set_experts_implementation("eager")
    tokens, _ = batch(1)
    equal(theirs(tokens).logits, ours(tokens), ALL_EQUAL, "logits")


@pytest.mark.verifies("xtrain.model.hf_config:check_architecture")
@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_intermediate_size", 24), ("n_shared_experts", 1),
     ("first_k_dense_replace", 1), ("scoring_func", "sigmoid"),
     ("norm_topk_prob", False), ("routed_scaling_factor", 2.5), ("n_group", 2),
     ("balance_bias", True)],
)  # fmt: skip
def test_experts_that_no_mixtral_has_are_not_saved(tmp_path, key, value):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_local_experts": 4,
             "num_experts_per_tok": 2, "topk_group": 1}  # fmt: skip
    model = XtrainModel(XtrainConfig(**sizes, **{key: value}))
    with pytest.raises(ValueError, match=f"{key}={value!r}: files of Hugging Face"):
        save_hf(model, tmp_path / "files")
    assert not (tmp_path / "files").exists()


@pytest.mark.verifies(CONFIG)
@pytest.mark.parametrize(
    ("key", "value"),
    [("router_jitter_noise", 0.1), ("hidden_act", "gelu")],
)
def test_what_the_decoder_is_not_is_refused_by_name(mixtral, tmp_path, key, value):
    from xtrain.checkpoint import CheckpointError

    built(mixtral, **EXPERTS).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key}={value!r}, but this model has"):
        load_hf(tmp_path)
