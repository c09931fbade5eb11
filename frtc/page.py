"""Pieces of a page that needs nothing but itself: text, tables and drawings, everything from outside escaped.

No jinja2: a robot writes such pages too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --faint: #667; --line: #d4d8de; --panel: #f5f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --text: #e4e7eb; --faint: #9aa3ad; --line: #363c44; --panel: #1d2127 }
}
body { margin: 1.5rem auto; max-width: 1160px; padding: 0 1rem; background: var(--back); color: var(--text);
       font: 14px/1.45 system-ui, sans-serif }
h1 { font-size: 1.35rem; margin: 0 0 .3rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
h3 { font-size: .95rem; margin: 1rem 0 .2rem; font-weight: 600 }
p { margin: .3rem 0; color: var(--faint) }
.wide { overflow-x: auto; background: var(--panel); border: 1px solid var(--line); border-radius: 4px }
svg { display: block; color: var(--text) }
svg text { fill: currentColor; font: 11px system-ui, sans-serif; pointer-events: none }
svg .faint { fill: var(--faint) } svg .grid { stroke: var(--line) } svg .roof { stroke: currentColor; fill: none }
svg .mark { stroke: var(--panel); stroke-width: .5 } svg .mark:hover { stroke: currentColor; stroke-width: 1.5 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--faint); font-weight: 600 } .left { text-align: left }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; border-radius: 2px }
"""


def page(title: str, parts: Iterable[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n<h1>{escape(title)}</h1>\n' + (
        "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> str:
    """`left`: the columns that hold words."""
    sides = [' class="left"' if name in left else "" for name in head]
    lines = ["".join(f"<th{side}>{escape(name)}</th>" for name, side in zip(head, sides, strict=True))]
    for row in rows:
        lines.append("".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True)))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def legend(colours: Iterable[tuple[str, str]]) -> str:
    keys = (f'<span class="key" style="background:{colour}"></span>{escape(name)}' for name, colour in colours)
    return f"<p>{''.join(keys)}</p>"


def drawing(width: float, height: float, marks: Iterable[str]) -> str:
    """SVG, scrolled sideways where it is wider than the page."""
    box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="wide"><svg role="img" {box}>{"".join(marks)}</svg></div>'


def box(x: float, y: float, width: float, height: float, colour: str, about: str = "") -> str:
    """`about`: shown where the pointer rests."""
    size = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" height="{max(height, 0.2):.2f}"'
    if not about:
        return f'<rect {size} fill="{colour}"/>'
    return f'<rect class="mark" {size} fill="{colour}"><title>{escape(about)}</title></rect>'


def dot(x: float, y: float, colour: str, about: str) -> str:
    return (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity=".7">'
        f"<title>{escape(about)}</title></circle>"
    )


def words(x: float, y: float, text: str, anchor: str = "start", faint: bool = False) -> str:
    kind = ' class="faint"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def line(points: Sequence[tuple[float, float]], kind: str) -> str:
    """kind: "grid" or "roof"."""
    return f'<polyline class="{kind}" fill="none" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
