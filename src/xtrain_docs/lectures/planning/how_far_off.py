"""The page "How far off is it?": estimates beside published runs."""

import html
import re
from functools import lru_cache
from math import log
from statistics import median

from xtrain.plan.fit import SEED, divided, named, quantile
from xtrain.plan.runs import Run, judged, read_runs
from xtrain.plan.time_constants import FITTED

from ... import config
from ...figures import REGISTRY as FIGURES
from ...svg import Axis
from ...svg.keys import legend
from ...svg.lines import Frame
from ...svg.shapes import document, line, number, text
from ...values import VALUES, value
from .common import layout_name

VALUES["SEED"] = SEED
RUNS = config.ROOT / "docs" / "data" / "runs" / "runs.csv"
WIDTH, HEIGHT = 560, 470
GROUPED = ("accelerator", "kind", "collection")
COLLECTIONS = {
    "aut": "NeMo AutoModel, H100",
    "bsc": "BLOOM's prequel, one iteration each, A100",
    "col": "ColossalAI's README",
    "int": "InternEvo's documentation, A100",
    "kor": "Korthikanti et al., 2022, A100",
    "l3p": "Llama 3, H100",
    "m21": "Narayanan et al., 2021, A100",
    "mlm": "Megatron-LM's README",
    "mpt": "llm-foundry's benchmark, A100 and H100",
    "ndg": "NeMo 25.02 and 25.04, B200, GB200 and H100, fp8",
    "nem": "NeMo 24.07, H100, fp8",
    "nls": "NeMo, long sequences, fp8",
    "nmb": "Megatron-Bridge's summaries, H100 to GB300",
    "oth": "PaLM's appendix, TinyLlama",
    "tpr": "Google's TPU recipes",
    "ttn": "torchtitan's benchmarks, H200",
    "upb": "the Ultra-Scale Playbook's sweep, H100",
    "zoo": "the Megatron MoE zoo",
}


@lru_cache
def all_runs() -> tuple[list[Run], list[tuple[str, str]]]:
    """Those that are read, and those that are refused with the reason."""
    found, refused = read_runs(RUNS)
    return found, [(one.name, one.why) for one in refused]


@lru_cache
def parts() -> tuple[list[Run], list[Run]]:
    """Fitted, and not."""
    return divided(judged(all_runs()[0]))


@lru_cache
def off_by_name() -> dict[str, float]:
    """Estimated over measured, of each run that is judged."""
    return {run.name: run.ratio() for part in parts() for run in part}


@value
def off_count(what: str) -> int:
    """How many runs are in the file, read, judged, fitted or not."""
    found, refused = all_runs()
    fitted, others = parts()
    return {
        "file": len(found) + len(refused), "read": len(found),
        "judged": len(fitted) + len(others), "fitted": len(fitted),
        "others": len(others),
    }[what]  # fmt: skip


@value
def off_error(kind: str, share: float, part: str = "others") -> float:
    """What so large a share of the runs is within."""
    chosen = [run for run in parts()[part == "others"] if run.kind == kind]
    return quantile([abs(off_by_name()[run.name] - 1) for run in chosen], share)


@value
def off_of(kind: str, part: str = "others") -> int:
    """How many runs of a kind."""
    return sum(run.kind == kind for run in parts()[part == "others"])


@value
@lru_cache
def off_pairs(prefix: str = "", part: str = "all") -> tuple[int, int]:
    """(named right, all) of pairs of layouts of one model on one machine."""
    fitted, others = parts()
    chosen = others if part == "others" else [*fitted, *others]
    return named([run for run in chosen if run.name.startswith(prefix)])


@value
@lru_cache
def off_pairs_in_releases() -> tuple[int, int]:
    """The same of Megatron-Bridge's, each release by itself."""
    releases: dict[str, list[Run]] = {}
    for run in (run for part in parts() for run in part if run.prefix == "nmb"):
        releases.setdefault(run.source.partition("[")[2], []).append(run)
    counts = [named(runs) for runs in releases.values()]
    return sum(right for right, _ in counts), sum(count for _, count in counts)


@value
def off_grouped() -> int:
    """How many groups there are."""
    return sum(len(off_groups(by)) for by in GROUPED)


@value
def off_biased(most: float = 0.1) -> int:
    """Of these, those with a larger median bias."""
    return sum(abs(bias) > most for by in GROUPED for _, _, bias, _ in off_groups(by))


@value
@lru_cache
def off_groups(by: str) -> list[tuple[str, int, float, float]]:
    """(name, runs, bias, median error) of collections, accelerators or precisions."""
    groups: dict[str, list[float]] = {}
    for part in parts():
        for run in part:
            key = {
                "collection": COLLECTIONS[run.prefix],
                "accelerator": run.accelerator,
                "kind": f"{run.kind}, {run.precision}",
            }[by]
            groups.setdefault(key, []).append(off_by_name()[run.name])
    return [
        (name, len(found), median(found) - 1, median(abs(one - 1) for one in found))
        for name, found in sorted(groups.items())
    ]


@value
def off_worst(count: int = 10) -> list[tuple[str, str, str, float, float]]:
    """The runs that are furthest off: (name, what, link, measured, ratio)."""
    every = [run for part in parts() for run in part]
    every.sort(key=lambda run: -abs(log(off_by_name()[run.name])))
    return [
        (run.name, words_of(run), source_link(run.source), run.measured,
         off_by_name()[run.name])
        for run in every[:count]
    ]  # fmt: skip


@value
def off_refused() -> list[tuple[str, int]]:
    """Reasons for which a line is not estimated, and how many."""
    counts: dict[str, int] = {}
    for _, why in all_runs()[1]:
        words = why if "print" in why else why.split(":")[0] + ": " + why.split(": ")[1]
        counts[words] = counts.get(words, 0) + 1
    return sorted(counts.items(), key=lambda one: -one[1])


@value
def off_constants() -> list[tuple[str, float, str]]:
    """(name, value, what it is) of each constant."""
    source = (config.ROOT / "src/xtrain/plan/time_constants.py").read_text()
    found = re.findall(r'^    (\w+): float\n    """(.*?)"""', source, re.S | re.M)
    said = {name: " ".join(words.split()) for name, words in found}
    return [
        (f"`{name}`", constant, said.get(name, "").split(":")[0].rstrip("."))
        for name, constant in FITTED._asdict().items()
    ]


@value
@lru_cache
def measured_run(name: str) -> Run:
    """A run of the file."""
    return next(run for run in all_runs()[0] if run.name == name)


@value
def measured_rate(name: str) -> float:
    """Its tokens a second of one device."""
    return measured_run(name).measured


@value
def measured_layout(name: str) -> str:
    """Its layout, linked to its source."""
    run = measured_run(name)
    return f"[{layout_name(run.layout)}]({source_link(run.source)})"


@value
def measured_gains(faster: str, slower: str) -> tuple[float, float]:
    """How much faster the first was, and how much by the estimate."""
    one, two = measured_run(faster), measured_run(slower)
    found = one.measured / two.measured
    return found - 1, found * one.ratio() / two.ratio() - 1


def words_of(run: Run) -> str:
    """Model, machine and layout in words."""
    return (
        f"{run.model} on {run.layout.gpus} {run.accelerator}, "
        f"{layout_name(run.layout)}, {run.precision}"
    )


def source_link(source: str) -> str:
    """The address of a source: a file at its commit, a paper or a page."""
    paper = re.match(r"arXiv (\d+\.\d+)", source)
    if paper:
        return f"https://arxiv.org/abs/{paper[1]}"
    page = re.match(r"docs\.nvidia\.com/\S+", source)
    if page:
        return f"https://{page[0]}"
    found = re.match(r"([\w.-]+/[\w.-]+) (\S+?)@([\w.]+)(?: line (\d+))?", source)
    if found is None:
        raise ValueError(f"source {source!r} names no repository, file and commit")
    repository, path, commit, at = found.groups()
    anchor = f"#L{at}" if at else ""
    return f"https://github.com/{repository}/blob/{commit}/{path}{anchor}"


@FIGURES
def off_plot() -> str:
    """Estimated against measured share of the peak; each point leads to its source."""
    title = "Estimated and measured causal MFU of published runs"
    names = ["dense, fitted", "dense", "experts, fitted", "experts"]
    keys, rows = legend(names, WIDTH)
    axis = Axis("", "linear", lambda share: f"{share:.0f} %", low=0.0, high=120.0)
    left, top, bottom = 60.0, 40.0 + 20 * rows, 52.0
    ends = (0.0, 120.0)
    frame = Frame(axis, axis, ends, ends, left, top, WIDTH - left - 18,
                  HEIGHT - top - bottom)  # fmt: skip
    drawn = [f"<title>{html.escape(title)}</title>", *keys, *frame.axes()]
    drawn.append(text(frame.right, HEIGHT - 8, "measured", "xt-label", "end"))
    drawn.append(text(8, top - 18, "estimated", "xt-label"))
    drawn.append(
        line(frame.px(0), frame.py(0), frame.px(120), frame.py(120), "xt-mark")
    )
    for known, part in ((True, parts()[0]), (False, parts()[1])):
        for run in part:
            drawn.append(dot(frame, run, known))
    return document(WIDTH, HEIGHT, drawn, title, "Estimates of all runs.")


def dot(frame: Frame, run: Run, fitted: bool) -> str:
    """A run, which leads to its source."""
    estimate = 100 * run.estimate().causal_mfu
    measured = estimate / off_by_name()[run.name]
    colour = 2 * (run.kind == "experts") + (not fitted)
    words = f"{words_of(run)}: measured {measured:.0f} %, estimated {estimate:.0f} %"
    link = html.escape(source_link(run.source), quote=True)
    return (
        f'<a href="{link}"><circle cx="{number(frame.px(min(measured, 120)))}" '
        f'cy="{number(frame.py(min(estimate, 120)))}" r="3.5" '
        f'class="xt-dot xt-s{colour}"><title>{html.escape(words)}</title></circle></a>'
    )
