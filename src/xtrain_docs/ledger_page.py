"""Every symbol with its evidence: docs/en/verification/ledger.md, and a page a room."""

from collections import Counter

from xtrain.evidence.results import Result, function_of

from . import config, embed, evidence_links, symbols, verification
from .authored import embedded
from .excerpts import EmbedError
from .generated import head, prune, write

ABOUT = ("backend", "device", "torch", "platform")
TABLE = ("| symbol | test | cases | where | ranks |", "| --- | --- | --: | --- | --- |")


def write_ledger() -> int:
    """The overview, and a page for each room of the package with its symbols."""
    shown = {
        f"{reference.split(':')[0]}:{reference.split(':')[1].split('.')[0]}"
        for reference in embedded()
    }
    by_module: dict[str, list[verification.Summary]] = {}
    for summary in verification.ledger().summaries(*shown):
        by_module.setdefault(summary.symbol.split(":")[0], []).append(summary)
    rooms: dict[str, list[str]] = {}
    for module in by_module:
        rooms.setdefault(embed.room(module), []).append(module)
    folder = config.PAGES / "verification"
    overview = _ledger_head(by_module)
    if rooms:
        overview += [
            "| room | verified | functions and classes |",
            "| :--- | --: | --: |",
        ]
    kept = set()
    for name, modules in rooms.items():
        found = [summary for module in modules for summary in by_module[module]]
        good = sum(summary.verified for summary in found)
        overview.append(f"| [{name}](ledger/{name}.md) | {good} | {len(found)} |")
        lines = head(f"Ledger: {name}", f"Which test verifies what of {name}.", False)
        lines += [
            f"{good} of {len(found)} are verified: [all rooms](../ledger.md).",
            "",
        ]
        for module in modules:
            lines += [f"## `{module}`", "", *TABLE]
            for summary in by_module[module]:
                lines += _ledger_rows(summary)
            lines.append("")
        page = write(folder / "ledger" / f"{name}.md", "\n".join([*lines, ""]))
        kept.add(page)
    prune(folder / "ledger", kept)
    write(folder / "ledger.md", "\n".join([*overview, ""]))
    return sum(map(len, by_module.values()))


def _ledger_head(by_module: dict[str, list[verification.Summary]]) -> list[str]:
    summaries = [s for group in by_module.values() for s in group]
    lines = head("Ledger", "Which test verifies which function, where and when.", False)
    if not summaries:
        return [
            *lines,
            "No test run is recorded yet. The next one fills this page:",
            "{ .xt-empty }",
            "",
            "```console",
            f"$ {config.VERIFY_COMMAND}",
            "```",
        ]
    good = sum(s.verified for s in summaries)
    good_tests = [test for s in summaries for test in s.good]
    runs = sorted({(t.about["created"][:10], *map(t.about.get, ABOUT))
                   for t in good_tests})  # fmt: skip
    tests = len({test.id for test in good_tests})
    lines += [
        f"{good} of {len(summaries)} functions and classes are verified on their "
        f"current source, by {tests} tests.",
        "",
        "| backend | device | torch | platform | last run |",
        "| :--- | :--- | :--- | :--- | :--- |",
    ]
    places = {run[1:]: run[0] for run in runs}
    lines += [
        f"| {backend} | {device} | {torch} | {platform} | "
        f"{verification.pretty_day(day)} |"
        for (backend, device, torch, platform), day in sorted(places.items())
    ]
    return [*lines, "", *_gpu_notes()]


def _gpu_notes() -> list[str]:
    """What a record of GPUs tells of itself: shared GPUs, and tests that failed."""
    notes = []
    for about in verification.ledger().abouts:
        if sizes := about.get("shared"):
            shared = ", ".join(map(str, sizes))
            notes += [
                f"{about['platform']}: ranks of worlds of {shared} shared GPUs.",
                "",
            ]
        if failed := about.get("failed"):
            names = ", ".join(f"`{name}`" for name in failed)
            notes += [f"{about['platform']}: what these tests prove elsewhere failed "
                      f"there, and is not counted for it: {names}.", ""]  # fmt: skip
    return notes


def _ledger_rows(summary: verification.Summary) -> list[str]:
    """The rows of one symbol: what ran it, and where."""
    name = summary.symbol.split(":")[1]
    state = "verified" if summary.verified else "unverified"
    found = symbols.resolve(summary.symbol)
    place = f"{found.path}:{found.first}".removeprefix("src/")
    url = config.source_url(found.path, found.first, found.last)
    first = (
        f"`{name}`{{ #{embed.anchor(summary.symbol)} .xt-ledger-{state} }}<br>"
        f"{embed.path_in_bar(place, url)}"
    )
    runs: dict[tuple[str, str], set[int]] = {}
    failed: set[tuple[str, str]] = set()
    cases: Counter[tuple[str, str]] = Counter()
    for test in summary.current:
        if test.outcome == "skipped":
            continue
        for place, sizes in _places(test).items():
            run = function_of(test.id), place
            cases[run] += 1
            runs.setdefault(run, set()).update(sizes)
            if not test.passed:
                failed.add(run)
    if not runs:
        why = "the source has changed since" if summary.stale else "no test names it"
        return [f"| {first} | Not verified: {why}. | | | |"]
    rows = []
    for run, sizes in sorted(runs.items()):
        name, place = run
        result = " **fails**" if run in failed else ""
        ranks = ", ".join(map(str, sorted(sizes))) or "none"
        cells = f"{_test_link(name)}{result} | {cases[run]} | {place} | {ranks} |"
        rows.append(f"| {'' if rows else first} | {cells}")
    return rows


def _places(test: Result) -> dict[str, set[int]]:
    """Where a test ran the symbol, and with how many ranks there."""
    places: dict[str, set[int]] = {}
    for backend, size in test.places:
        places.setdefault(f"{backend} on {test.about['device']}", set()).add(size)
    return places or {"in its own process": set()}


def _test_link(test: str) -> str:
    path, _, name = test.partition("::")
    name = name.split("::")[-1]
    try:
        url = evidence_links.evidence_place("test", f"{path}::{name}").url
    except EmbedError:
        url = ""
    return f"[`{test}`]({url})" if url else f"`{test}`"
