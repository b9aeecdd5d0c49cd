"""The colours of SVG and HTML, light and dark, as one style sheet.

Fills are those of Paul Tol's scheme "light", arrows of his "bright" and "high-contrast"
(https://sronpersonalpages.nl/~pault/), which colour-blind readers can distinguish. Colour is never
the only carrier of information: labels, dashes and tooltips say it too.
"""

from __future__ import annotations

from collections.abc import Mapping

_HUES = ("#77AADD", "#EE8866", "#44BB99", "#EEDD88", "#FFAABB", "#99DDFF", "#BBCC33", "#C8B4E0")
_TINTS = (0.28, 0.62, 0.0, 0.8)  # share of the background mixed in
FILLS = len(_HUES) * len(_TINTS)  # then they repeat

_ARROWS = (  # light, dark, dashes
    ("#004488", "#7FB7FF", ""),
    ("#BB2200", "#FF9A76", "7 3"),
    ("#117733", "#62D8A4", "2 2.5"),
    ("#882277", "#F09AD8", "9 3 2 3"),
    ("#7A5A00", "#F2C94C", "5 2"),
    ("#333333", "#DDDDDD", "1.5 3"),
)
AXES = len(_ARROWS)

_PAPER, _INK = ("#FFFFFF", "#15181D"), ("#1B1F24", "#E6E9ED")
_DARKER = 0.42  # share of the background mixed into fills in dark mode

# selector → property → light, dark
_RULES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    ".paper": {"fill": _PAPER},
    "text": {"fill": _INK},
    "text.dim": {"fill": ("#59626D", "#A3ADB9")},
    ".section": {"fill": ("#F7F8FA", "#1B1F26"), "stroke": ("#D5DAE0", "#343B45")},
    ".host": {"fill": ("#EEF1F5", "#232932"), "stroke": ("#8B95A1", "#77828F")},
    ".link": {"stroke": ("#A9B2BD", "#5C6672")},
    ".wrap": {"stroke": ("#7C8794", "#8792A0")},
    ".bundle": {"stroke": ("#C3CAD2", "#48515C")},
    ".chip rect": {"stroke": ("#5A6470", "#0D1014")},
    ".none": {"fill": ("#FFFFFF", "#2C333D")},
    ".grid": {"stroke": ("#8B95A1", "#4A5460")},
    ".bar": {"fill": ("#4477AA", "#77AADD")},
    ".track": {"fill": ("#E7EBF0", "#262C35")},
}

_FIXED = """\
.shoal text{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,\
sans-serif}
.shoal .id{text-anchor:middle;dominant-baseline:central;font-variant-numeric:tabular-nums}
.shoal .head{font-weight:600}
.shoal .section,.shoal .host,.shoal .grid{stroke-width:1}
.shoal .fine{stroke-width:.5}
.shoal .link{stroke-width:1.6;fill:none}
.shoal .wrap{stroke-width:1.6;stroke-dasharray:2.5 2.5;fill:none}
.shoal .bundle{stroke-width:3;fill:none;stroke-linecap:round}
.shoal .chip rect{stroke-width:.7}
.shoal .chip:hover rect{stroke-width:2.4}
.shoal .arrow path,.shoal .sample path{fill:none;stroke-width:2}
.shoal .arrow .tip,.shoal .sample .tip{stroke:none}
"""


def fill_class(index: int) -> str:
    """Return the CSS class of a group; -1: of none."""
    return "none" if index < 0 else f"g{index % FILLS}"


def axis_class(index: int) -> str:
    """Return the CSS class of an axis's arrows."""
    return f"a{index % AXES}"


def style() -> str:
    """Return the style sheet. Viewers without `prefers-color-scheme` show the light theme."""
    dashes = "".join(
        f".shoal .{axis_class(n)} path{{stroke-dasharray:{dash}}}\n"
        for n, (_, _, dash) in enumerate(_ARROWS)
        if dash
    )
    night = _rules(1)
    return f"{_FIXED}{_rules(0)}{dashes}@media (prefers-color-scheme:dark){{\n{night}}}\n"


def _rules(time: int) -> str:
    """Return all colours of the light (0) or dark (1) theme."""
    rules = [
        f".shoal {selector}{{{';'.join(f'{name}:{both[time]}' for name, both in values.items())}}}"
        for selector, values in _RULES.items()
    ]
    for index in range(FILLS):
        rules.append(f".shoal .g{index}{{fill:{_fill(index, time)}}}")
    for index, arrow in enumerate(_ARROWS):
        rules.append(f".shoal .a{index} path{{stroke:{arrow[time]}}}")
        rules.append(f".shoal g.a{index} .tip,.shoal text.a{index}{{fill:{arrow[time]}}}")
    return "\n".join(rules) + "\n"


def _fill(index: int, time: int) -> str:
    hue, tint = _HUES[index % len(_HUES)], _TINTS[index // len(_HUES)]
    if time == 0:
        return _mix(hue, _PAPER[0], tint)
    return _mix(hue, _PAPER[1], _DARKER + 0.5 * tint * (1 - _DARKER))


def _mix(one: str, other: str, share: float) -> str:
    """Return a colour mixed with a share of another."""
    parts = ((int(c[i : i + 2], 16) for c in (one, other)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in parts)
