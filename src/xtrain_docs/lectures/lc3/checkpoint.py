"""The picture of a checkpoint's files."""

from ... import runs, values
from ...figures import REGISTRY
from ...svg import document, fit, text

WIDTH, EDGE = 400, 394
HOLDS = {
    ".lock": "jobs that share the folder lock this file",
    "latest": "checksum and name of the newest complete checkpoint",
    "index.json": "every tensor: shape, dtype, and where its pieces lie",
    ".safetensors": "the pieces of one rank",
}


@REGISTRY
def checkpoint_tree(ranks: int = 2) -> str:
    """The files of a saved checkpoint in their folders, with their sizes."""
    from .runs_values import folder_of_checkpoint

    return tree_chart(runs.remembered(folder_of_checkpoint, ranks)[0])


def tree_chart(files: list[tuple[str, int]]) -> str:
    """[path, bytes] of each file, sorted; every folder is named once."""
    parts, y, folder, words = [], 18.0, "", []
    for path, size in files:
        parent, _, name = path.rpartition("/")
        if parent != folder:
            x = 6 + 20 * parent.count("/")
            parts.append(text(x, y, f"{parent.rpartition('/')[2]}/", "xt-value-text"))
            folder, y = parent, y + 22
        x = 26 + 20 * parent.count("/")
        (what,) = (said for end, said in HOLDS.items() if name.endswith(end))
        parts.append(text(x, y, name, "xt-label"))
        parts.append(text(EDGE, y, values.bytes_(size), "xt-label", "end"))
        parts.append(text(x, y + 16, what, "xt-tick"))
        y += 40
        words.append(f"{path}: {what}")
    drawing = document(WIDTH, int(y - 12), parts, "The files of a checkpoint",
                       "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)
