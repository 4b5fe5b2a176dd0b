"""The map of the house: which room imports which, read from the source. `python tests/house.py` draws it anew."""

import ast
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gpulab"
PICTURE = PACKAGE.parent / "docs" / "house.svg"
# Imports run downwards only; a line is a floor, the lowest first. A package is one room.
FLOORS = [
    ["_lazy", "errors", "files"],
    ["report", "passports", "user_code"],
    ["numerics", "stats"],
    ["settings"],
    ["store"],
    ["models", "data", "device", "guards", "audits"],
    ["engines"],
    ["training"],
    ["saddles"],
    ["plots"],
    ["cli", "pytest_plugin"],
    ["__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_name(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports(name):
    """(the module that is imported, whether only when called) by one module, imports for types apart."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    late, types = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            late |= {id(inner) for inner in ast.walk(node)}
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            types |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for imported in names:
            while imported and imported not in FILES:
                imported = imported.rpartition(".")[0]
            if imported not in ("", "gpulab", name):
                yield imported, id(node) in late


def room(module):
    return module.split(".")[1]


ARROWS = {(name, other, late) for name in FILES if name != "gpulab" for other, late in imports(name)}


def between_rooms():
    """The arrows between rooms, without those that follow from others."""
    arrows = {(room(a), room(b)) for a, b, _ in ARROWS if room(a) != room(b)}
    return sorted(
        (one, other)
        for one, other in arrows
        if not any((one, middle) in arrows and reaches(arrows, middle, other) for middle in FLOOR if middle != other)
    )


def reaches(arrows, one, other):
    return (one, other) in arrows or any(reaches(arrows, after, other) for before, after in arrows if before == one)


def picture():
    """The map as SVG: a box a room with its files, the floors above each other, arrows for imports."""
    wide, high, gap = 1000, 76, 22
    top = len(FLOORS) * (high + gap)
    boxes = {
        name: (place * wide / len(rooms) + 12, top - (number + 1) * (high + gap) + gap / 2, wide / len(rooms) - 24)
        for number, rooms in enumerate(FLOORS)
        for place, name in enumerate(rooms)
    }
    lines = []
    for one, other in between_rooms():
        (x1, y1, w1), (x2, y2, w2) = boxes[one], boxes[other]
        start, end = (x1 + w1 / 2, y1 + high), (x2 + w2 / 2, y2 - 2)
        if y1 == y2:  # side by side
            start, end = (x1 + w1, y1 + high / 2), (x2 - 2, y2 + high / 2)
        lines.append('<line x1="{:.0f}" y1="{:.0f}" x2="{:.0f}" y2="{:.0f}"/>'.format(*start, *end))
    rooms = []
    for name, (x, y, width) in boxes.items():
        below = [module.removeprefix(f"gpulab.{name}.") for module in FILES if module.startswith(f"gpulab.{name}.")]
        rows = textwrap.wrap("  ".join(module for module in below if "." not in module), int(width / 5.4))
        rooms.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{high}" rx="6"/>')
        rooms.append(f'<text x="{x + 10:.0f}" y="{y + 19:.0f}" class="room">{name}</text>')
        for number, text in enumerate(rows):
            rooms.append(f'<text x="{x + 10:.0f}" y="{y + 34 + 12 * number:.0f}" class="file">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top}" font-family="sans-serif">'
        "<title>The rooms of gpulab. Imports run downwards; an arrow that follows from others is left out.</title>"
        "<style>rect{fill:#fff;stroke:#222}line{stroke:#0072B2;stroke-width:1.4;marker-end:url(#tip)}"
        ".room{font-size:15px;font-weight:bold;fill:#222}.file{font-size:10.5px;fill:#555}</style>"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0L8,4L0,8z" fill="#0072B2"/></marker></defs>'
        f'<rect width="{wide}" height="{top}" style="stroke:none"/>{"".join(lines)}{"".join(rooms)}</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE)
