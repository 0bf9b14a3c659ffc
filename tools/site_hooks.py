"""Hooks of mkdocs: pages from files outside docs/, links to files that are not pages, pictures of
measurements and patterns, and the options of functions."""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
# The page of each file outside docs/.
PAGE_OF = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "csrc/README.md": "first-mac.md",
    "bench/NOTES.md": "notes.md",
    "bench/APPLE.md": "apple.md",
    "softmetal/README.md": "softmetal.md",
    "softmetal/docs/agx.md": "softmetal-agx.md",
    "softmetal/docs/cuda.md": "softmetal-cuda.md",
    "softmetal/docs/msl.md": "softmetal-msl.md",
}
PICTURES = ("bench/results/agx.png", "bench/results/nvidia-h200-summary.png")


def repository() -> str | None:
    """Returns the repository's URL in pyproject.toml, for links to files that are not pages. Without a URL,
    such a link becomes its text. mkdocs' `repo_url` is not set, because the theme would query GitHub from
    every page."""
    found = re.search(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "pictures/nvidia-h200.png", content=measured_picture()))
    files.append(File.generated(config, "pictures/patterns.png", content=patterns_picture()))
    for name in PICTURES:
        path = f"pictures/{posixpath.basename(name)}"
        files.append(File.generated(config, path, abs_src_path=str(ROOT / name)))
    return files


def measured_picture() -> bytes:
    """Draws all panels of the measurements."""
    from bench.backends import record
    from bench.report import pictures

    with tempfile.TemporaryDirectory() as folder:
        results = record.read(ROOT / "bench/results/nvidia-h200.json")
        return pictures.draw(results, Path(folder) / "rates", endings=(".png",))[0].read_bytes()


def patterns_picture() -> bytes:
    """Draws block masks."""
    from bench.report import pattern_picture

    with tempfile.TemporaryDirectory() as folder:
        return pattern_picture.draw(Path(folder) / "patterns").read_bytes()


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    url, name = repository(), page.file.src_uri
    text = rewritten(markdown, f"docs/{name}", url)
    return INCLUDE.sub(lambda found: included(found[1], name, url), text)


def included(name: str, page: str, url: str | None) -> str:
    """Returns the file with its links rewritten for that page."""
    return rewritten((ROOT / name).read_text(encoding="utf-8"), name, url, page)


def rewritten(markdown: str, source: str, url: str | None, page: str | None = None) -> str:
    """Rewrites the links of the file `source` for the page: to a page, a picture or the repository at
    `url`."""
    shown_in = posixpath.dirname(page or source.removeprefix("docs/"))

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return found[0]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if whole.startswith("docs/"):
            there = whole.removeprefix("docs/")
        elif whole in PAGE_OF:
            there = PAGE_OF[whole]
        elif whole in PICTURES:
            there = f"pictures/{posixpath.basename(whole)}"
        elif url:
            return f"{picture}[{text}]({url}/blob/main/{whole}{'#' + anchor if anchor else ''})"
        else:
            return text
        relative = posixpath.relpath(there, shown_in or ".")
        return f"{picture}[{text}]({relative}{'#' + anchor if anchor else ''})"

    pieces = FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else LINK.sub(link, piece) for piece in pieces)


class Options(griffe.Extension):
    """Shows functions that take `**options: Unpack[...]` as `help()` does, with every option."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(str(each.annotation).startswith("Unpack[") for each in func.parameters):
            return
        thing: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            thing = getattr(thing, name)
        func.docstring = griffe.Docstring(inspect.getdoc(thing) or "", parent=func)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    annotation=None if each.annotation is each.empty else each.annotation,
                    kind=griffe.ParameterKind(each.kind.description),
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(thing).parameters.values()
            )
        )
