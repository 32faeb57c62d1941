"""The page: sections put together into one HTML file that asks for nothing from outside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from analysis.report.markup import Html, el, join
from analysis.report.section import Section


def page(title: str, subtitle: Html, sections: Sequence[Section], footer: Html) -> str:
    """The whole document.

    The content policy allows no request at all, and no script but the one whose hash it names: markup that slipped
    through would neither load nor run anything.
    """
    script, style = asset("page.js"), asset("style.css")
    head = join(
        [
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=content_policy(script)),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", title),
            el("style", Html(style)),
        ],
        "\n",
    )
    body = join(
        [
            el("a", "Skip to the content", class_="skip", href="#content"),
            el("div", contents(sections), main(title, subtitle, sections, footer), class_="layout"),
            el("script", Html(script)),
        ],
        "\n",
    )
    return f"<!doctype html>\n{el('html', el('head', head), el('body', body), lang='en')}\n"


def contents(sections: Sequence[Section]) -> Html:
    """The list of sections."""
    links = (el("li", el("a", section.title, href=f"#{section.anchor}")) for section in sections)
    return el("nav", el("h2", "Contents", id="contents"), el("ol", *links), aria_labelledby="contents")


def main(title: str, subtitle: Html, sections: Sequence[Section], footer: Html) -> Html:
    """Heading, sections, footer."""
    return el(
        "main",
        el("header", el("h1", title), el("p", subtitle, class_="subtitle"), class_="top"),
        *map(section_html, sections),
        el("footer", footer),
        id="content",
    )


def section_html(section: Section) -> Html:
    """One section with its heading and explanation."""
    heading = f"{section.anchor}-title"
    return el(
        "section",
        el("h2", el("a", section.title, href=f"#{section.anchor}"), id=heading),
        el("p", section.explanation, class_="explanation"),
        section.html,
        id=section.anchor,
        aria_labelledby=heading,
    )


def content_policy(script: str) -> str:
    """No requests; inline styles, pictures in data addresses, and exactly this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def asset(name: str) -> str:
    """A style sheet or script of the page."""
    return resources.files("analysis.report").joinpath("assets", name).read_text(encoding="utf-8")
