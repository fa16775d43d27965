"""The licences of what the site ships beside our own: its fonts, icons and theme.

The Open Font License and the MIT licence both want their text with every copy.
"""

import importlib.util
from importlib.metadata import distribution
from pathlib import Path

from .fonts import FACES, font_file

OFL_BEGINS = "This Font Software is licensed under the SIL Open Font License"


def font_licence() -> str:
    """Who holds the rights in each font we cut, and the licence they share."""
    from fontTools import ttLib

    sources = [source for source in map(font_file, FACES) if source]
    fonts = [ttLib.TTFont(source, lazy=True) for source in sources]
    holders = {str(font["name"].getDebugName(0)) for font in fonts}
    # The package of one font brings no licence file; the words are the same for all.
    files = [folder / "LICENSE" for source in sources for folder in source.parents[:2]]
    texts = [file.read_text() for file in files if file.is_file()]
    bodies = [text[text.index(OFL_BEGINS) :] for text in texts if OFL_BEGINS in text]
    if fonts and not bodies:
        raise ValueError("no font package brings the text of the Open Font License")
    return "\n".join([*sorted(holders), "", *bodies[:1]])


def theme_licences() -> dict[str, str]:
    """Material for MkDocs (its style sheets and scripts) and the icons it draws."""
    theme = distribution("mkdocs-material")
    found = [f for f in theme.files or [] if f.parts[1:] == ("licenses", "LICENSE")]
    spec = importlib.util.find_spec("material")
    assert spec is not None
    assert spec.origin is not None
    icons = Path(spec.origin).parent / "templates" / ".icons"
    return {
        "Material for MkDocs": found[0].read_text(),
        "Material Design icons": (icons / "material" / "LICENSE").read_text(),
    }


def write_licences(site: Path) -> None:
    """Write assets/LICENSES.txt, which the foot of every page links."""
    parts = {"Fonts (cut to the letters of these pages)": font_licence()}
    parts |= theme_licences()
    text = "\n\n".join(f"{t}\n{'=' * len(t)}\n\n{p.strip()}" for t, p in parts.items())
    (site / "assets").mkdir(parents=True, exist_ok=True)
    (site / "assets" / "LICENSES.txt").write_text(text + "\n")
