"""The site builds without a warning and fetches nothing; links of every document lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documents import DOCUMENTS, PYTHONPATH, ROOT, broken_links

pytestmark = pytest.mark.host_only


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    assert not broken_links(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("[x](README.md)", False),
        ("[x](READ.md)", True),
        ("[x](README.md#what-is-built)", False),
        ("[x](README.md#what-is-not-built)", True),
        ("[x](#a-heading)", False),
        ("[x](#another-heading)", True),
        ("![x](bench/results/agx.png)", False),
        ("![x](bench/results/agnus.png)", True),
        ("[x](https://example.com/no)", False),
        ("`[x](READ.md)`", False),
        ("```text\n[x](READ.md)\n```", False),
    ],
)
def test_a_broken_link_is_noticed(link: str, broken: bool) -> None:
    assert bool(broken_links(ROOT / "page.md", f"# A `heading`\n\n{link}\n")) == broken


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The hooks need the package, not a device."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        [*command, "--config-file", str(source / "mkdocs.yml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the documentation's tools: pip install 'torch-fattn[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in ("index.html", "options.html", "api/operators.html", "softmetal.html"):
        assert (site / page).is_file(), page
    assert (site / "pictures/nvidia-h200.png").read_bytes().startswith(b"\x89PNG")
    operators = (site / "api/operators.html").read_text()
    assert "::: torch_fattn" not in operators
    assert "Keys outside the windows" in operators and "Unpack" not in operators
    signatures = re.findall(r"doc-signature.*?<pre>(.*?)</pre>", operators, re.DOTALL)
    lines = [re.sub(r"<[^>]+>", "", line) for one in signatures for line in one.splitlines()]
    assert lines and max(map(len, lines)) < 120, "wrapped, by a formatter of the documentation's tools"
    docs = re.search(r"^docs = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert docs and '"ruff' in docs[1]
    assert "Bases:" not in (site / "api/caches.html").read_text()
    assert "Metal compute in software" in (site / "softmetal.html").read_text()


def test_a_warning_would_be_noticed(site: Path, tmp_path: Path) -> None:
    """A small site with the same settings, right and then with a link to nowhere."""
    for name in ("tools", "docs"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "tools" / "site_hooks.py", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "bench/results", tmp_path / "bench/results")
    settings = re.sub(r"^nav:.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mkdocs.yml").write_text(settings)
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Here\n\n[there](#here)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    page.write_text("# Here\n\n[there](#there)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "#there" in done.stdout + done.stderr


FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?https?:|<link[^>]*rel=["']?(?:stylesheet|preconnect|icon)"""
    r"""[^>]*href=["']?https?:|@import\s+(?:url\()?["']?https?:"""
)


def test_pages_fetch_nothing(site: Path) -> None:
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        found = FETCHED.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(site)}: {found and found[0]}"
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.googleapis.com/css">'), "the control"
    assert not FETCHED.search('<a href="https://example.com">')


def undocumented(names: list[str]) -> set[str]:
    """The names of the package that no page of docs/ documents with `::: torch_fattn.name`."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    return set(names) - set(re.findall(r"^::: torch_fattn\.(\w+)", pages, re.MULTILINE))


def test_the_reference_has_every_public_name() -> None:
    import torch_fattn
    from tests.helpers.public_calls import public_names

    names = [*torch_fattn.__all__, *public_names()]
    assert undocumented(names) == {"__version__", "built_for_torch"}
    assert undocumented(["prefill", "postfill"]) == {"postfill"}
