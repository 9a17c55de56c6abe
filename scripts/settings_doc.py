"""Writes docs/settings.md from the settings themselves.

python scripts/settings_doc.py            write it
python scripts/settings_doc.py --check    exit 1 if it isn't what would be written
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from preheat.config import NAMED, Choice, Settings, fields_of
from preheat.host.changes import applied_by

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

HEAD = """\
# Settings

Written by `python scripts/settings_doc.py` from `src/preheat/config/tree.py`: change it there.

Settings are TOML: `preheat serve --config preheat.toml`. `preheat config` prints all of them, as a file to begin with, and
`preheat config check FILE` says what is wrong with one. What isn't set has the default below. An unknown key, a wrong type or
an impossible value ends the start with a message that names the key.

`PREHEAT__SECTION__KEY` in the environment overrides one value, e.g. `PREHEAT__EXACT__TTL_S=600`; the command line's
options (`--listen`, `--workers`, `--upstream`, `--api-key-env`, `--model`) override both. Names end in their unit: `_s` are
seconds, `bytes` are bytes. Secrets are never in the settings: they name environment variables (`_env`) or files (`_file`).

**Applied by** says what a running gateway needs to take a change: *SIGHUP* changes it in place, *SIGUSR2* replaces the workers
one after the other (it applies what SIGHUP does, too), *start* is a new start. A change that the signal can't apply is refused
whole (`reload-refused`, `restart-refused` in the log name the keys). All settings of an embedded engine need a new start.

The policies that `eviction` and `admission` can name are in [adding-a-policy.md](adding-a-policy.md).
"""


def page() -> str:
    """The whole document."""
    lines = [HEAD]
    for name, sentence, default in fields_of(Settings):
        section = NAMED.get(name)
        if section is not None:
            title, own = f"{name}.NAME", [] if name != "engines" else list(_of_all_engines())
            lines += _section(title, name, section, own)
        elif isinstance(default, msgspec.Struct):
            lines += _section(name, name, type(default), [])
        else:
            assert sentence.startswith(f"Written `engines.{name}`"), name
    return "\n".join(lines)


def _section(title: str, key: str, section: Any, above: list[str]) -> Iterator[str]:
    yield f"## `[{title}]`\n"
    yield f"{(section.__doc__ or '').strip()}\n"
    yield from above
    yield "| setting | default | meaning | applied by |"
    yield "| --- | --- | --- | --- |"
    for name, sentence, default in fields_of(section):
        yield f"| `{name}` | {_shown(default)} | {sentence} | {applied_by(key, name)} |"
    yield ""


def _of_all_engines() -> Iterator[str]:
    """The one setting beside the engines' own tables."""
    for name, sentence, default in fields_of(Settings):
        if sentence.startswith(f"Written `engines.{name}`: "):
            meaning = sentence.removeprefix(f"Written `engines.{name}`: ")
            by = applied_by(name, "")
            shown = _shown(default)
            yield f"`engines.{name}` (default {shown}; {by}) stands beside them: {meaning}\n"


def _shown(default: Any) -> str:
    if default is None:
        return "absent"
    if isinstance(default, Choice):
        return f'`{{ name = "{default.name}" }}`'
    return f"`{msgspec.json.encode(default).decode()}`"


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    written = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif written != page():
        print(f"{PAGE.name} isn't up to date: run python scripts/settings_doc.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
