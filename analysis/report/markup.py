"""HTML that is escaped unless it was built here.

`el` makes an element out of its children: a child that is `Html` is taken as it is, any other text is escaped. So no
token, file name or model card can become markup, and nobody has to remember to escape.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "wbr"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def el(tag: str, *children: str, **attributes: str | int | float | bool | None) -> Html:
    """One element.

    Args:
        tag: The element's name.
        children: `Html` as it is, other text escaped.
        attributes: Values are escaped; a trailing underscore (``class_``) is dropped and other underscores become
            hyphens; True is an attribute without a value, None and False leave it out.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.removesuffix("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{html.escape(str(value))}"')
    parts.append(">")
    if tag not in VOID:
        parts += [*map(escape, children), f"</{tag}>"]
    return Html("".join(parts))


def escape(text: str) -> Html:
    """The text as markup that shows it."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def join(parts: Iterable[str], between: str = "") -> Html:
    """Several pieces after one another, each escaped unless it is markup."""
    return Html(escape(between).join(escape(part) for part in parts))


def formula(text: str) -> Html:
    """A formula in plain signs: ``W_QK`` has an index, ``W_K^T`` an exponent, braces hold longer ones together."""
    shown = escape(text)
    shown = Html(re.sub(r"_(?:\{([^}]*)\}|(\w+))", lambda m: f"<sub>{m[1] or m[2]}</sub>", shown))
    shown = Html(re.sub(r"\^(?:\{([^}]*)\}|(\w+))", lambda m: f"<sup>{m[1] or m[2]}</sup>", shown))
    return el("span", shown, class_="formula")
