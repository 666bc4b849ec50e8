"""The page a package index shows, made of README.md when the package is built; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+(?:\*[^*]+\*\n+)?", re.MULTILINE)
CONTENTS = re.compile(r"^\[[^\]]*\]\(#.*?\n\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]*)\)")


def index_page(text: str, address: str | None) -> str:
    """`text` with links into the repository at `address`; without one, their words alone, no figures, no contents."""

    def link(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        where = target if target.startswith("#") else f"/{'raw' if image else 'blob'}/HEAD/{target}"
        return f"{image}[{words}]({address}{where})" if address else words

    parts = CODE.split(text)
    for i in range(0, len(parts), 2):  # code stays as it is
        if not address:
            parts[i] = CONTENTS.sub("", FIGURE.sub("", parts[i]))
        parts[i] = LINK.sub(link, parts[i])
    return "".join(parts)


if __name__ == "__main__":
    here = Path(__file__).parent
    found = re.search(r'^Repository = "(.*?)/?"$', (here / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    page = index_page((here / "README.md").read_text("utf-8"), found and found[1])
    setup(long_description=page, long_description_content_type="text/markdown")
