"""Published pages load quickly: one style sheet, names with digests, nothing idle."""

import pytest

from xtrain_docs import publish
from xtrain_docs.search import worker

PAGE = """<html><head>
<link rel="stylesheet" href="{root}theme/main.css">
<link rel="stylesheet" href="{root}assets/ours.css">
</head><body><article>{body}</article>
<script defer src="{root}assets/xtrain.js"></script></body></html>
"""
FONTS = "".join(
    f'@font-face{{font-family:"{family}";font-style:{style};src:url("{name}.woff2")}}'
    for family, style, name in [
        ("xt-text", "normal", "text"), ("xt-code", "normal", "code"),
        ("xt-math", "normal", "all"), ("xt-math", "normal", "first"),
    ]
)  # fmt: skip


@pytest.fixture
def site(tmp_path):
    """Two sheets, one of which imports a third, a script, and pages at three depths."""
    for name, text in {
        "theme/main.css": "a{background:url(../img/a.png),url('data:x,1')}/* x */",
        "assets/ours.css": '/* y */ @import url("fonts/fonts.css");\nb{color:red}',
        "assets/fonts/fonts.css": FONTS,
        "assets/xtrain.js": "run()",
        "index.html": PAGE.format(root="", body="<p>words</p>"),
        "a/b/index.html": PAGE.format(
            root="../../", body="<math><code>x</code></math>"
        ),
        "404.html": PAGE.format(root="/under/en/", body="lost"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def published(site):
    publish.publish(site)
    return {
        page: (site / page).read_text()
        for page in ("index.html", "a/b/index.html", "404.html")
    }


def test_every_page_has_one_style_sheet_that_leads_to_the_same_file(site):
    pages = published(site)
    (sheet,) = site.glob("assets/site.*.css")
    for page, root in [("index.html", ""), ("a/b/index.html", "../../"),
                       ("404.html", "/under/en/")]:  # fmt: skip
        assert pages[page].count('rel="stylesheet"') == 1
        assert f'href="{root}assets/{sheet.name}"' in pages[page]
    assert not (site / "theme/main.css").exists(), "its words are in the other file"


def test_a_page_draws_the_mark_once(site):
    mark = '<svg viewBox="0 0 1 1" class="xt-mark-svg"><path d="{d}"/></svg>'
    body = mark.format(d="M0") + mark.format(d="M1") + mark.format(d="M0")
    (site / "index.html").write_text(PAGE.format(root="", body=body))
    page = published(site)["index.html"]
    assert page.count('d="M0"') == page.count('id="xt-mark"') == 1
    assert page.count('<use href="#xt-mark"/></svg>') == 1
    assert '<path d="M1"/></svg>' in page, "another drawing stays"


def test_of_the_styles_of_a_notebook_those_of_widgets_go(site):
    kept = ".jp-Cell,.bp3-menu{a:b}@media print{.x{c:d}.y .cell{e:f}}"
    gone = ".jp .bp3-menu:hover,.lm-Widget{g:h}.cm-editor{i:j}"
    style = kept.replace("}}", "}" + gone + "}")
    head = f"<style>{style}{' ' * publish.LONG}</style></head>"
    path = site / "a/b/index.html"
    path.write_text(path.read_text().replace("</head>", head))
    published(site)
    sheets = [path.read_text() for path in site.glob("assets/site.*.css")]
    assert any(kept in text for text in sheets)
    assert not any("bp3-menu:hover" in text or "i:j" in text for text in sheets)


def test_addresses_in_a_joined_sheet_lead_where_they_led(site):
    published(site)
    text = next(site.glob("assets/site.*.css")).read_text()
    assert "url(../img/a.png)" in text
    assert "url('data:x,1')" in text
    assert 'url("fonts/text.woff2")' in text
    assert "@import" not in text
    assert text.index("background") < text.index("@font-face") < text.index("color:red")


def test_a_page_asks_at_once_for_the_fonts_that_it_shows(site):
    pages = published(site)
    assert (
        'rel="preload" href="assets/fonts/text.woff2" as="font"' in pages["index.html"]
    )
    assert "code.woff2" not in pages["index.html"]
    deep = pages["a/b/index.html"]
    assert 'href="../../assets/fonts/code.woff2"' in deep
    assert 'href="../../assets/fonts/first.woff2"' in deep, "the last of a name wins"
    assert "all.woff2" not in deep


def test_another_content_has_another_name(site):
    before = published(site)["index.html"]
    (script,) = site.glob("assets/xtrain.*.js")
    assert f'src="assets/{script.name}"' in before
    (site / "assets/xtrain.js").write_text("run(again)")
    publish.publish(site)
    assert len(list(site.glob("assets/xtrain.*.js"))) == 2


def test_a_missing_sheet_stops_the_build(site):
    (site / "assets/ours.css").unlink()
    with pytest.raises(publish.PublishError, match=r"assets/ours\.css"):
        publish.publish(site)


def test_what_no_page_asks_for_goes(site):
    lunr, script = "assets/javascripts/lunr/tinyseg.js", "assets/javascripts/b.min.js"
    for name in (lunr, f"{script}.map"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("{}")
    (site / script).write_text("run()\n//# sourceMappingURL=b.min.js.map\n")
    published(site)
    assert not list(site.rglob("*.map"))
    assert not (site / lunr).exists()
    assert (site / script).read_text() == "run()\n"


def test_long_styles_of_a_page_are_shared_by_pages(site):
    style = f"<style>.own{{}}</style><style>.jp{{--long:{'x' * 60000}}}</style>"
    for name in ("index.html", "a/b/index.html"):
        root = "../../" if name[0] == "a" else ""
        (site / name).write_text(PAGE.format(root=root, body=style))
    pages = published(site)
    sheets = {sheet.name: sheet.read_text() for sheet in site.glob("assets/*.css")}
    (shared,) = [name for name, text in sheets.items() if ".jp{" in text]
    assert sheets[shared].index("background") < sheets[shared].index(".jp{")
    for name in ("index.html", "a/b/index.html"):
        assert f'assets/{shared}"' in pages[name]
        assert ".jp" not in pages[name]
        assert "<style>.own{}</style>" in pages[name]
    assert shared not in pages["404.html"]


def test_marks_that_no_style_colours_go(site):
    code = '<span class="n">x</span><span class="w"> </span><span class="k">if</span>'
    (site / "index.html").write_text(PAGE.format(root="", body=code))
    assert 'x <span class="k">if</span>' in published(site)["index.html"]


def test_the_search_has_a_worker_of_our_own(site):
    theirs = "assets/javascripts/workers/search.a7633da7.min.js"
    parts = {f"assets/search/{name}": f"// {name}\n" for name in worker.PARTS}
    for name, text in {theirs: "theirs()", **parts}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    config = f'<script id="__config">{{"search": "{theirs}"}}</script>'
    (site / "index.html").write_text(PAGE.format(root="", body=config))
    page = published(site)["index.html"]
    (ours,) = site.glob("assets/search.*.js")
    assert f'"search": "assets/{ours.name}"' in page
    assert ours.read_text().split("\n")[0::2] == [f"// {n}" for n in worker.PARTS]
    assert not (site / theirs).exists()


def test_blank_lines_go_around_the_article_and_stay_in_it(site):
    page = PAGE.format(root="", body="<pre>a\n\nb</pre>").replace(
        "<body>", "\n \n<body>"
    )
    (site / "index.html").write_text(page)
    page = published(site)["index.html"]
    assert "<pre>a\n\nb</pre>" in page
    assert "\n\n" not in page.replace("a\n\nb", "")
    assert "</head>\n<body>" in page


def test_a_block_of_code_says_how_many_lines_it_has(site):
    block = '<div class="language-py highlight"><pre><span></span><code>{}</code></pre>'
    body = block.format("a\n<b>b\n\n</b>c\n") + block.format("one") + "<pre>no</pre>"
    (site / "index.html").write_text(PAGE.format(root="", body=body))
    page = published(site)["index.html"]
    assert '<pre style="--xt-lines: 4"><span></span><code>a\n' in page
    assert '<pre style="--xt-lines: 1"><span></span><code>one<' in page
    assert "<pre>no</pre>" in page


def test_a_download_is_a_file_beside_the_pages(site):
    link = '<a download="x.py" href="data:text/x-python;base64,cHJpbnQoMSkK">x</a>'
    for name, root in [("index.html", ""), ("a/b/index.html", "../../")]:
        (site / name).write_text(PAGE.format(root=root, body=link))
    pages = published(site)
    (file,) = site.glob("assets/files/*.py")
    assert file.read_text() == "print(1)\n"
    assert f'href="assets/files/{file.name}"' in pages["index.html"]
    assert f'href="../../assets/files/{file.name}"' in pages["a/b/index.html"]


def test_a_style_stands_once_and_tips_that_say_nothing_go(site):
    head = '<a class="headerlink" href="#x" title="Link to this section">&para;</a>'
    entry = '<a class="autorefs xt-api" title="&lt;span&gt;" href="#y">API</a>'
    other = '<a href="#z" class="headerlink" title="Link to this section">&para;</a>'
    style = "<style>.xs{}</style>"
    body = f"{style}<p>1</p>{style}{head}{entry}{other}"
    (site / "index.html").write_text(PAGE.format(root="", body=body))
    page = published(site)["index.html"]
    assert page.count(style) == 1
    assert '<a class="headerlink" href="#x" aria-label="Link to this section">' in page
    assert '<a class="autorefs xt-api" href="#y">' in page
    assert '<a href="#z" class="headerlink" aria-label="Link to this' in page


def test_a_path_may_break_where_a_word_ends(site):
    body = '<code class="xt-path">xtrain/ring_pass.py</code>'
    (site / "index.html").write_text(PAGE.format(root="", body=body))
    assert "xtrain/<wbr>ring_<wbr>pass.py" in published(site)["index.html"]
