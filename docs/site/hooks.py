"""Hooks of mkdocs: the changelog is a page, links to files outside docs/ lead to the repository or are text, and
names of options stay on one line."""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)")
OPTION = re.compile(r"<code>(--[\w.: -]{1,32})</code>")


def on_files(files, config):
    """Adds changelog.md, from the root of the repository."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links to files that are not part of the site."""

    def rewrite(match: re.Match) -> str:
        text, link = match.groups()
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        if target == "CHANGELOG.md":
            return f"[{text}](changelog.md{'#' + anchor if anchor else ''})"
        if not (ROOT / target).exists():
            return match[0]  # mkdocs reports it
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target}{'#' + anchor if anchor else ''})"
        return text if target in text else f"{text} (`{target}`)"

    return LINK.sub(rewrite, markdown)


def on_page_content(html, page, config, files):
    """Marks options, which a browser would break after their hyphens."""
    return OPTION.sub(r'<code class="option">\1</code>', html)
