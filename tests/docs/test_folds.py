"""Long blocks of code show their essential lines, and have all of them."""

import re
from html import unescape

import pytest

from xtrain_docs import folds

BLOCK = (
    '<div class="language-{} highlight"><pre><span></span><code>{}</code></pre></div>'
)
RING = '''# torchrun --nproc-per-node 4 ring.py
import torch
import torch.distributed as dist
from xtrain.comm import (
    exchange,
)


def ring(
    x,
    group=None,
):
    """Sums.

    More words.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(x.chunk(size))
    parts = [torch.empty_like(chunk) for chunk in chunks]
    for step in range(size - 1):
        send, recv = chunks[rank - step], parts[rank - step - 1]
        exchange(send, recv, group)
        chunks[rank - step - 1].add_(recv)
    return torch.cat(chunks)


print(ring(torch.ones(8)))
dist.destroy_process_group()
'''


def shown(page: str) -> list[str]:
    """What a folded block shows, a cut as its words."""
    code = re.search(r"<code>(.*?)</code>", page, re.DOTALL)[1]
    code = re.sub(r'<span class="xt-rest">.*?\n</span>', "", code, flags=re.DOTALL)
    code = re.sub(r'<span class="xt-cut" data-words="(.*?)"></span>', r"\1\n", code)
    return unescape(re.sub(r"<[^>]+>", "", code)).splitlines()


def every(page: str) -> str:
    """The text of a block, whatever is folded."""
    code = re.search(r"<code>(.*?)</code>", page, re.DOTALL)[1]
    return unescape(re.sub(r"<[^>]+>", "", code))


def test_a_long_block_shows_the_loop_and_the_signature_and_has_all_lines():
    page = folds.with_lines(BLOCK.format("py", RING))
    lines = shown(page)
    assert lines[:2] == ["⋯ 8 lines", "def ring("]
    assert "        exchange(send, recv, group)" in lines
    assert not [line for line in lines if "import" in line or "words" in line]
    assert 10 <= len(lines) <= 14
    assert f"--xt-lines: {len(lines)}" in page
    assert every(page) == RING
    assert '<input type="checkbox" class="xt-fold" id="fold-1"><pre' in page
    assert f'<label for="fold-1"><span>All {len(RING.splitlines())} lines' in page


@pytest.mark.parametrize("mark", ['<span class="hll">{}\n</span>', "{}  NOTE\n"])
def test_what_a_page_marks_is_shown(mark):
    note = '<span class="xt-note" data-n="1"></span>'
    lines = [f"x{i} = {i}\n" for i in range(40)]
    lines[33] = mark.format("x33 = 33").replace("NOTE", note)
    page = folds.with_lines(BLOCK.format("py", "".join(lines)))
    assert any("x33" in line for line in shown(page))
    assert len(shown(page)) < 15
    assert [line.strip() for line in every(page).split("\n") if line] == [
        f"x{i} = {i}" for i in range(40)
    ]
    assert page.count("<span") == page.count("</span>")


def test_output_begins_at_its_first_line():
    text = "".join(f"rank {i}\n" for i in range(40))
    page = folds.with_lines(BLOCK.format("console", text))
    assert shown(page) == [f"rank {i}" for i in range(10)] + ["⋯ 30 lines"]


@pytest.mark.parametrize("count", [1, folds.LONG])
def test_a_short_block_is_whole(count):
    text = "".join(f"f({i})\n" for i in range(count))
    page = folds.with_lines(BLOCK.format("py", text))
    assert "xt-fold" not in page
    assert f'<pre style="--xt-lines: {count}">' in page


def test_a_block_in_a_fold_of_the_page_is_opened_by_that_fold_alone():
    block = BLOCK.format("py", RING)
    page = folds.with_lines(f"<details><p>a</p>{block}</details>{block}{block}")
    first, second = page.split("</details>")
    assert "xt-fold" not in first
    assert re.findall(r'id="(fold-\d)"', second) == ["fold-1", "fold-2"]
    assert "xt-fold" not in folds.with_lines(block, fold=False)


def test_a_gap_too_short_to_fold_is_shown():
    assert folds.closed([0, 3, 7], 9) == [0, 1, 2, 3, 7, 8]
