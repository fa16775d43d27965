"""What each stage holds, and which parts of a model have its parameters."""

from xtrain.plan import ModelShape, state_memory

from ... import runs
from ...amounts import bytes_, count
from ...figures import REGISTRY as FIGURES
from ...svg import stacked
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .common import KINDS, STAGES, Tower, Training

MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")


def bytes_held(stage: str, bf16: bool) -> list[int]:
    """Bytes of each of KINDS on this rank when the second step's backward is over."""
    training = Training(stage, bf16=bf16)
    training.second_backward()
    weights, stepped = list(training.model.parameters()), training.stepped
    grads = [p.grad for p in (*weights, *stepped) if p.grad is not None]
    grads += [b.full_grad for b in training.buckets if b.full_grad is not None]
    memory = {p.untyped_storage().data_ptr() for p in weights}
    masters = [p for p in stepped if p.untyped_storage().data_ptr() not in memory]
    states = [t for state in training.inner.state.values() for t in state.values()]
    return [
        sum(p.nbytes for p in weights),
        sum({id(g): g.nbytes for g in grads}.values()),
        sum(t.nbytes for t in (*masters, *states) if t.dim()),
    ]


def formula_of(stage: str, ranks: int, bf16: bool) -> list[int]:
    """The bytes by formula. Stages 0 and 2 reduce, or add shards up, in fp32."""
    recipe = "megatron18" if stage in "02" else "zero16"
    if not bf16 or stage == "3":  # stage 3 has float32 shards and nothing else
        recipe = "fp32"
    memory = state_memory(Tower().size, ranks, int(stage), recipe)
    return [memory.weights, memory.gradients, memory.optimizer]


@TABLES
def zero_bytes(ranks: int = 4, bf16: bool = False) -> Table:
    """Measured bytes of a rank by stage, beside the formula's."""
    rows = []
    for stage in STAGES:
        held = runs.remembered(bytes_held, ranks, stage, bf16)[0]
        formula = sum(formula_of(stage, ranks, bf16))
        per_parameter = f"{sum(held) / Tower().size:g}"
        rows.append([stage, *map(count, (*held, sum(held), formula)), per_parameter])
    header = ["stage", *KINDS, "together", "formula", "per parameter"]
    return Table(header, rows, "lrrrrrr")


@FIGURES
def zero_picture(ranks: int = 4) -> str:
    """Measured bytes of a rank by stage, with 16-bit weights."""
    bars = {
        f"stage {stage}": runs.remembered(bytes_held, ranks, stage, True)[0]
        for stage in STAGES
    }
    title = f"Model state of one of {ranks} ranks, by stage"
    return stacked(bars, KINDS, title, lambda part, _: bytes_(part))


@FIGURES
def model_parameters() -> str:
    """Shares of the parameters of published models: a bar for each."""
    bars = {}
    for model in MODELS:
        shape = ModelShape.preset(model)
        layers = shape.num_hidden_layers
        mlp = 3 * shape.hidden_size * shape.intermediate_size
        attention = shape.layer_parameters - mlp - 2 * shape.hidden_size
        rest = shape.parameters - layers * shape.layer_parameters
        bars[model] = [layers * attention, layers * mlp, rest]
    names = ("attention", "SwiGLU", "embedding, head")
    title = "Where a model's parameters lie"
    return stacked(
        bars, names, title, lambda part, of: f"{100 * part / of:.0f} %", True
    )
