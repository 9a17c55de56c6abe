"""Writes docs/report.schema.json from the report's structs.

python scripts/report_schema.py            write it
python scripts/report_schema.py --check    exit 1 if it isn't what would be written
"""

import argparse
import ast
import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path

import msgspec

from preheat.replay import report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "report.schema.json"


def schema() -> str:
    """The JSON Schema of the document, with the sentences of the structs."""
    whole = msgspec.json.schema(report.Report)
    sentences = _sentences()
    for section, described in whole["$defs"].items():
        described["description"] = inspect.cleandoc(described["description"])
        for name, field in described["properties"].items():
            if (section, name) in sentences:
                field["description"] = sentences[section, name]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | whole, indent=1, ensure_ascii=False) + "\n"


def _sentences() -> dict[tuple[str, str], str]:
    """What stands below each field in the source."""
    return {
        (section.name, field.target.id): inspect.cleandoc(below.value.value)
        for section in ast.parse(inspect.getsource(report)).body
        if isinstance(section, ast.ClassDef)
        for field, below in pairwise(section.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    written = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if not parser.parse_args().check:
        PAGE.write_text(schema(), encoding="utf-8")
    elif written != schema():
        print(f"{PAGE.name} isn't up to date: run python scripts/report_schema.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
