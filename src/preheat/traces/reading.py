"""Reads traces: files and folders, of whatever known format, into arrivals in order of time.

```python
trace = read([Path("conversation.part1.jsonl.gz")])
print(trace.format, len(trace.arrivals), trace.rules)
```
"""

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

import msgspec

from preheat.errors import TraceError
from preheat.traces import FORMATS
from preheat.traces.arrival import Arrival, Trace
from preheat.traces.reader import UNSORTED_RULE, Draft, Format, Progress, Reading
from preheat.traces.rules import Rules
from preheat.traces.source import Source

_BESIDE: Final = (".md", ".rst", ".part", ".damaged")
"""Endings of files that lie beside traces in a folder, or aren't whole yet."""

_EXAMPLE: Final = (
    '{"timestamp": "2026-01-02T03:04:05Z", "request": {"model": "m", "messages": […]}, '
    '"response": {"usage": {…}}}'
)
OWN_TIMES_RULE: Final = (
    "No session is drawn (`sessions`, `open_sessions`): this trace has its own times."
)
_NOTHING_SPECIAL: Final = Rules()


def read(
    paths: Path | str | Sequence[Path | str],
    *,
    format: str | None = None,
    rules: Rules = _NOTHING_SPECIAL,
    on_bad: Literal["skip", "fail"] = "skip",
    progress: Progress | None = None,
) -> Trace:
    """One trace of all these files, and of all in these folders, merged in order of time.

    The format is recognised by content, unless it is named. A bad line is told in `Trace.bad` and
    skipped, or with `on_bad="fail"` ends it. Raises TraceError: for that, and where a file isn't
    there, is empty, or is of another or no known format.
    """
    reading = Reading(rules, on_bad, progress)
    sources = sources_of([paths] if isinstance(paths, str | Path) else paths)
    name = _format_of(sources, format)
    draft = _format(name).read(sources, reading)
    if rules.sessions == "drawn" and not reading.has_sessions:
        reading.tell(OWN_TIMES_RULE)
    if not len(draft.arrivals):
        why = (
            f"; first of {reading.skipped} bad lines: {_first_bad(reading)}" if reading.bad else ""
        )
        raise TraceError(f"{_together(sources)}: no request in it{why}")
    arrivals = _in_order(draft, reading)
    return Trace(
        name=_together(sources),
        format=name,
        arrivals=arrivals,
        block_tokens=draft.block_tokens,
        times=draft.times,
        rules=tuple(reading.told),
        bad=tuple(reading.bad),
        skipped=reading.skipped,
    )


def _in_order(draft: Draft, reading: Reading) -> Sequence[Arrival]:
    """By time; equal times keep their order. The first one of dated arrivals is second 0."""
    if draft.is_ordered:
        return draft.arrivals
    at = attrgetter("at")
    ordered = sorted(draft.arrivals, key=at)
    if draft.times == "measured" and any(
        one is not other for one, other in zip(ordered, draft.arrivals, strict=True)
    ):
        reading.tell(UNSORTED_RULE)
    if draft.is_dated and ordered[0].at:
        first = ordered[0].at
        return [msgspec.structs.replace(one, at=one.at - first) for one in ordered]
    return ordered


def sources_of(paths: Sequence[Path | str]) -> list[Source]:
    """These files, and those of these folders that may be a trace. Raises TraceError."""
    sources: list[Source] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(_inside(path))
            if not inside:
                raise TraceError(f"{path}: no trace in this folder")
            sources += [Source(one, path) for one in inside]
        elif path.is_file():
            if not path.stat().st_size:
                raise TraceError(f"{path}: the file is empty")
            sources.append(Source(path))
        elif path.exists():
            raise TraceError(
                f"{path}: it is a pipe or a device, and a trace is read twice: save it first"
            )
        else:
            raise TraceError(f"{path}: there is no such file or folder")
    if not sources:
        raise TraceError("no trace was named: give a file or a folder")
    if len(sources) > 1:
        for place, source in enumerate(sources):
            source.prefix = f"{place}-"
    return sources


def _inside(folder: Path) -> Iterator[Path]:
    """Part files at any depth, but those whose name, or whose folder's, begins with _ or a dot
    (what Spark, Hive and others write beside them), texts, and empty ones."""
    for path in _files(folder):
        parts = path.relative_to(folder).parts
        is_beside = any(part.startswith(("_", ".")) for part in parts)
        is_text = "README" in path.name or "LICENSE" in path.name or path.name.endswith(_BESIDE)
        if not is_beside and not is_text and path.is_file() and path.stat().st_size:
            yield path


def _files(folder: Path) -> Iterator[Path]:
    """All of them. Raises TraceError for a folder that can't be read: it may hold half of the trace."""

    def fail(error: OSError) -> None:
        raise TraceError(f"can't read {error.filename}: {error.strerror}")

    for found, _, names in os.walk(folder, onerror=fail):
        yield from (Path(found, name) for name in names)


def _format_of(sources: Sequence[Source], format: str | None) -> str:
    """The one format of all files. Raises TraceError."""
    if format is not None:
        if format not in FORMATS:
            raise TraceError(f"no trace format is called {format!r}; known: {_known()}")
        return format
    found: dict[str, Source] = {}
    for source in sources:
        name = _recognised(source)
        if name is None and source.head.is_broken:
            why = "it can't be unpacked: it is damaged, or not what its name says"
            raise TraceError(f"{source.path}: {why}{_beside(source, sources)}")
        if name is None:
            raise TraceError(
                f"{source.path}: {_why_unknown(source)}{_beside(source, sources)}. "
                f"A log of your own has a request a line: {_EXAMPLE}. If it is of a known format, "
                f"name it: --format openai (or {_known('openai')})"
            )
        found.setdefault(name, source)
    if len(found) > 1:
        which = " and ".join(f"{name} ({source.path})" for name, source in found.items())
        odd = list(found.values())[-1]
        raise TraceError(
            f"mixed formats: {which}; read one format at a time{_beside(odd, sources)}"
        )
    return next(iter(found))


def _recognised(source: Source) -> str | None:
    head = source.head
    return next((name for name in FORMATS if _format(name).recognises(head)), None)


def _beside(source: Source, sources: Sequence[Source]) -> str:
    """What to do where only some files of a folder are the trace."""
    if source.folder is None:
        return ""
    files = sum(one.folder == source.folder for one in sources)
    if files == 1:
        return ""
    return f" ({source.folder} has {files} files; those that are wanted can be named one by one)"


def _why_unknown(source: Source) -> str:
    if not source.head.data.strip():
        return "nothing is in it"
    if not source.head.is_text:
        return "a binary file of no format that can be told by its content"
    if source.head.data.lstrip().startswith(b"["):
        return "a JSON array, where traces have an object a line (jq -c '.[]' makes such lines)"
    if source.head.data.lstrip().startswith(b"{") and not source.head.names:
        return "no JSON object in its first lines, where traces have one a line (see jq -c .)"
    return "no known format"


def _format(name: str) -> Format:
    module, _, attribute = FORMATS[name].partition(":")
    found: Format = getattr(import_module(module), attribute)
    return found


def _known(but: str = "") -> str:
    return ", ".join(sorted(name for name in FORMATS if name != but))


def _together(sources: Sequence[Source]) -> str:
    first = sources[0].folder or sources[0].path
    more = len({source.folder or source.path for source in sources}) - 1
    return printable(f"{first} and {more} more" if more else str(first))


def printable(text: str) -> str:
    """The same where it can be shown: neither bytes that are no text nor what moves a terminal.

    >>> printable("a" + chr(0xDCFF) + chr(27) + "[2Jb")
    'a??[2Jb'
    """
    return "".join(one if one.isprintable() else "?" for one in text)


def _first_bad(reading: Reading) -> str:
    bad = reading.bad[0]
    return f"{bad.path}:{bad.line}: {bad.why}"
