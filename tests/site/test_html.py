"""The built pages as files: links, anchors, nothing from elsewhere."""

import re

import pytest

from tests.site.conftest import SITE
from xtrain_docs import guards


def test_no_dead_link_or_anchor():
    assert guards.dead_links(SITE) == []


def test_nothing_is_loaded_from_elsewhere():
    assert guards.third_parties(SITE) == []


def test_styles_and_scripts_name_no_other_host():
    for path in [*(SITE / "en/assets").rglob("*.css"), SITE / "en/assets/xtrain.js"]:
        hosts = re.findall(r"url\(\s*[\"']?(https?:)?//", path.read_text())
        assert not hosts, path


def test_every_page_has_title_description_and_language():
    for path in (SITE / "en").rglob("*.html"):
        text = path.read_text()
        assert '<html lang="en"' in text, path
        assert re.search(r'<meta name="description" content="[^"]{20,}', text), path
        assert re.search(r"<title>[^<]+</title>", text), path


def test_no_leftovers_of_markdown_or_templates():
    for path in (SITE / "en").rglob("*.html"):
        relative = path.relative_to(SITE / "en").as_posix()
        if relative.startswith("source/"):
            continue
        text = re.sub(
            r"<(code|pre|math|script|style)\b.*?</\1>", "", path.read_text(), flags=re.S
        )
        for leftover in ("--8<--", "wzxhzdk", "{{", "}}", "{ .xt-", "```"):
            assert leftover not in text, f"{relative}: {leftover}"


@pytest.mark.parametrize("part", ["index.html", "404.html", "en/sitemap.xml"])
def test_parts_around_the_pages(part):
    assert (SITE / part).is_file()
