"""Progress bars on stderr; nothing is drawn unless it is a terminal, so logs and pipes stay clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def request_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over requests; what it yields counts one."""
    with _bar(shown, MofNCompleteColumn()) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def startup_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per long part of the start; what it yields takes (what, done, total)."""
    with _bar(True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield report


@contextmanager
def parts_bar() -> Iterator[Callable[[str, int, int, str], None]]:
    """A bar per part of a long run; what it yields takes (part, done, total, what is new)."""
    with _bar(True, MofNCompleteColumn(), TextColumn("{task.fields[news]}")) as bar:
        tasks: dict[str, TaskID] = {}

        def report(part: str, done: int, total: int, news: str) -> None:
            if part not in tasks:
                tasks[part] = bar.add_task(part, total=total, news="")
            bar.update(tasks[part], completed=done, news=news)

        yield report


def _bar(shown: bool, *extra: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *extra, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)
