"""Links from pages of the site to pages that are kept in the repository alone (`exclude_docs` in mkdocs.yml).

Where the site knows its repository they lead there. Where it does not, the link becomes text with the file's path.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+\.md)(#[^)]*)?\)")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Called by mkdocs once: pages can be edited where their repository is known.

    Args:
        config: of the site.
    """
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for every page.

    Args:
        markdown: the text of the page.
        page: which page it is.
        config: of the site.
        files: all files of the site.
    """

    def leave_the_site(link: re.Match[str]) -> str:
        text, target, place = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target))
        if not config.exclude_docs.match_file(path):
            return link[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/docs/{path}{place})"
        return f"{text} (`docs/{path}` in the repository)"

    parts = CODE.split(markdown)
    return "".join(p if i % 2 else LINK.sub(leave_the_site, p) for i, p in enumerate(parts))
