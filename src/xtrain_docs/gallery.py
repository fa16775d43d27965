"""One fold a bug: the table of a page of the gallery becomes the titles of its entries.

In the source, a page begins with a table (bug, what you see, what shows it for sure),
whose rows lead to headings of the page. On the site each of these headings, with all up
to the next heading of its level, is a fold that has the symptom as its title.
"""

from xml.etree.ElementTree import Element, SubElement

from markdown.treeprocessors import Treeprocessor

HEADINGS = ("h2", "h3")


class GalleryTreeprocessor(Treeprocessor):
    """Runs after the table of contents, which keeps the names of the bugs."""

    def run(self, root: Element) -> None:
        table = next((t for t in root.iter("table") if is_index(t)), None)
        if table is None:
            return
        rows = {target(row): row for row in table.iter("tr") if target(row)}
        root.remove(table)
        for head in [h for h in root if h.tag in HEADINGS and h.get("id") in rows]:
            fold(root, head, rows)


def is_index(table: Element) -> bool:
    """Is this the table of a gallery's page?"""
    first = table.find("thead/tr/th")
    return first is not None and first.text == "bug"


def target(row: Element) -> str | None:
    """The heading of the page that a row leads to."""
    link = row.find("td/a")
    href = "" if link is None else link.get("href", "")
    return href[1:] if href.startswith("#") else None


def fold(root: Element, head: Element, rows: dict[str | None, Element]) -> None:
    """Put a heading, and what belongs to it and to no other bug, into a fold."""
    _, seen, sure = rows[head.get("id")].findall("td")
    at = list(root).index(head)
    inside = []
    for element in list(root)[at + 1 :]:
        ends = element.tag <= head.tag or element.get("id") in rows
        if element.tag in HEADINGS and ends:
            break
        inside.append(element)
    details = Element("details", {"class": "bug"})
    summary = SubElement(details, "summary")
    name = Element("span", {"class": "xt-cause"})
    name.text, name[:], head.text = head.text, list(head), None
    for child in list(head):
        head.remove(child)
    symptom = SubElement(head, "span", {"class": "xt-symptom"})
    words = seen.text or ""
    symptom.text, symptom[:] = words[:1].upper() + words[1:], list(seen)
    head.text, symptom.tail = None, " "
    link = name.find("a[@class='headerlink']")
    head.append(name)
    if link is not None:
        name.remove(link)
        head.append(link)
    summary.append(head)
    sign = SubElement(details, "p")
    SubElement(sign, "strong").text = "A sure sign:"
    sign[0].tail, sign[1:] = f" {sure.text or ''}", list(sure)
    details.extend(inside)
    for element in (head, *inside):
        root.remove(element)
    root.insert(at, details)
