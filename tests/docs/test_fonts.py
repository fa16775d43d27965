"""Web fonts: cut from packages; without a package the text falls back."""

import shutil

import pytest

from xtrain_docs import fonts


def test_a_face_is_cut_to_its_letters(tmp_path):
    face = next(f for f in fonts.FACES if f.family == "xt-text")
    source = fonts.font_file(face)
    if source is None:
        pytest.skip(f"{face.package} is not installed")
    target = tmp_path / "a.woff2"
    fonts.make(face, source, target)
    assert target.read_bytes()[:4] == b"wOF2"
    assert target.stat().st_size < source.stat().st_size / 3


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
