"""Long blocks of code, folded to the lines that carry the idea.

A block of more than LONG lines shows about SHOWN of them: what the page highlights or
hangs a note on, and else the lines with most messages, loops and calls of ours, below
the `def` they belong to. The others are there, hidden by the style sheet, which needs
no script: a checkbox below the block opens it. The copy button takes all lines.
"""

import re
from html import unescape

LONG, SHOWN, GAP = 14, 10, 2

BLOCK = re.compile(
    r'(?P<open><div class="language-(?P<language>[\w-]+) highlight">)<pre'
    r"(?P<body>><span></span><code>)(?P<code>.*?)(?P<close></code></pre>)(?P<end></div>)?",
    re.DOTALL,
)
TAG = re.compile(r"<[^>]+>")
LINE = re.compile(r"[^\n]*\n(?:</span>)?|[^\n]+\Z")  # a marked line ends in its span
EDGE = re.compile(r"<details\b|</details>")
DEF = re.compile(r"(async )?(def|class) ")
SAYS = re.compile(
    r"\b(dist|funcol)\.(?!get_|init_|destroy_|barrier|is_)|\.(wait|backward|send|recv|step)\("
    r"|\b(all_|reduce|scatter|gather|broadcast|issue|pass_on|exchange|merge)"
)
SETUP = re.compile(
    r"init_process_group|destroy_process_group|set_device|set_default_device"
    r"|manual_seed|LOCAL_|accelerator|get_rank|barrier\(|^(return|pass|else:|try:)$"
)
HEADER = re.compile(r"(from |import |#|\"\"\"|@)")
BOX = '<input type="checkbox" class="xt-fold" id="fold-{0}">'
LABEL = (
    '<label for="fold-{0}"><span>All {1} lines</span><span>Fewer lines</span></label>'
)
MARKED = ('class="hll"', 'class="xt-note"')


def with_lines(page: str, *, fold: bool = True) -> str:
    """The page with the number of lines of each block, and long ones folded.

    A block inside of a fold of the page is opened by that fold alone.
    """
    depth = at = number = 0

    def replace(block: re.Match[str]) -> str:
        nonlocal depth, at, number
        for edge in EDGE.finditer(page, at, block.start()):
            depth += 1 if edge[0].startswith("<d") else -1
        at = block.start()
        lines = LINE.findall(block["code"])
        shown = range(len(lines))
        if fold and not depth and block["end"] and len(lines) > LONG:
            shown = essential(lines, block["language"])
        code, cuts = folded(lines, set(shown))
        style = f'<pre style="--xt-lines: {len(shown) + cuts}"'
        number += bool(cuts)
        return "".join(
            (
                block["open"],
                BOX.format(number) if cuts else "",
                style,
                block["body"],
                code,
                block["close"],
                LABEL.format(number, len(lines)) if cuts else "",
                block["end"] or "",
            )
        )

    return BLOCK.sub(replace, page)


def essential(lines: list[str], language: str) -> list[int]:
    """The indices of the lines that a folded block shows."""
    texts = [unescape(TAG.sub("", line)).rstrip() for line in lines]
    marked = [i for i, line in enumerate(lines) if any(m in line for m in MARKED)]
    if language != "py":
        found = set(range(SHOWN)) | set(marked)
    else:
        worth = worths(texts)
        for i in marked:
            worth[i] += 100
        window = SHOWN - 1

        def score(begin: int) -> tuple[int, int]:
            return sum(worth[begin : begin + window]), -begin

        begins = [i for i in range(max(len(lines) - window, 0) + 1) if texts[i].strip()]
        begin = max(begins, key=score)
        found = {*range(begin, begin + window), *marked}
        found |= {head for i in [begin, *marked] for head in heads(texts, i)}
    return closed(sorted(i for i in found if i < len(lines)), len(lines))


def worths(texts: list[str]) -> list[int]:
    """How much each line of Python says: messages and loops most, set-up least."""
    used = names_of_ours(texts)
    ours = re.compile(rf"\b({'|'.join(used)})\b") if used else None
    worth: list[int] = []
    loops: list[int] = []
    quoted = signature = False
    depth, header = 0, True
    for text in texts:
        line, indent = text.strip(), len(text) - len(text.lstrip())
        quotes = line.count('"""')
        opened = depth
        if not quoted and not quotes:
            code = line.split("#")[0]
            depth += sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))
        if quoted or quotes:
            worth.append(-1)
            quoted ^= quotes % 2 == 1
            continue
        if header and (opened or not line or HEADER.match(line)):
            worth.append(-2 if line else 0)
            continue
        signature = bool(DEF.match(line)) or (signature and opened > 0)
        header = False
        if line and not opened:
            loops = [loop for loop in loops if loop < indent]
        value = 0
        if line and not signature:
            value = 1 + bool(loops)
            if SAYS.search(line) or (ours and ours.search(line)):
                value += 3
            if SETUP.search(line):
                value = -1
        worth.append(value)
        if re.match(r"(for|while|with) ", line):
            loops.append(indent)
    return worth


def names_of_ours(texts: list[str]) -> list[str]:
    """What a program imports from the package."""
    code = "\n".join(texts)
    found = re.findall(r"^from xtrain[\w.]* import (\([^)]*\)|.*)$", code, re.M)
    return re.findall(r"\w+", " ".join(found))


def heads(texts: list[str], at: int) -> list[int]:
    """The lines that open the functions and classes around a line."""
    found, depth = [], len(texts[at]) - len(texts[at].lstrip())
    for i in range(at, -1, -1):
        indent = len(texts[i]) - len(texts[i].lstrip())
        if DEF.match(texts[i].strip()) and (indent < depth or i == at):
            found.append(i)
            depth = indent
    return found


def closed(found: list[int], count: int) -> list[int]:
    """With the lines of gaps too short to fold."""
    whole: list[int] = []
    for i in (*found, count):
        last = whole[-1] if whole else -1
        if i - last - 1 <= GAP:
            whole += range(last + 1, i)
        if i < count:
            whole.append(i)
    return whole


def folded(lines: list[str], shown: set[int]) -> tuple[str, int]:
    """The code with its hidden lines in spans, and how many cuts it has."""
    parts, hidden, cuts = [], [], 0

    def cut() -> None:
        nonlocal cuts
        if hidden:
            words = f"⋯ {len(hidden)} lines"
            parts.append(
                f'<span class="xt-cut" data-words="{words}"></span>'
                f'<span class="xt-rest">{"".join(hidden)}</span>'
            )
            hidden.clear()
            cuts += 1

    for i, line in enumerate(lines):
        if i in shown:
            cut()
            parts.append(line)
        else:
            hidden.append(line)
    cut()
    return "".join(parts), cuts
