"""Our decoder against the Qwen2, Qwen3 and Mistral of `transformers`, tiny and random.

As for the Llama: `transformers` runs in this process only, and to compare to the last
digits of float64 what it computes in fp32 is bound to float64.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.devices import randint
from tests.model.stage_training import no_loss
from tests.model.test_transformers import (
    ALL_EQUAL,
    PLAIN,
    STRETCHED,
    AllInFloat64,
    built,
    equal,
    follows,
    llama,  # noqa: F401  its fixture imports transformers, or skips
    opened_by_them,
    round_trip,
    trained,
    trains_as,
)
from tests.model.twins import config_of
from xtrain.comm import init_mesh
from xtrain.model import XtrainModel, load_hf, load_hf_stages, save_hf
from xtrain.model.hf_config import config_from_hf
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.schedules import SCHEDULES

LOAD = "xtrain.model.hf_load:load_hf"
LOAD_STAGES = "xtrain.model.hf_load:load_hf_stages"
SAVE = "xtrain.model.hf_save:save_hf"
MODEL = "xtrain.model.decoder:XtrainModel"
CONFIG = "xtrain.model.hf_config:config_from_hf"
KINDS = ("xtrain.model.hf_kinds:kind_for", "xtrain.model.hf_kinds:read_windows")
PADDED = "xtrain.model.config:padded_for"

CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
WINDOW_BY_LAYER = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "max_window_layers": 1,
}
CASES = {
    "qwen2": {"rope_parameters": PLAIN, **WINDOW_BY_LAYER},
    "qwen2, tied": {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": STRETCHED},
    "qwen3, tied": {
        "rope_parameters": PLAIN,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        **WINDOW_BY_LAYER,
    },
    "mistral": {"rope_parameters": PLAIN, "sliding_window": 3},
    "mistral, tied": {
        "rope_parameters": PLAIN,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}
LAYOUTS = {
    1: [((1,), ("tensor",))],
    2: [((2,), ("tensor",)), ((2,), ("context",))],
    4: [((4,), ("tensor",)), ((2, 2), ("context", "tensor"))],
}


@pytest.fixture
def family(llama, request) -> SimpleNamespace:  # noqa: F811
    """The classes of one case's model."""
    import transformers
    from transformers import modeling_rope_utils

    kind = request.param.partition(",")[0]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return SimpleNamespace(
        kind=kind,
        config=getattr(transformers, f"{CLASSES[kind]}Config"),
        model=getattr(transformers, f"{CLASSES[kind]}ForCausalLM"),
        modules=(module, modeling_rope_utils),
        changes=CASES[request.param],
    )


@pytest.fixture
def exact(family, monkeypatch) -> SimpleNamespace:
    """The same, with nothing left in fp32."""
    for module in family.modules:
        monkeypatch.setattr(module, "torch", AllInFloat64())
    return family


of_cases = pytest.mark.parametrize("family", CASES, indirect=True)


def batches(step: int):
    """Tokens and labels, [4, 8]; zigzag cuts 8 on 2 ranks."""
    tokens, labels = randint(24, (2, 4, 8), torch.Generator().manual_seed(step))
    labels[1, :3] = -100
    return tokens, labels


@pytest.mark.verifies(LOAD, MODEL, KINDS[1])
@of_cases
def test_logits_gradients_and_steps_are_those_of_transformers(world, exact, tmp_path):
    model = built(exact, **exact.changes)
    model.save_pretrained(tmp_path)
    expected = trained(model, batches)
    for size, layouts in LAYOUTS.items():
        world(size).run(trains_as, tmp_path, expected, layouts, ALL_EQUAL, batches)


@pytest.mark.verifies(LOAD, MODEL)
@of_cases
def test_in_fp32_the_logits_agree_to_a_millionth_of_the_largest(family, tmp_path):
    model = built(family, torch.float32, **family.changes)
    model.save_pretrained(tmp_path)
    tokens, _ = batches(0)
    ours, theirs = load_hf(tmp_path)(tokens), model(tokens).logits
    tolerance = {"rtol": 0, "atol": 1e-6 * theirs.abs().max().item()}
    equal(ours, theirs, tolerance, family.kind)


def stages_train_as(folder: Path, expected: list[dict], name: str) -> None:
    """Two pipeline ranks of two tensor ranks each."""
    mesh = init_mesh((2, 2), ("pipeline", "tensor"))
    schedule = SCHEDULES[name](2, 4)
    stages = load_hf_stages(folder, mesh, schedule, sequence_parallel=True)
    modules = [stage.module for stage in stages]
    last = next((m for m in modules if m.has_head), None)
    loss_fn = last.loss_fn if last else no_loss
    runner = PipelineRunner(stages, schedule, loss_fn, mesh["pipeline"].get_group())
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=0.01)
    for step, right in enumerate(expected):
        optimizer.zero_grad()
        loss = runner.step(*batches(step))
        equal(loss, right["loss"], ALL_EQUAL, f"step {step}, loss")
        for module in modules:
            module.sync_gradients()
        follows(modules, right["gradients"], ALL_EQUAL, "gradient", True)
        optimizer.step()
        follows(modules, right["weights"], ALL_EQUAL, f"step {step}", False)


@pytest.mark.verifies(LOAD_STAGES)
@of_cases
def test_stages_train_as_transformers_does(world, exact, tmp_path):
    model = built(exact, **exact.changes)
    model.save_pretrained(tmp_path)
    expected = trained(model, batches)
    for name in ("one_f_one_b", "zb_v"):
        world(4).run(stages_train_as, tmp_path, expected, name)


@pytest.mark.verifies(LOAD, SAVE, *KINDS)
@of_cases
def test_what_they_save_comes_back_bit_for_bit_under_the_same_names(
    world, family, tmp_path
):
    """The type of the model, windows, ids and lengths as well as tensors."""
    ids = {"eos_token_id": 5, "pad_token_id": 7, "max_position_embeddings": 333}
    model = built(family, torch.bfloat16, **family.changes, **ids)
    model.generation_config.max_new_tokens = 17
    cut = (2, 2), ("pipeline", "tensor")
    model, again = round_trip(
        world, family, model, tmp_path, torch.bfloat16, 1500, *cut
    )
    kept = ("model_type", "num_key_value_heads", "head_dim", "sliding_window")
    for key in (*kept, "use_sliding_window", "layer_types", *ids):
        assert getattr(again.config, key, 0) == getattr(model.config, key, 0), key
    assert again.generation_config.max_new_tokens == 17
    tokens, _ = batches(0)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def logits_and_files(folder: Path, target: Path, sizes, axes) -> torch.Tensor:
    """Logits of a vocabulary that these ranks do not divide; and its files again."""
    model = load_hf(folder, init_mesh(sizes, axes))
    assert model.config.padded_vocab_size == 28
    tokens, labels = batches(0)
    model.loss(tokens, labels).backward()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        parameter = model.get_parameter(name)
        first = model.tensor.rank() * len(parameter)
        rest = slice(max(0, 25 - first), None)
        assert not parameter[rest].any() and not parameter.grad[rest].any(), name
    save_hf(model, target)
    return model(tokens, gather_logits=True).detach()


@pytest.mark.verifies(LOAD, SAVE, PADDED)
@pytest.mark.parametrize("family", ["qwen3", "mistral"], indirect=True)
def test_a_vocabulary_that_the_ranks_do_not_divide_is_padded(world, exact, tmp_path):
    model = built(exact, **exact.changes | {"vocab_size": 25})
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    right = model(batches(0)[0]).logits
    arguments = theirs, ours, (4,), ("tensor",)
    for logits in world(4).run(logits_and_files, *arguments):
        equal(logits, right, ALL_EQUAL, "logits")
    assert opened_by_them(exact, ours).config.vocab_size == 25
    assert json.loads((ours / "config.json").read_text())["vocab_size"] == 25


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.verifies(CONFIG, *KINDS)
def test_windows_by_layer_are_read_as_transformers_has_them():
    def read(**changes):
        config = config_from_hf(QWEN | changes)
        return [config.window_of(layer) for layer in range(3)]

    full, sliding = "full_attention", "sliding_attention"
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert read(sliding_window=5, max_window_layers=0) == [None] * 3
    assert read(**on) == [None] * 3  # from layer 28 on
    assert read(**on, max_window_layers=2) == [None, None, 5]
    assert read(**on, layer_types=[full, sliding, sliding]) == [None, 5, 5]
    assert read(**on, layer_types=[full] * 3) == [None] * 3
    for changes, rule in (
        (on | {"layer_types": [sliding, full, sliding]}, "in its first layers"),
        (on | {"layer_types": [sliding]}, "not a list of 3 layers"),
        (on | {"max_window_layers": -1}, "max_window_layers=-1"),
        ({"use_sliding_window": 1}, "use_sliding_window=1 is not a bool"),
        (on | {"max_window_layers": 0, "sliding_window": 0}, "sliding_window=0"),
        ({"num_key_value_heads": None}, ""),
    ):
        if rule:
            with pytest.raises(ValueError, match=rule):
                config_from_hf(QWEN | changes)
    short = {name: QWEN[name] for name in QWEN if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match="has no num_key_value_heads"):
        config_from_hf(short)
    with pytest.raises(ValueError, match="has no head_dim"):
        config_from_hf(QWEN | {"model_type": "qwen3"})
    with pytest.raises(ValueError, match="has no sliding_window"):
        config_from_hf(QWEN | {"model_type": "mistral"})


@pytest.mark.verifies("xtrain.model.hf_kinds:kind_for")
def test_parts_that_no_model_has_together_are_refused(tmp_path):
    for changes in (
        {"qkv_bias": True, "qk_norm": True},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "qk_norm": True},
    ):
        with pytest.raises(ValueError, match=r"none of llama, .* has \{'qkv_bias': "):
            save_hf(XtrainModel(config_of(**changes)), tmp_path)
