"""The budget of kernel modules: `--modules check` fails if a folder of tests requests more than its record.

Compiling modules is what the suite spends most on. How many a folder needs, those in the cache included, is
the same on every machine. tests/modules.txt has a line for each folder: its modules, then each file's.
`check` allows 5 % more, at least 5 and at most 20: a few depend on which tests share a process. `record`
rewrites the lines of the folders that ran. Tests marked `rotating` are not counted.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import file_of

RECORD = Path(__file__).parent / "modules.txt"
ROTATING = "rotating"
LOG_OF_SOFTMETAL = "SOFTMETAL_REQUESTS"
FOLDER, FOLDER_OF_WORKERS = pytest.StashKey[str](), "folder_of_module_logs"


@dataclass
class Folder:
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by file

    @property
    def total(self) -> int:
        return len(set().union(*self.modules.values()))

    def line(self, name: str) -> str:
        files = sorted((file, len(modules)) for file, modules in self.modules.items() if modules)
        return " ".join([name, str(self.total), *(f"{file}={count}" for file, count in files)])


def read_logs(logs: Path) -> dict[str, Folder]:
    """A file of tests has a log with a module in each line."""
    folders: dict[str, Folder] = defaultdict(Folder)
    for log in logs.iterdir():
        *parents, file = log.name.split("+")
        if not file.endswith(ROTATING):
            modules = log.read_text().splitlines()
            folders["/".join(parents)].modules[file.removesuffix(".py")].update(modules)
    return folders


def read_record(path: Path) -> dict[str, tuple[int, dict[str, int]]]:
    record = {}
    for line in path.read_text().splitlines():
        folder, total, *files = line.split()
        counts = (file.split("=") for file in files)
        record[folder] = (int(total), {file: int(count) for file, count in counts})
    return record


def excesses(
    folders: Mapping[str, Folder], record: Mapping[str, tuple[int, dict[str, int]]]
) -> Iterator[str]:
    """A sentence for each folder that is over its budget, with the files that grew."""
    for name, folder in sorted(folders.items()):
        recorded, files = record.get(name, (0, {}))
        most = recorded + max(5, min(20, recorded // 20))
        if folder.total > most:
            grown = Counter({file: len(own) - files.get(file, 0) for file, own in folder.modules.items()})
            causes = ", ".join(f"{file} {more:+}" for file, more in grown.most_common(3) if more > 0)
            yield (
                f"{name} requests {folder.total} kernel modules, {recorded} are recorded and {most} allowed "
                f"({causes}); use shapes that other tests compile, or run --modules record and say why"
            )


class Budget:
    """Gives each file of tests a log, in every process; the first process reads them at the end."""

    def __init__(self, logs: Path, record: Path, mode: str, is_worker: bool) -> None:
        self.logs, self.record, self.mode, self.is_worker = logs, record, mode, is_worker
        self.lines: list[str] = []

    def log_of(self, node: pytest.Item | pytest.Collector) -> Path:
        name = file_of(node.nodeid).replace("/", "+") or "session"
        return self.logs / (f"{name}-{ROTATING}" if node.get_closest_marker(ROTATING) else name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:  # a file of tests may compile where it is imported
            patch.setenv(LOG_OF_SOFTMETAL, str(self.log_of(collector)))
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(LOG_OF_SOFTMETAL, str(self.log_of(item)))
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            return
        folders = read_logs(self.logs)
        record = read_record(self.record) if self.record.exists() else {}
        self.lines = [f"{folder.total:7} {name}" for name, folder in sorted(folders.items())]
        if self.mode == "record":
            kept = {line.split()[0]: line for line in self.record.read_text().splitlines()} if record else {}
            kept |= {name: folder.line(name) for name, folder in folders.items() if folder.total}
            self.record.write_text("".join(f"{line}\n" for _, line in sorted(kept.items())))
        elif found := [*excesses(folders, record)]:
            self.lines += found
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("kernel modules by folder")
        for line in self.lines:
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--modules", choices=("check", "record"), help="check or rewrite tests/modules.txt")
    parser.addoption("--modules-file", type=Path, default=RECORD, help="instead of tests/modules.txt")


def pytest_configure(config: pytest.Config) -> None:
    if mode := config.getoption("--modules"):
        worker = getattr(config, "workerinput", None)
        if worker is None:
            folder = tempfile.TemporaryDirectory(prefix="modules-")
            config.add_cleanup(folder.cleanup)
            config.stash[FOLDER] = folder.name
        logs = Path(config.stash[FOLDER] if worker is None else worker[FOLDER_OF_WORKERS])
        budget = Budget(logs, config.getoption("--modules-file"), mode, worker is not None)
        config.pluginmanager.register(budget)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of xdist where the logs are."""
    if FOLDER in node.config.stash:
        node.workerinput[FOLDER_OF_WORKERS] = node.config.stash[FOLDER]
