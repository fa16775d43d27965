"""The page "Does the search find what was trained?": published layouts, searched."""

from functools import lru_cache
from typing import Any, NamedTuple

from xtrain.plan import (
    Assumptions,
    Estimate,
    Estimator,
    Layout,
    ModelShape,
    SearchResult,
    SearchSpace,
    search,
)
from xtrain.plan.explain import why_first

from ...values import value
from .common import layout_name
from .how_far_off import measured_run, source_link

LLAMA, DEEPSEEK = "arXiv 2407.21783 Table 4", "arXiv 2412.19437 section 3.2"
PRINTED = ("precision", "attention", "formula", "network", "tensor_overlap")


class Published(NamedTuple):
    """A layout that somebody trained with."""

    words: str
    source: str
    shape: ModelShape
    gpu: str
    sequence: int
    batch: int
    axes: dict[str, Any]
    """What was printed, data ranks with it."""
    assumed: dict[str, Any]
    space: SearchSpace = SearchSpace()

    @property
    def gpus(self) -> int:
        return Layout(**self.axes).gpus


def of_run(name: str, words: str) -> Published:
    """Of a line of the data."""
    run = measured_run(name)
    layout = run.layout
    names = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
    axes = {name: getattr(layout, name) for name in names}
    assumed = run.assumptions()
    return Published(
        words, run.source, run.shape, run.accelerator, run.sequence, layout.batch, axes,
        {name: getattr(assumed, name) for name in PRINTED},
    )  # fmt: skip


@lru_cache
def published() -> dict[str, Published]:
    """All that the page compares, by a short name."""
    llama, mixture = (
        ModelShape.preset("llama-3.1-405b"),
        ModelShape.preset("deepseek-v3"),
    )
    axes = {"tensor": 8, "pipeline": 16}
    return {
        "llama-8192": Published("Llama 3 405B, 8k", LLAMA, llama, "h100", 8192, 2048,
                                axes | {"data": 64}, {}),
        "llama-16384": Published("Llama 3 405B, 8k", LLAMA, llama, "h100", 8192, 2048,
                                 axes | {"data": 128}, {}),
        "llama-128k": Published("Llama 3 405B, 128k", LLAMA, llama, "h100", 131072, 128,
                                axes | {"context": 16, "data": 8}, {}),
        "deepseek": Published("DeepSeek-V3", DEEPSEEK, mixture, "h100", 4096, 15360,
                              {"pipeline": 16, "data": 128, "expert": 64},
                              {"precision": "fp8"}, SearchSpace(expert=(64,))),
        "mixtral": of_run("ndg-007", "Mixtral 8x7B, NeMo"),
        "mixtral-64k": of_run("ndg-008", "Mixtral 8x22B, 64k, NeMo"),
        "bloom": of_run("bsc-092", "BLOOM, 182B"),
        "gpt": of_run("m21-007", "GPT, 146B, Megatron"),
        "titan-70b": of_run("ttn-012", "Llama 3 70B, torchtitan"),
        "titan-405b": of_run("ttn-013", "Llama 3 405B, torchtitan"),
        "titan-long": of_run("ttn-017", "Llama 3 405B, 128k, torchtitan"),
        "titan-8b": of_run("ttn-010", "Llama 3 8B, 256k, torchtitan"),
    }  # fmt: skip


@lru_cache
def searched(name: str) -> SearchResult:
    """All layouts of that model, machine and batch."""
    case = published()[name]
    return search(
        case.shape, case.gpu, case.gpus, case.sequence, case.batch,
        assumptions=Assumptions(**case.assumed), space=case.space,
    )  # fmt: skip


def axes_of(layout: Layout) -> tuple[int, ...]:
    """What a publication prints of a layout."""
    return (layout.tensor, layout.context, layout.pipeline, layout.data, layout.expert)


def place_of(name: str) -> tuple[int, Estimate] | None:
    """Of the published axes among all that fit, and their fastest layout."""
    wanted = axes_of(Layout(**published()[name].axes))
    seen: list[tuple[int, ...]] = []
    for one in searched(name).found:
        axes = axes_of(one.layout)
        if axes not in seen:
            seen.append(axes)
        if axes == wanted:
            return len(seen), one
    return None


@value
@lru_cache
def layout_places() -> list[tuple[str, ...]]:
    """(run, devices, published, place, behind the first, first) of each."""
    rows: list[tuple[str, ...]] = []
    for name, case in published().items():
        result, found = searched(name), place_of(name)
        first = result.found[0]
        rows.append((
            f"[{case.words}]({source_link(case.source)})",
            f"{case.gpus} {case.gpu}",
            layout_name(Layout(**case.axes)).rsplit(" ", 1)[0],
            str(found[0]) if found else "does not fit",
            f"{found[1].seconds / first.seconds - 1:.0%}" if found else "",
            layout_words(first),
        ))  # fmt: skip
    return rows


@value
def layout_reasons(*names: str) -> list[tuple[str, str]]:
    """(run, why the search prefers its first, with the seconds) of each."""
    return [(f"{one.words}, {one.gpus} {one.gpu}", layout_why(name))
            for name, one in published().items() if name in names]  # fmt: skip


def layout_why(name: str) -> str:
    """In a sentence."""
    found, first = place_of(name), searched(name).found[0]
    if found is None:
        return f"No layout of {layout_name(Layout(**published()[name].axes))} fits."
    return why_first(first, found[1]).replace("-", "\N{NON-BREAKING HYPHEN}")


def layout_words(one: Estimate) -> str:
    """Axes, schedule and recomputation."""
    words = layout_name(one.layout)
    if one.layout.pipeline > 1 and one.layout.schedule != "one_f_one_b":
        words += f", {one.layout.schedule}"
    again = {"none": "", "selective": ", selective", "full": ", full"}
    return words + again[one.layout.recompute]


@value
def layout_as_published(name: str, **fields: Any) -> Estimate:
    """The published axes with these other fields, whether they fit or not."""
    case = published()[name]
    given: dict[str, Any] = {"zero": 1, **case.axes, **fields}
    layout = Layout(**given)
    size = case.batch // (layout.data * layout.micro_batch)
    layout = Layout(**given | {"micro_batches": size})
    assumed = Assumptions(**case.assumed)
    return Estimator(case.shape, case.gpu, case.sequence, assumed).estimate(layout)
