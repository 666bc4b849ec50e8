"""Formulas as MathML, made when the site is built: browsers draw them without a script and without a network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(?:div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</(?:div|span)>', re.DOTALL)


def mathml(match: re.Match[str]) -> str:
    """One formula that `pymdownx.arithmatex` found."""
    display = match[1] == "["
    formula = convert(html.unescape(match[2]).strip(), display="block" if display else "inline")
    return f'<div class="formula">{formula}</div>' if display else formula


def on_page_content(text: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return FORMULA.sub(mathml, text)
