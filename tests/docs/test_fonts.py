"""Web fonts: cut from packages; without a package the text falls back."""

import re
import shutil

import pytest
from fontTools import ttLib

from xtrain_docs import fonts, licences


def test_a_face_is_cut_to_its_letters(tmp_path):
    face = next(f for f in fonts.FACES if f.family == "xt-text")
    source = fonts.font_file(face)
    if source is None:
        pytest.skip(f"{face.package} is not installed")
    target = tmp_path / "a.woff2"
    fonts.make(face, source, target)
    assert target.read_bytes()[:4] == b"wOF2"
    assert target.stat().st_size < source.stat().st_size / 3
    names = ttLib.TTFont(target)["name"]
    assert "Instrument Sans Project" in names.getDebugName(0)
    assert "SIL Open Font License" in names.getDebugName(13)
    assert names.getDebugName(14).startswith("https://")


def test_roots_have_their_sign_in_the_face_that_formulas_begin_with(tmp_path):
    """A browser draws it from the first face, in several heights."""
    face = next(f for f in fonts.FACES if f.letters == fonts.MATH_FIRST)
    source = fonts.font_file(face)
    if source is None:
        pytest.skip(f"{face.package} is not installed")
    fonts.make(face, source, tmp_path / "math.woff2")
    font = ttLib.TTFont(tmp_path / "math.woff2")
    radical = font.getBestCmap()[0x221A]
    assert radical in font["MATH"].table.MathVariants.VertGlyphCoverage.glyphs


def test_the_site_ships_the_licences_of_its_fonts_and_its_theme(tmp_path):
    licences.write_licences(tmp_path)
    text = (tmp_path / "assets" / "LICENSES.txt").read_text()
    for project in ("Bricolage Grotesque", "Instrument Sans", "JetBrains Mono", "STIX"):
        assert re.search(rf"Copyright \d.*The {project}.* Authors", text), project
    assert text.count("SIL OPEN FONT LICENSE Version 1.1") == 1
    assert "TERMINATION\nThis license becomes null and void" in text, "the whole of it"
    assert "Martin Donath" in text
    assert "Permission is hereby granted, free of charge" in text
    assert "Pictogrammers" in text


def test_without_packages_there_is_an_empty_style_sheet(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fonts, "font_file", lambda face: None)
    assert fonts.write_fonts(tmp_path) == 0
    assert "@font-face" not in (tmp_path / "fonts.css").read_text()
    assert "system font" in capsys.readouterr().out


def test_fonts_are_made_once_and_old_ones_go_away(tmp_path, monkeypatch):
    made = []
    (tmp_path / "xt-old.woff2").write_text("")
    source = tmp_path.parent / "font.ttf"
    source.write_text("x")
    monkeypatch.setattr(fonts, "font_file", lambda face: source)

    def make(face, source, target):
        made.append(face)
        shutil.copy(source, target)

    monkeypatch.setattr(fonts, "make", make)
    assert fonts.write_fonts(tmp_path) == len(fonts.FACES)
    assert fonts.write_fonts(tmp_path) == len(fonts.FACES)
    assert made == list(fonts.FACES)
    assert not (tmp_path / "xt-old.woff2").exists()
    css = (tmp_path / "fonts.css").read_text()
    assert css.count("@font-face") == len(fonts.FACES)
    assert "http" not in css
