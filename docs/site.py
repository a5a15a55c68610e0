"""What mkdocs does here besides building: the API reference from docstrings, and a look at what the site asks for.

`api.md` is an ordinary page with tables of names, readable as it is. On the site, what the docstrings say follows each
of its tables.
"""

import re
from html.parser import HTMLParser
from pathlib import Path

# Attributes through which a browser fetches something without being asked; a link that one clicks is none.
FETCHED = {"script": "src", "link": "href", "img": "src", "source": "src", "iframe": "src", "embed": "src"}
FETCHED |= {"video": "src", "audio": "src", "object": "data", "use": "href"}
OUTSIDE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
TABLE_OF_NAMES = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def on_page_markdown(markdown: str, page, **_) -> str:
    """The page, with the reference of the names of each table after it in api.md."""
    return with_reference(markdown) if page.file.src_uri == "api.md" else markdown


def on_post_build(config, **_) -> None:
    """Stop the build where a page would fetch something from another host."""
    from mkdocs.exceptions import PluginError

    found = outside_requests(Path(config.site_dir))
    if found:
        raise PluginError("the site asks other hosts for:\n  " + "\n  ".join(found))


def with_reference(markdown: str) -> str:
    """Markdown in which mkdocstrings' directives for its names follow every table; each begins with `| `name``."""

    def directives(table: re.Match[str]) -> str:
        names = re.findall(r"^\| `([\w.]+)` \|", table[0], re.MULTILINE)
        return table[0] + "".join(f"\n::: {name}\n" for name in names)

    return TABLE_OF_NAMES.sub(directives, markdown)


def outside_requests(site: Path) -> list[str]:
    """`file: address` of everything in the built site that a browser would fetch from another host."""
    found = []
    for path in sorted(site.rglob("*.html")):
        reader = _Reader()
        reader.feed(path.read_text())
        found += [f"{path.relative_to(site)}: {address}" for address in reader.found]
    for path in sorted(site.rglob("*.css")):
        addresses = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s;]+)", path.read_text())
        found += [f"{path.relative_to(site)}: {address}" for address in addresses if OUTSIDE.match(address)]
    return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        addresses = [values.get(FETCHED.get(tag, "")) or "", *(values.get("srcset") or "").split(",")]
        self.found += [address.strip() for address in addresses if OUTSIDE.match(address)]
        if "mermaid" in (values.get("class") or "").split():  # the theme would fetch what draws it
            self.found.append("a mermaid diagram")
