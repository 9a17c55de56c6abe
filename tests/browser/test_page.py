"""The page in a real browser: it draws, it is legible, it can be used, nothing overlaps."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preheat.dashboard import page
from preheat.replay.report import (
    Ablation,
    Arm,
    Balance,
    Capacity,
    Event,
    EventArm,
    HitCurve,
    Latency,
    Lever,
    Mechanism,
    Price,
    PriceCurve,
    Report,
    RoutingRule,
    Saved,
    Settings,
    Table,
    Trace,
    Waits,
    encode,
)
from preheat.replay.verdict import Fleet, summary_of, without_prompts
from report_sample import sample

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright, which drives the browser, isn't installed"
)

WIDE, NARROW = (1280, 800), (390, 844)
every_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])
every_size = pytest.mark.parametrize("size", [WIDE, NARROW, (820, 1180)], ids=str)

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        own = Path(driver.chromium.executable_path)
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        found = own if own.is_file() else next(filter(None, map(shutil.which, names)), None)
        if found is None:
            pytest.skip("no Chromium: `playwright install chromium`, or the system's package")
        started = driver.chromium.launch(executable_path=str(found))
        context = started.new_context()
        yield context
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report from the disk; afterwards nothing may have gone wrong on the page."""
    wrong: list[str] = []
    tabs = []

    def open_page(
        report: Report | bytes, size: tuple[int, int] = WIDE, scheme: str = "light"
    ) -> Any:
        file = tmp_path / "report.html"
        file.write_bytes(page(report if isinstance(report, bytes) else encode(report)))
        tab = browser.new_page()
        tabs.append(tab)
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        tab.emulate_media(color_scheme=scheme)
        tab.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
        tab.on("request", lambda asked: asked.url == file.as_uri() or wrong.append(asked.url))
        tab.goto(file.as_uri())
        return tab

    yield open_page
    for tab in tabs:
        tab.close()
    assert wrong == []


def awkward() -> Report:
    """Long names, many curves, values far apart, a loss, one point only."""
    long = "a policy with a name that goes on and on " * 3
    capacities = tuple(4**n for n in range(12))
    curves = [
        HitCurve(
            policy=f"{long if n == 3 else 'policy'} {n}",
            capacity_blocks=capacities,
            capacity_tokens=tuple(512 * blocks for blocks in capacities),
            hit_token_ratio=tuple(min(0.99, place * (n + 1) / 150) for place in range(12)),
            gap_closed_share=-0.4 + n / 10,
        )
        for n in range(14)
    ]
    single = HitCurve(
        policy="one", capacity_blocks=(1,), capacity_tokens=(512,), hit_token_ratio=(0.0,)
    )
    saved = Saved(
        baseline="w" * 300,
        baseline_gpu_s=1e9,
        levers=(Lever(name="x" * 300, note=long, saved_gpu_s=-1e9, saved_share=-1.0),),
    )
    waits = (0.0004, 0.02, 3.0, 90.0, 4_000.0)
    word = "z" * 300
    arm = EventArm(name=word, minute=(0.0, 1.0), ttft_p95_s=(1.0, 2.0))
    return Report(
        trace=Trace(name="y" * 300, format="y" * 300, rules=(word,)),
        settings=Settings(workers=1, command=word, service={word: 1.0}, rules=(word,)),
        summary=summary_of(saved, notes=(word,)),
        saved=saved,
        capacity=Capacity(curves=(*curves, single), notes=(word,)),
        latency=Latency(
            arms=tuple(
                Arm(name=long, ttft=Waits(p50_s=wait, p95_s=2 * wait, p99_s=2.1 * wait))
                for wait in waits
            )
        ),
        balance=Balance(rules=(RoutingRule(name=word, prefill_share=0.5),), notes=(word,)),
        events=(Event(name=word, note=word, arms=(arm,)),),
        headroom=(
            Table(title=word, note=word, verdict=word, columns=("arm", word), rows=((word, 1.0),)),
        ),
        ablation=Ablation(measure=word, unit=word, mechanisms=(Mechanism(name=word, added=1.0),)),
        price=Price(
            curves=(PriceCurve(pool=word, at_s=(0.0, 1.0), price_gpu_s_per_gib_h=(1.0, 2.0)),)
        ),
        cautions=(word,),
    )


# Pairs of texts whose boxes share more than a pixel, by what they say.
OVERLAPS = """() => {
  const shown = [...document.querySelectorAll(
    'h1, h2, h3, svg text, .legend li, .bars .name, .bars .value, .figures b, .figures span, figcaption span, button, nav a, td, th, dt, dd'
  )].filter((one) => one.checkVisibility() && !one.closest('.tip')).map((one) => {
    const clip = one.closest('.scroll')?.getBoundingClientRect();
    const box = one.getBoundingClientRect();
    const right = clip ? Math.min(box.right, clip.right) : box.right;
    return { one, left: box.left, right, top: box.top + scrollY, bottom: box.bottom + scrollY };
  }).sort((a, b) => a.top - b.top);
  const found = [];
  shown.forEach((a, n) => {
    for (const b of shown.slice(n + 1)) {
      if (b.top >= a.bottom) break;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 1 && !a.one.contains(b.one) && !b.one.contains(a.one))
        found.push(`${a.one.textContent} | ${b.one.textContent}`);
    }
  });
  return { found, count: shown.length };
}"""

# Texts that have less than 4.5:1 against the ground they stand on (WCAG 2.2, 1.4.3).
PALE = """() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  let count = 0;
  const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !one.checkVisibility()) continue;
    const style = getComputedStyle(one);
    const [a, b] = [one.closest('svg') ? style.fill : style.color, ground(one)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count += 1;
    if (ratio < 4.5) found.add(`${ratio.toFixed(2)} ${one.tagName}.${one.getAttribute('class')}`);
  }
  return { found: [...found], count };
}"""


@every_size
def test_the_first_screen_says_it_all(opened: Open, size: tuple[int, int]) -> None:
    tab = opened(sample(), size)
    for part in (
        "h1",
        ".figures .big",
        ".figures div:nth-child(3)",
        ".picture .bars li:nth-child(2)",
    ):
        box = tab.locator(part).bounding_box()
        assert box["y"] >= 0, part
        assert box["y"] + box["height"] <= size[1], part
    assert tab.locator("h1").inner_text().startswith("87% of the GPU time")
    assert tab.locator(".figures .big b").inner_text() == "41,846 GPU-s"
    assert tab.locator(".figures").inner_text().count("$29.06") == 1


@every_scheme
def test_texts_have_contrast(opened: Open, scheme: str) -> None:
    tab = opened(sample(), scheme=scheme)
    for words in tab.locator("details.words summary").all():
        words.click()
    seen = tab.evaluate(PALE)
    assert seen["count"] > 200
    assert seen["found"] == []


@every_size
@pytest.mark.parametrize("report", [sample, awkward], ids=["sample", "awkward"])
def test_nothing_overlaps_and_nothing_scrolls_sideways(
    opened: Open, size: tuple[int, int], report: Callable[[], Report]
) -> None:
    tab = opened(report(), size)
    tab.locator(".plot svg").first.wait_for()
    seen = tab.evaluate(OVERLAPS)
    assert seen["count"] > 50
    assert seen["found"] == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    cut = """() => [...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect())
      .filter((box) => box.left < 0 || box.right > innerWidth).length"""
    assert tab.evaluate(cut) == 0


def test_sections_stand_in_order_and_missing_ones_not_at_all(opened: Open) -> None:
    tab = opened(sample())
    titles = tab.locator("section > h2").all_inner_texts()
    assert titles[:2] == ["What saves what", "How long clients wait"]
    assert len(titles) == 9
    assert tab.locator("nav a").all_inner_texts() == titles
    only = opened(Report(capacity=sample().capacity))
    assert only.locator("section > h2").all_inner_texts() == ["How large a cache"]
    assert only.locator("header").inner_text() == "Preheat replay report"


def test_without_a_summary_what_there_is_to_win_is_the_answer_and_stands_first(
    opened: Open,
) -> None:
    whole = sample()
    tab = opened(Report(trace=whole.trace, events=whole.events, headroom=whole.headroom))
    assert tab.locator("section > h2").all_inner_texts() == [
        "What there is to win",
        "After an event",
        "What was simulated",
    ]


def test_every_word_of_a_section_is_explained(opened: Open) -> None:
    tab = opened(sample())
    for section in tab.locator("section").all():
        section.locator("summary", has_text="What the words mean").click()
        assert section.locator(".words dt").count() >= 1
        assert all(section.locator(".words dd").all_inner_texts())


def test_a_chart_is_read_by_keyboard_and_by_pointer(opened: Open) -> None:
    tab = opened(sample())
    chart = tab.locator("#how-large-a-cache .chart")
    chart.locator(".plot svg").focus()
    assert chart.locator(".tip").is_hidden()
    tab.keyboard.press("ArrowRight")
    assert chart.locator(".tip strong").inner_text() == "65.5K tokens"
    tab.keyboard.press("End")
    last = chart.locator(".tip").inner_text()
    assert "16.8M tokens" in last
    assert "62%" in last
    assert "16.8M tokens: infinite 62%" in chart.locator("[aria-live]").text_content()
    tab.keyboard.press("Escape")
    assert chart.locator(".tip").is_hidden()
    chart.locator(".plot svg").hover(position={"x": 60, "y": 100})
    assert chart.locator(".tip strong").inner_text() == "65.5K tokens"


def test_a_table_is_copied_whole(opened: Open) -> None:
    tab = opened(sample(points=1_000))
    tab.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    tab.locator("figure", has_text="Routing rules").get_by_role("button").click()
    lines = tab.evaluate("window.copied").split("\n")
    assert lines[0].split("\t")[:2] == ["rule", "prefill done"]
    assert lines[1].split("\t")[:2] == ["round robin", "64%"]
    assert len(lines) == 6
    prices = tab.locator("#the-price-of-memory")
    prices.locator("summary", has_text="The numbers").click()
    prices.locator("tbody tr").first.wait_for()
    assert prices.locator("tbody tr").count() == 300
    prices.get_by_role("button").click()
    assert len(tab.evaluate("window.copied").split("\n")) == 2_001


def test_a_page_without_a_clipboard_copies_too(opened: Open) -> None:
    tab = opened(sample())
    tab.evaluate("""() => {
      navigator.clipboard.writeText = async () => { throw new Error('none'); };
      document.addEventListener('copy', () => { window.copied = `${getSelection()}`
        || document.activeElement.value; });
    }""")
    tab.locator("figure", has_text="Routing rules").get_by_role("button").click()
    assert tab.evaluate("window.copied").startswith("rule\tprefill done")


def test_a_hostile_name_is_a_name(opened: Open) -> None:
    name = "</script><img src=x onerror=\"window.pwned=1\"><svg onload='window.pwned=1'>"
    report = msgspec.structs.replace(
        sample(name), cautions=(name,), capacity=Capacity(curves=(
            HitCurve(policy=name, capacity_blocks=(1, 2), capacity_tokens=(1, 2), hit_token_ratio=(0, 1)),
        )),
    )  # fmt: skip
    tab = opened(report)
    assert tab.locator(".trace bdi").inner_text() == name
    assert tab.locator(".legend li").filter(has_text="onerror").inner_text() == name
    assert tab.title() == f"{name} · Preheat report"
    assert tab.locator("img").count() == 0
    assert tab.evaluate("window.pwned") is None


def test_a_large_report_is_drawn_at_once(opened: Open) -> None:
    tab = opened(sample(points=100_000))
    drawn = tab.locator("#the-price-of-memory .line").last
    drawn.wait_for(state="attached")
    spent_ms = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert spent_ms < 15_000  # about a second beside eight other processes on two cores
    assert len(drawn.get_attribute("d")) < 100_000
    chart = tab.locator("#the-price-of-memory .plot svg")
    chart.hover(position={"x": 500, "y": 100})
    assert tab.locator("#the-price-of-memory .tip b").count() == 2


def test_a_loss_is_shown_as_one(opened: Open) -> None:
    tab = opened(awkward())
    assert tab.locator("h1").inner_text().startswith("Nothing to save here")
    assert "a loss" in tab.locator(".figures .big").inner_text()
    assert tab.locator("#what-saves-what .fill.loss").count() == 1


def nothing(saved_gpu_s: float = 0.0, share: float = 0.0) -> Report:
    """What a small trace gives: noise, waits of nothing, curves that lie on each other."""
    saved = Saved(
        baseline="round robin",
        baseline_gpu_s=10.0,
        no_cache_gpu_s=20.0,
        levers=(
            Lever(name="routing", saved_gpu_s=saved_gpu_s, saved_share=share),
            Lever(name="tier read on demand", saved_gpu_s=-0.0, saved_share=-0.0),
        ),
    )
    arms = [
        EventArm(name=name, minute=(-1, 0, 1), ttft_p95_s=(0.1, 0.1, 0.1), hit_token_ratio=hits)
        for name, hits in (("kept", (0.5, 0.5, 0.5)), ("nothing", (0.5, 0.1, 0.4)))
    ]
    rules = ("round_robin", "session", "smg", "cost", "preheat")
    return Report(
        trace=Trace(name="t.jsonl"),
        summary=summary_of(saved, fleet=Fleet(8, 60.0)),
        saved=saved,
        latency=Latency(
            arms=(
                Arm(name="stored", ttft=Waits(p50_s=0.0, p95_s=1.0), service_ttft=Waits(p50_s=0.1)),
            )
        ),
        events=(Event(name="One worker restarts", arms=tuple(arms)),),
        balance=Balance(rules=tuple(RoutingRule(name=name, ttft_mean_s=0.2) for name in rules)),
        ablation=Ablation(
            measure="saved", unit="share", mechanisms=(Mechanism(name="routing", added=-0.0007),)
        ),
    )


@pytest.mark.parametrize(("saved_gpu_s", "share"), [(-0.0, -0.0), (-0.015, -0.0015)])
def test_noise_is_neither_minus_nothing_nor_a_loss(
    opened: Open, saved_gpu_s: float, share: float
) -> None:
    tab = opened(nothing(saved_gpu_s, share))
    assert tab.locator("h1").inner_text().startswith("Nothing to save here")
    said = tab.locator("header").inner_text()
    assert "a loss" not in said
    assert "-0" not in said
    assert "the engines' own caches save 50% already" in said
    assert tab.locator(".figures .big b").inner_text() in ("0 GPU-s", "≈ 0 GPU-s")
    assert "-0" not in tab.locator("#what-saves-what").inner_text()
    assert tab.locator("#what-each-mechanism-adds .value").inner_text() == "≈ 0"


def test_what_is_not_known_has_no_column_and_what_is_equal_no_chart(opened: Open) -> None:
    tab = opened(nothing())
    heads = tab.locator("#which-worker-gets-it th").all_inner_texts()
    assert heads == ["rule", "TTFT mean"]
    events = tab.locator("#after-an-event")
    assert "TTFT, p95 of the minute: no visible difference here." in events.inner_text()
    assert events.locator(".plot").count() == 1


def test_a_wait_of_nothing_stands_at_the_left_edge(opened: Open) -> None:
    tab = opened(nothing())
    row = tab.locator("#how-long-clients-wait .ranges li").first
    places = [float(one.get_attribute("x")[:-1]) for one in row.locator("svg svg").all()]
    assert places[0] == 0
    assert places[1] > 0


def test_rules_and_levers_are_explained_where_they_appear(opened: Open) -> None:
    tab = opened(nothing())
    for section, words in (
        ("which-worker-gets-it", {"round_robin", "session", "smg", "cost", "preheat"}),
        ("what-saves-what", {"routing", "tier read on demand"}),
    ):
        part = tab.locator(f"#{section}")
        part.locator("summary", has_text="What the words mean").click()
        assert words <= set(part.locator("dt").all_inner_texts())


def test_a_trace_without_prompts_has_a_sentence_and_no_sums(opened: Open) -> None:
    waits = Arm(name="round robin", role="baseline", ttft=Waits(p99_s=1.0))
    latency = Latency(arms=(waits, Arm(name="all", role="ours", ttft=Waits(p99_s=0.5))))
    summary = without_prompts(latency, "round robin")
    tab = opened(Report(trace=Trace(name="a"), summary=summary, latency=latency))
    assert tab.locator("h1").inner_text() == summary.sentence
    assert tab.locator(".figures").count() == 0


def test_stored_answers_are_counted(opened: Open) -> None:
    said = opened(sample()).locator(".answers").inner_text()
    assert "352 of 21,043" in said
    assert "141K output tokens" in said


def test_paper_is_light(opened: Open) -> None:
    tab = opened(sample(), scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate(PALE)["found"] == []
    assert tab.pdf().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b'{"schema": "preheat.report/2"}', "its schema is preheat.report/2"),
        (b"[]", "its schema is unknown"),
        (b"null", "its schema is unknown"),
        (b"<!--<script>", "is not JSON"),
    ],
)
def test_what_it_can_not_draw_it_says(opened: Open, document: bytes, said: str) -> None:
    assert said in opened(document).locator("main").inner_text()
