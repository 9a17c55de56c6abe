"""The report's document, what it says in words, and the page made of it."""

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from preheat.dashboard import page
from preheat.replay.report import (
    Arm,
    HitCurve,
    Latency,
    Lever,
    PriceCurve,
    Rate,
    Report,
    Saved,
    Table,
    Trace,
    Waits,
    decode,
    encode,
)
from preheat.replay.verdict import Fleet, gap_closed, summary_of, without_prompts
from report_sample import sample

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\"{{script}}"


# The document ----------------------------------------------------------------------------------


def test_what_is_written_is_read_again() -> None:
    report = sample()
    assert decode(encode(report)) == report


def test_sections_that_were_not_measured_are_absent() -> None:
    assert msgspec.json.decode(encode(Report(trace=Trace(name="a")))) == {
        "schema": "preheat.report/1",
        "trace": {"name": "a"},
    }


@pytest.mark.parametrize("schema", [b'"preheat.report/2"', b'""', b"1"])
def test_another_schema_is_refused(schema: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(b'{"schema":' + schema + b"}")
    with pytest.raises(msgspec.ValidationError):
        decode(b"{}")


def test_columns_of_different_lengths_are_refused_whether_made_or_read() -> None:
    with pytest.raises(ValueError, match=r"HBM: columns of different lengths \(2, 1\)"):
        PriceCurve(pool="HBM", at_s=(0.0, 1.0), price_gpu_s_per_gib_h=(0.0,))
    with pytest.raises(ValueError, match="lru"):
        HitCurve(policy="lru", capacity_blocks=(1,), capacity_tokens=(), hit_token_ratio=(0.5,))
    with pytest.raises(ValueError, match="pauses"):
        Table(title="pauses", columns=("a", "b"), rows=((1, 2), (3,)))
    document = encode(sample()).replace(b'"at_s":[0.0,', b'"at_s":[', 1)
    with pytest.raises(msgspec.ValidationError, match="HBM: columns of different lengths"):
        decode(document)


def test_numbers_that_are_not_finite_are_null_and_thus_unmeasured() -> None:
    curve = PriceCurve(pool="HBM", at_s=(0.0,), price_gpu_s_per_gib_h=(float("nan"),))
    assert msgspec.json.decode(msgspec.json.encode(curve))["price_gpu_s_per_gib_h"] == [None]


def test_the_schema_page_is_what_its_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "report_schema.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_documents_are_as_the_schema_says() -> None:
    validator = jsonschema_rs.validator_for((ROOT / "docs" / "report.schema.json").read_text())
    document = msgspec.json.decode(encode(sample()))
    validator.validate(document)
    assert validator.is_valid(msgspec.json.decode(encode(Report())))
    assert not validator.is_valid({})
    assert not validator.is_valid(document | {"schema": "preheat.report/2"})
    assert not validator.is_valid(document | {"rate": {"gpu_hour_money": "2.50"}})


def test_numbers_carry_their_unit_in_their_name() -> None:
    units = "s|requests|gpu_s|money|tokens|blocks|lines|share|ratio|low|high|gib_h"
    counts = {"requests", "sessions", "workers", "minute", "rows", "added", "service"}
    sections = msgspec.json.schema(Report)["$defs"]
    unnamed = [
        f"{section}.{name}"
        for section, described in sections.items()
        for name, field in described["properties"].items()
        if is_number(field) and name not in counts and not re.search(rf"_({units})$", name)
    ]
    assert unnamed == []


def is_number(field: Any) -> bool:
    if isinstance(field, dict):
        return field.get("type") in {"number", "integer"} or any(map(is_number, field.values()))
    return isinstance(field, list) and any(map(is_number, field))


# What it says ----------------------------------------------------------------------------------


def saved_of(*shares: float, together: float | None = None) -> Saved:
    def lever(share: float) -> Lever:
        return Lever(name=f"lever {share}", saved_gpu_s=1_000 * share, saved_share=share)

    return Saved(
        baseline="round robin",
        baseline_gpu_s=1_000,
        levers=tuple(map(lever, shares)),
        together=None if together is None else lever(together),
    )


def test_a_big_saving_is_told_with_the_lever_that_brings_most_of_it() -> None:
    summary = summary_of(saved_of(0.1, 0.3, together=0.4), Rate(gpu_hour_money=3.6))
    assert summary.sentence == (
        "40% of the GPU time for reading prompts would have been saved, "
        "most of it by one lever: lever 0.3."
    )
    assert (summary.is_small, summary.best_lever) == (False, "lever 0.3")
    assert summary.saved_money == pytest.approx(0.4)


def test_two_levers_that_save_alike_are_both_named() -> None:
    sentence = summary_of(saved_of(0.36, 0.31, together=0.45)).sentence
    assert "one lever" not in sentence
    assert sentence.endswith("saved (lever 0.36 36% and lever 0.31 31%, each alone).")


def test_a_large_share_of_little_work_is_small_too() -> None:
    summary = summary_of(saved_of(0.5, 0.68), fleet=Fleet(8, 90_000.0))
    assert summary.sentence == (
        "Small here: 680 GPU-seconds in 25 hours, 0.094% of eight GPUs' time; "
        "of the prefill that the engines' own caches leave, 68%."
    )
    assert summary.is_small
    assert summary.fleet_share == pytest.approx(680 / 720_000)
    assert not summary_of(saved_of(0.5), fleet=Fleet(8, 100.0)).is_small


def waits_of(**ends: tuple[float, float]) -> Latency:
    before, after = (Waits(**{place: pair[i] for place, pair in ends.items()}) for i in (0, 1))
    return Latency(
        arms=(
            Arm(name="round robin", role="baseline", ttft=before),
            Arm(name="all together", role="ours", ttft=after),
        )
    )


def test_waits_that_got_worse_are_told_with_the_saving() -> None:
    def told(**ends: tuple[float, float]) -> str:
        return summary_of(saved_of(0.4), latency=waits_of(**ends)).sentence

    later = ", but first tokens came later: "
    assert told(p95_s=(0.54, 0.65), p99_s=(1.0, 1.0)).endswith(f"{later}p95 0.54 → 0.65 s.")
    assert told(p95_s=(0.54, 0.5), p99_s=(1.0, 1.2)).endswith(f"{later}p99 1.00 → 1.20 s.")
    assert later not in told(p95_s=(0.54, 0.56), p99_s=(3.0, 1.0))
    assert later not in told(p95_s=(0.0, 0.0005))


def test_of_a_trace_without_prompts_only_waits_are_told() -> None:
    summary = without_prompts(waits_of(p99_s=(3.0, 1.0)), "round robin")
    assert summary.sentence.endswith("By routing, p99 of the first token goes from 3.00 to 1.00 s.")
    same = without_prompts(waits_of(p99_s=(3.0, 3.01)), "round robin")
    assert same.sentence.endswith("Routing hardly changes p99 of the first token: 3.01 s.")
    assert "only an order" in without_prompts(None, "round robin").sentence


def test_another_schedule_is_neither_a_loss_nor_a_saving() -> None:
    summary = summary_of(saved_of(-0.0015))
    assert summary.sentence == (
        "Nothing to save here: what was tried changes prefill by less than 0.2% of it."
    )
    assert "changes prefill by nothing" in summary_of(saved_of(0.0)).sentence


def test_many_levers_that_each_bring_a_little_are_not_called_one() -> None:
    assert "one lever" not in summary_of(saved_of(0.1, 0.11, together=0.4)).sentence


def test_a_small_saving_is_called_small() -> None:
    summary = summary_of(saved_of(0.007))
    assert summary.sentence.startswith("Small here: 0.7% of")
    assert summary.is_small
    assert summary.saved_money is None


def test_a_loss_is_called_a_loss() -> None:
    summary = summary_of(saved_of(-0.12, -0.3))
    assert summary.sentence == "Nothing to save here: what was tried costs 12% more."
    assert summary.best_lever == ""
    assert summary.saved_gpu_s == -120


def test_without_levers_nothing_is_claimed() -> None:
    summary = summary_of(saved_of())
    assert (summary.sentence, summary.saved_gpu_s) == ("No lever was tried.", 0)


def test_the_gap_is_pooled_over_capacities_with_room() -> None:
    lru, belady = [0.1, 0.2, 0.5], [0.3, 0.6, 0.51]
    assert gap_closed([0.2, 0.3, 0.1], lru, belady) == pytest.approx(0.2 / 0.6)
    assert gap_closed([0.5], [0.5], [0.51]) is None
    assert gap_closed(lru, lru, belady) == 0
    assert gap_closed(belady, lru, belady) == 1


# The page --------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """The elements and the blocks of a page, as a parser sees them."""

    def __init__(self, document: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self.blocks: dict[str, str] = {}
        self._block = ""
        self.feed(document.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.links += [found[name] or "" for name in ("src", "href") if name in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self._block = f"{tag}#{found['id']}" if "id" in found else tag

    def handle_endtag(self, tag: str) -> None:
        self._block = ""

    def handle_data(self, data: str) -> None:
        if self._block:
            self.blocks[self._block] = self.blocks.get(self._block, "") + data


def test_a_page_is_one_file_whose_policy_allows_its_own_two_blocks_and_nothing_else() -> None:
    outline = Outline(page(encode(sample())))
    assert outline.links == []
    assert outline.policy.startswith("default-src 'none';")
    assert "unsafe" not in outline.policy
    for block in ("style", "script"):
        digest = hashlib.sha256(outline.blocks[block].encode()).digest()
        assert f"{block}-src 'sha256-{base64.b64encode(digest).decode()}'" in outline.policy


def test_the_page_holds_the_report_unchanged() -> None:
    document = encode(sample())
    held = Outline(page(document)).blocks["script#report"]
    assert msgspec.json.decode(held) == msgspec.json.decode(document)


def test_a_hostile_name_adds_no_element_and_stays_a_name() -> None:
    plain, hostile = Outline(page(encode(sample()))), Outline(page(encode(sample(HOSTILE))))
    assert hostile.tags == plain.tags
    assert hostile.policy == plain.policy
    assert hostile.blocks["script"] == plain.blocks["script"]
    assert decode(hostile.blocks["script#report"].encode()).trace == Trace(
        **{**msgspec.structs.asdict(sample().trace), "name": HOSTILE}
    )


def test_the_script_makes_text_of_a_report_only() -> None:
    script = Outline(page(b"{}")).blocks["script"]
    assert len(script) > 10_000
    for door in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
    ):
        assert door not in script
