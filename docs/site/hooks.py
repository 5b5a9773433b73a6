"""What the site adds to the pages in docs/: the README as home, pictures and examples, and tables made from the code.

Invariant: sources link to each other as they lie in the repository, so every link works there and on the site. A page's
``<!-- reference: name -->`` is followed by what the function of that name in ``reference.py`` returns now.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ADDED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages that lie outside of docs/, and where on the site they are."""
FILES = ("diagrams/*.svg", "diagrams/*.png", "configs/*/*.yaml", "configs/*/*.jsonl", "configs/*/*.jinja")
"""What pages show or link to, besides pages."""
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
SOURCE = re.compile(r'(?<=src=")[^":]+|(?<=srcset=")[^":]+')


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/site/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages that the navigation does not name at its end, so that a new page is never lost."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    docs = Path(config.docs_dir)
    further = sorted({path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - named)
    config.nav = [*(config.nav or []), *([{"Further": further}] if further else [])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie outside of docs/."""
    for source, target in ADDED.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables, and let links lead to where things are on the site."""
    place = page.file.src_uri
    source = next((name for name, target in ADDED.items() if target == place), f"docs/{place}")
    markdown = _reference().filled(markdown, on_site=True)

    def link(found: re.Match[str]) -> str:
        target = moved(found["target"], source, place)
        on_site = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if files.get_file_from_path(on_site) is None and not found["target"].endswith(".md"):
            return found["text"].strip("![]")  # a file of the repository that is not on the site
        return f"{found['text']}({target}{found['anchor'] or ''})"

    markdown = LINK.sub(link, markdown)
    return SOURCE.sub(lambda found: moved(found[0], source, place), markdown)


def moved(link: str, source: str, place: str) -> str:
    """Return a relative link of the repository's file ``source`` as it must be on the page ``place``."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    on_site = ADDED.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(on_site, posixpath.dirname(place) or ".")
