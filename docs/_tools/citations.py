"""The citations of the papers on the site. Pandoc makes them for the journals, from the same file
paper.bib.
"""

import re
import unicodedata

ENTRY = re.compile(r"^@\w+\{(\w+),\n(.+?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{(.*)\},?$", re.MULTILINE)
ACCENT = re.compile(r"\{\\([\"'`^~])(\w)\}")
ACCENTS = {
    '"': "\N{COMBINING DIAERESIS}",
    "'": "\N{COMBINING ACUTE ACCENT}",
    "`": "\N{COMBINING GRAVE ACCENT}",
    "^": "\N{COMBINING CIRCUMFLEX ACCENT}",
    "~": "\N{COMBINING TILDE}",
}
CITATION = re.compile(r"\[(@\w+(?:; @\w+)*)\]")
CAPTION = re.compile(r"^: (?=\S)", re.MULTILINE)
FIGURE = re.compile(r"^!\[(.+)\]\((\S+)\)(?:\{[^}\n]*\})?$", re.MULTILINE)
FIRST_HEADING = re.compile(r"^#(?=#* )", re.MULTILINE)


def read_entries(bibliography):
    """Read the text of a .bib file: the fields of each entry, by its key."""
    return {
        key: dict(map(read_field, FIELD.findall(body))) for key, body in ENTRY.findall(bibliography)
    }


def read_field(field):
    """The name and the value of a field, with accents as letters and without braces."""
    name, value = field
    value = ACCENT.sub(lambda found: found[2] + ACCENTS[found[1]], value)
    value = re.sub(r"\\url\{(.+?)\}", r"<\1>", value)
    return name, unicodedata.normalize("NFC", re.sub(r"[{}]", "", value))


def family_names(entry):
    """The family names of the authors: `Holm`, `Kingma and Ba` or `Lotter et al.`."""
    names = [author.partition(",")[0] for author in entry["author"].split(" and ")]
    return f"{names[0]} et al." if len(names) > 2 else " and ".join(names)


def reference(entry):
    """An entry in the list of references, in Markdown."""
    authors = [" ".join(reversed(author.split(", "))) for author in entry["author"].split(" and ")]
    where = entry.get("journal") or entry.get("booktitle") or entry.get("publisher")
    where = " ".join(filter(None, [where, entry.get("volume")]))
    link = entry.get("url") or ("doi" in entry and f"https://doi.org/{entry['doi']}")
    parts = [
        f"{', '.join(authors)}{f' ({year})' if (year := entry.get('year')) else ''}",
        f"*{entry['title']}*",
        where,
        entry.get("howpublished"),
        entry.get("note"),
        link and f"<{link}>",
    ]
    return ". ".join(filter(None, parts))


def with_citations(text, bibliography, page):
    """Write the text of a paper, which pandoc would read, as MyST: headings one level lower, below
    the title; captions as paragraphs; citations as links to a list of references at the end.

    The names of the link targets begin with `page`, because they are shared by the whole site.
    """
    entries = read_entries(bibliography)
    cited = set()

    def link(found):
        keys = re.findall(r"\w+", found[1])
        cited.update(keys)
        words = [
            " ".join(filter(None, [family_names(entries[key]), entries[key].get("year")]))
            for key in keys
        ]
        links = [f"[{name}](#{page}-{key})" for name, key in zip(words, keys, strict=True)]
        return f"({'; '.join(links)})"

    text = CAPTION.sub("Table: ", FIGURE.sub(r"![\1](\2)\n\nFigure: \1", text))
    text = CITATION.sub(link, FIRST_HEADING.sub("##", text))
    listed = sorted((family_names(entries[key]), key) for key in cited)
    references = [f"({page}-{key})=\n{reference(entries[key])}" for _, key in listed]
    return "\n\n".join([text.rstrip(), *references, ""])
