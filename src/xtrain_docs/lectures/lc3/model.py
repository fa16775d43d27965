"""The picture of where a model's parameters lie."""

from ...figures import REGISTRY
from ...svg import document, fit, rect, swatches, text

WIDTH, LEFT, EDGE = 400, 104, 394
MODELS = ("llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")
NAMES = ("attention", "SwiGLU", "embedding, head")


@REGISTRY
def model_parameters() -> str:
    """Where the parameters of published models lie, in percent: a bar for each."""
    parts, _ = swatches(NAMES, y=4, apart=46, opacity=0.4, radius=2)
    y, words = 30.0, []
    for model in MODELS:
        sizes, whole = parameters_of(model)
        parts.append(text(6, y + 17, model, "xt-tick"))
        at, shares = float(LEFT), []
        for index, size in enumerate(sizes):
            wide = (EDGE - LEFT) * size / sum(sizes)
            share = f"{100 * size / whole:.0f} %"
            shares.append(f"{share} {NAMES[index]}")
            parts.append(rect(at, y, wide - 1, 26, index, opacity=0.4, radius=2))
            if wide > 32:
                parts.append(text(at + wide / 2, y + 17, share, "xt-label", "middle"))
            at += wide
        words.append(f"{model}: {', '.join(shares)}")
        y += 34
    title = "Where a model's parameters lie"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def parameters_of(model: str) -> tuple[list[int], int]:
    """Of each of NAMES, without norms; and of the whole model."""
    from xtrain.plan import ModelShape

    shape = ModelShape.preset(model)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    layers = shape.num_hidden_layers
    norms = 2 * shape.hidden_size
    sizes = [layers * (shape.layer_parameters - mlp - norms), layers * mlp]
    sizes.append(shape.parameters - sum(sizes) - layers * norms)
    return sizes, shape.parameters
