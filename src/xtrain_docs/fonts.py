"""Web fonts made at build time from font packages, cut to the letters we use.

The packages are part of the docs extra and are published under the Open Font License.
Without one of them the site still builds: that text falls back to a system font.
"""

import importlib.util
import inspect
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import config
from .generated import digest

LATIN = "U+0020-007E, U+00A0-00FF, U+0131, U+0152-0153, U+2010-2027, U+2030-203A"
SIGNS = "U+2190-2199, U+21C4, U+2200-22FF, U+2212, U+00D7, U+2264-2265, U+2713, U+25B6"
MATH_FIRST = (
    "U+0020, U+0028-0039, U+003D, U+0041-005A, U+0061-007A, U+00A0, U+00B7, U+00D7, "
    "U+03A6, U+03B1-03B3, U+03B7, U+03BB, U+2003-200B, U+2026, U+2061-2064, U+210E, "
    "U+2211-2212, U+221A, U+2248, U+2308-230B, U+23DF, U+1D434-1D467, U+1D6F7, "
    "U+1D6FC-1D6FE, U+1D702, U+1D706"
)
"""What most formulas are made of; MATH is fetched only where a page shows more.

The sign of a root is no letter of a formula: the browser takes it from this face or not
at all.
"""
MATH = (
    "U+0020-007E, U+00AC, U+00B1, U+00B7, U+00D7, U+00F7, U+0391-03C9, U+03D5, "
    "U+2026, U+2032-2034, U+2061-2064, U+210E, U+2113, U+211D, U+2190-2194, U+21D2, "
    "U+2200-2209, U+220F-2213, U+2217, U+221A, U+221D-221E, U+2225-222B, U+2248, "
    "U+2254, U+2260-2265, U+226A-226B, U+2282-2287, U+2295, U+2297, U+22C5, U+22EF, "
    "U+2308-230B, U+23DE-23DF, U+27E8-27E9, U+1D400-1D467, U+1D4AA, U+1D6A4-1D6A5, "
    "U+1D6E2-1D71B"
)


@dataclass(frozen=True)
class Face:
    """One `@font-face`: which file of which package becomes which family."""

    family: str
    package: str
    file: str
    letters: str
    weight: str = "400"
    style: str = "normal"
    axes: dict[str, tuple[float, float] | float] = field(default_factory=dict)


FACES = (
    Face("xt-display", "fontpkg_bricolage_grotesque",
         "files/BricolageGrotesque[opsz,wdth,wght].ttf", LATIN, "700",
         axes={"wdth": 100, "opsz": 32, "wght": 700}),
    Face("xt-text", "fontpkg_instrument_sans",
         "files/InstrumentSans[wdth,wght].ttf", f"{LATIN}, {SIGNS}", "400 700",
         axes={"wdth": 100, "wght": (400, 700)}),
    Face("xt-text", "fontpkg_instrument_sans",
         "files/InstrumentSans-Italic[wdth,wght].ttf", LATIN, "400", "italic",
         axes={"wdth": 100, "wght": 400}),
    Face("xt-code", "fontpkg_jetbrains_mono",
         "files/JetBrainsMono[wght].ttf", f"{LATIN}, {SIGNS}", "100 800"),
    Face("xt-math", "ziamath", "fonts/STIXTwoMath-Regular.ttf", MATH),
    Face("xt-math", "ziamath", "fonts/STIXTwoMath-Regular.ttf", MATH_FIRST),
)  # fmt: skip


def font_file(face: Face) -> Path | None:
    """The font in its installed package; the package is not imported."""
    spec = importlib.util.find_spec(face.package)
    if not spec or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / face.file
    return path if path.is_file() else None


def make(face: Face, source: Path, target: Path) -> None:
    """Cut `source` to the face's letters and axes and write it as WOFF2."""
    from fontTools import subset, ttLib
    from fontTools.varLib import instancer

    font = ttLib.TTFont(source)
    if face.axes:
        font = instancer.instantiateVariableFont(font, face.axes)
    options = subset.Options(flavor="woff2", hinting=False, notdef_outline=True)
    options.layout_features = ["kern", "liga", "mark", "mkmk", "ccmp", "locl", "tnum",
                               "ssty", "dtls", "flac"]  # fmt: skip
    options.name_IDs = [*options.name_IDs, 13, 14]  # the licence and its address
    if face.family == "xt-code":
        options.layout_features.remove("liga")
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=subset.parse_unicodes(face.letters.replace("U+", "")))
    cutter.subset(font)
    target.parent.mkdir(parents=True, exist_ok=True)
    font.flavor = "woff2"
    font.save(target)


def write_fonts(folder: Path | None = None) -> int:
    """Make what is missing, write fonts.css; returns how many faces there are."""
    folder = folder or config.PAGES / "assets" / "fonts"
    rules = []
    kept = {"fonts.css"}
    for face in FACES:
        source = font_file(face)
        if source is None:
            print(f"font package {face.package} is not installed: system font instead")
            continue
        known = json.dumps(asdict(face), sort_keys=True) + inspect.getsource(make)
        known += str(source.stat().st_size)
        stamp = digest(known.encode())
        name = f"{face.family}-{face.style}-{stamp}.woff2"
        kept.add(name)
        if not (folder / name).is_file():
            make(face, source, folder / name)
        rules.append(
            f'@font-face{{font-family:"{face.family}";font-style:{face.style};'
            f"font-weight:{face.weight};font-display:optional;"
            f'src:url("{name}") format("woff2");unicode-range:{face.letters}}}'
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["/* Written by xtrain_docs.fonts. */", *rules, ""])
    css = folder / "fonts.css"
    if not css.is_file() or css.read_text() != text:
        css.write_text(text)
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    return len(rules)
