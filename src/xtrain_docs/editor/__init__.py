"""The editor of the drills: CodeMirror 6, from npm at build, each package pinned.

    npm pack -> build/editor/ -> codemirror.mjs and what it imports, joined and
    made small by esbuild -> assets/editor/

Nothing of it is in the repository. Where the npm client or a package cannot be had the
build prints why, and drills are written in a plain text field; with XTRAIN_RELEASE=1
the build stops instead.
"""

import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

from .. import config, npm
from ..generated import digest

PINS = """
    @codemirror/commands 6.11.1
        O/4hG3SC1YwcmQ0d2UVNDs+AsaNWd1iHVxbTeEBuqH+6
        bExAiPK3iS/BvpY6rZGURALv4ZD3sIgcCmRvw3ehBg==
    @codemirror/language 6.13.1
        zfvU2r3TyylQLMj/te+5CnQ0rSqZi8B1oTCBbQkagcLW
        4Xc6imab6qN+pEJhsuNOLaJqiRyBXp9UhWA1DhVvDw==
    @codemirror/state 6.7.6
        kAz+AncRtKuIknedxT1bq4XwXv4UowhbkHU1myPrtVb/
        jZtImWuV5BXzv5vK6i3kYACsdiZiQKFQQ5Mq7elW8w==
    @codemirror/streamparser 6.0.0
        JTFPF6xrfjt0mnfGPgzcLiMwYmvIyNaoizp8BYzv8FE8
        KrT6GBGDZ190rtt+O7Wke3gG/MFHyiY9YGNeimof4w==
    @codemirror/view 6.43.15
        HHsfpqFeHyXLs983pSRe38Xajs0vFWZQ2BuX0m7Ki8w3
        jZ5iD8cuR3lBz2/5/X53Dhf32SBHKh6rtSTB6tKeGw==
    @lezer/common 1.5.5
        Pw7PVCndruF1pb3ebCxpSVpkMHSDjwRCLcTRw+RizUKc
        o5QbWylwq2g4lnG/RYN7yTTQDXE9F77MwtkAyphrjg==
    @lezer/highlight 1.2.5
        O1GMVKgtf5YspFaRzpmqkVgMtIk2HG9uMAbH6wdAIdNh
        3TVzCsch/+cRi+6l2//UGDKe6NB9BW3cvuR5ezMQ0w==
    @lezer/lr 1.4.12
        On9HU4oMMiHPMkQDgoTnGahjgG5n/MkN38CgG77sMraK
        LL+3JBbeQNi1FcCXV9QRqwF9/BUXP3caHyJC1fBOTQ==
    @lezer/python 1.1.19
        MhQIURHRytsNzP/YXnqpYKW6la6voAH3kyplTOOiCdjy
        FY6cWWGFVmYVdHIPrElqSDf4iCDktQCockB9FxuhzQ==
    @marijn/find-cluster-break 1.0.4
        Wy0V7+SGUjnF9/TkiM1hKVDPj7jKXduPNboMVtHTA8dy
        SMURWqfg/JZ9E2Sq8JgSJmkl7k7Qe9FLeMSrSraWmQ==
    crelt 1.0.7
        aK6BbWfhf4U/wCcLHKPJl/xa6VkVstRaPywWtMKGwuOL
        c/wZTyQYuoxgvZnNsBvv7Kg3YTBQYYBCggcviQczuA==
    style-mod 4.1.5
        WQ2llCZa9sZSkJA+aOwpg5DkfbAXFKGh//t3MRTBeruF
        iSBC+GXUmbBzrw3bXyboCWAbtCW9InDfBsXrRD/rAg==
    w3c-keyname 2.2.8
        dpojBhNsCNN7T82Tm7k26A6G9ML3NkhDsnw9n/eoxSRl
        VBB4CEtIQ/KTCLI2Fwf3ataSXRhYFkQi3SlnFwPvPQ==
"""
"""What is joined: name, version, and SHA-512 as the registry states it."""
TOOL = """
    esbuild-wasm 0.28.2
        GccVwhv3mmOUVQHCQm2Ox/rby8n/EqUwvZxE6Pjfikrq
        /lWw9g9WX/u9EykWnpot3Ko6j426DgQdea2xWKIAQA==
"""
"""What joins it. It runs in node, which npm brings, and stays out of the site."""
ENTRY = Path(__file__).with_name("codemirror.mjs")
FILES = ("editor.mjs", "NOTICE.txt")
NOTICE = """\
This file joins the packages below, all under the MIT licence, from npm, unmodified but
for being joined and made small. Their pages: https://codemirror.net/

"""


class MissingEditor(ValueError):
    """A release needs the editor, and it cannot be had. Stops the build."""


def pins(text: str = PINS) -> dict[str, tuple[str, str]]:
    """Version and digest of each package."""
    words = iter(text.split())
    return {
        name: (version, first + second)
        for name, version, first, second in zip(*(words,) * 4, strict=True)
    }


def folder() -> Path:
    """Where what was made of these packages and this entry is kept."""
    made_of = PINS + TOOL + ENTRY.read_text()
    return config.BUILD / "editor" / digest(made_of.encode())


def is_whole() -> bool:
    """Are all files there?"""
    return all((folder() / file).is_file() for file in FILES)


@cache
def is_ready() -> bool:
    """Is the editor there, made now if need be? Prints why not, once."""
    without = "drills: with a plain text field as the editor"
    return is_whole() or npm.have(make, MissingEditor, "CodeMirror", without)


def make() -> None:
    """Fetch the packages, join them, keep that and the licences."""
    npm.program()
    place = folder().with_name(f"{folder().name}.new.{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    modules = place / "node_modules"
    for name, (version, integrity) in {**pins(), **pins(TOOL)}.items():
        (modules / name).mkdir(parents=True)
        archive = npm.pack(name, version, place)
        unpack(archive, modules / name, integrity)
        archive.unlink()
    shutil.copyfile(ENTRY, place / ENTRY.name)
    join(place)
    texts = [licence(modules / name, name, pins()[name][0]) for name in pins()]
    (place / "NOTICE.txt").write_text(NOTICE + "\n\n".join(texts))
    shutil.rmtree(modules)
    npm.settle(place, folder(), is_whole)


def unpack(archive: Path, place: Path, integrity: str) -> None:
    """All files of a package; ValueError if it is not the pinned one."""
    npm.require(archive, integrity)
    with tarfile.open(archive) as package:
        for member in package.getmembers():
            member.name = member.name.partition("/")[2]
        package.extractall(place, filter="data")


def join(place: Path) -> None:
    """One module of the entry and all that it imports."""
    (tool,) = pins(TOOL)
    command = [
        npm.program("node"), f"node_modules/{tool}/bin/esbuild", ENTRY.name,
        "--bundle", "--format=esm", "--minify", "--target=es2022",
        "--log-level=error", "--outfile=editor.mjs",
    ]  # fmt: skip
    subprocess.run(
        command, cwd=place, check=True, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def licence(package: Path, name: str, version: str) -> str:
    """The licence of a package under its name."""
    title = f"{name} {version}"
    text = (package / "LICENSE").read_text().strip()
    return f"{title}\n{'=' * len(title)}\n\n{text}\n"


def write(site: Path) -> None:
    """Put the editor and its notice into the built site."""
    if is_ready():
        npm.copy(folder(), FILES, site / "assets" / "editor")
