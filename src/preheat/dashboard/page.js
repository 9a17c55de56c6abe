// The report, section by section, the most important first. A section that isn't there isn't drawn.

const SCHEMA = "preheat.report/1";

// Numbers ------------------------------------------------------------------------------------------

const digits = (value, most) => value.toLocaleString("en-US", { maximumSignificantDigits: most });
const or = (show) => (value) => (isNumber(value) ? show(value || 0) : "–");   // -0 is 0
const SCHEDULE = 0.002;   // as replay/verdict.py has it: another schedule of the same work
const isSchedule = (share) => share < 0 && share > -SCHEDULE;
const count = or((value) => Math.round(value).toLocaleString("en-US"));
const rough = or((value) =>
  value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 }));
const share = or((value) => {
  if (isSchedule(value)) return "≈ 0";
  if (value > 0 && value < 0.001) return `${digits(100 * value, 2)}%`;
  return `${(100 * value).toFixed(value && Math.abs(value) < 0.0995 ? 1 : 0)}%`;
});
const seconds = or((value) =>
  (value && Math.abs(value) < 1 ? `${digits(value * 1000, 3)} ms` : `${digits(value, 3)} s`));
const sum = or((value) => (Math.abs(value) < 9.95 ? digits(value, 2) : count(value)));
const gpu = or((value) => `${sum(value)} GPU-s`);
const times = or((value) => `${digits(value, 3)}×`);
const plain = or((value) => {
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return count(value);
  return Math.abs(value) < 1e-3 ? `${Number(value.toPrecision(4))}` : digits(value, 4);
});

function span(value) {
  const units = [["days", 86400], ["hours", 3600], ["minutes", 60]];
  const [unit, size] = units.find(([, least]) => value >= 2 * least) ?? ["seconds", 1];
  return `${digits(value / size, value < 10 * size ? 2 : 3)} ${unit}`;
}

function money(value, rate) {
  if (!isNumber(value)) return "–";
  const currency = rate?.currency ?? "USD";
  const sign = { USD: "$", EUR: "€", GBP: "£" }[currency] ?? `${currency} `;
  const size = Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  return `${value < 0 ? "-" : ""}${sign}${size}`;
}

// Parts --------------------------------------------------------------------------------------------

const list = (sentences) => sentences?.length > 0
  && html("ul", { class: "notes" }, sentences.map((text) => html("li", null, text)));

// The words are explained in page.html; those of `names` are shown.
function words(names) {
  const all = [...document.getElementById("words").content.querySelectorAll("dt")];
  if (!all.some((term) => names.includes(term.textContent))) return null;
  return html("details", { class: "words" }, html("summary", null, "What the words mean"),
    html("dl", null, all.filter((term) => names.includes(term.textContent)).map((term) =>
      [term.cloneNode(true), term.nextElementSibling.cloneNode(true)])));
}

// A row of a report as a row of bars.
function bar(row, field, show) {
  return { name: row.name, note: row.note, role: row.role, value: row[field], text: show(row[field]) };
}

function section(title, lead, names, ...parts) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  return html("section", { id, "aria-labelledby": `${id}-title` },
    html("h2", { id: `${id}-title` }, title), html("p", { class: "lead" }, lead), parts, words(names));
}

function copier(columns, rows) {
  const button = html("button", { type: "button" }, "Copy");
  const clean = (cell) => `${cell ?? ""}`.replace(/[\t\n]/g, " ");
  button.addEventListener("click", async () => {
    const text = [columns, ...rows].map((row) => row.map(clean).join("\t")).join("\n");
    try {
      await navigator.clipboard.writeText(text);
    } catch {   // a page from a disk, or over plain HTTP, may have no clipboard
      const area = html("textarea", { class: "unseen" }, text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

const FIGURE = /^[−+-]?[$€£]?\d[\d.,]* ?(%|ms|s|×)?( to [−+-]?[\d.,]+ ?%?)?$|^–?$/;

// Cells are text or numbers; a column of nothing is left out. Only the first rows are drawn; all of them
// are copied.
function table(title, names, cells, most = 300) {
  const isEmpty = (cell) => cell == null || cell === "" || cell === "–";
  const kept = names.map((_, n) => n).filter((n) => n === 0 || !cells.every((row) => isEmpty(row[n])));
  const [columns, ...rows] = [names, ...cells].map((row) => kept.map((n) => row[n]));
  const isFigure = (cell) => cell == null || typeof cell === "number" || FIGURE.test(cell);
  const kinds = columns.map((_, n) => (n > 0 && rows.every((row) => isFigure(row[n])) ? "figure" : null));
  const shown = (value) => (typeof value === "number" ? plain(value) : value || "–");
  return html("figure", null,
    html("figcaption", null, html("span", null, title), copier(columns, rows)),
    html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${title}` },
      html("table", null,
        html("thead", null, html("tr", null, columns.map((name, n) =>
          html("th", { class: kinds[n], scope: "col" }, name)))),
        html("tbody", null, rows.slice(0, most).map((row) => html("tr", null, row.map((value, n) =>
          html("td", { class: kinds[n] }, shown(value)))))))),
    rows.length > most
      && html("p", { class: "fine" }, `${count(rows.length - most)} more rows are in the copy.`));
}

// Lines with their caption, and their numbers for who can't see or wants to copy them.
function plotted(title, chart) {
  const details = html("details", null, html("summary", null, "The numbers"));
  const columns = ["", chart.x.label, title];
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    details.append(table(title, columns, chart.rows.flatMap((row) =>
      row.xs.map((x, n) => [row.name, x, row.ys[n]]))));
  });
  return html("figure", null, html("figcaption", null, title), lines({ label: title, ...chart }), details);
}

// Sections -----------------------------------------------------------------------------------------

const wholeOf = ({ together, levers }) =>
  together ?? [...levers].sort((a, b) => b.saved_gpu_s - a.saved_gpu_s)[0];

function sums(summary, rate) {
  const { sentence, saved_gpu_s: saved, saved_money: worth, best_lever: best } = summary;
  const figure = (name, value, about) =>
    html("div", { class: name }, html("b", null, value), html("span", null, about));
  return html("div", { class: summary.is_small || saved < 0 ? "small" : null },
    html("h1", null, sentence),
    isNumber(saved) && html("div", { class: "figures" },
      isSchedule(summary.saved_share) ? figure("big", "≈ 0 GPU-s", "of prefill saved")
        : figure("big", gpu(Math.abs(saved)),
          `${saved < 0 ? "more prefill, a loss" : "of prefill saved"}: ${span(Math.abs(saved))} of one GPU`),
      figure(null, share(summary.saved_share), "of the baseline's prefill"),
      isNumber(summary.fleet_share) && figure(null, share(summary.fleet_share), "of all GPUs' time"),
      isNumber(worth) && figure(null, money(worth, rate),
        rate ? `at ${money(rate.gpu_hour_money, rate)} a GPU-hour` : "")),
    isNumber(saved) && html("p", { class: "fine" }, `Baseline: ${summary.baseline}.`,
      best && !sentence.includes(best) && ` Best single lever: ${best}.`),
    list(summary.notes));
}

function picture(saved) {
  const whole = wholeOf(saved);
  const { baseline, baseline_gpu_s: before, bound_gpu_s: bound, no_cache_gpu_s: without } = saved;
  return html("div", { class: "picture", role: "group", "aria-label": "Prefill work in GPU-seconds" },
    html("h2", null, "Prefill work, in GPU-seconds"),
    bars([
      { name: baseline, note: "the baseline", role: "baseline", value: before },
      whole && { name: whole.name, role: "ours", value: before - whole.saved_gpu_s },
      isNumber(bound) && { name: "No prefix computed twice", note: "the bound", role: "bound", value: bound },
    ].filter(Boolean).map((row) => ({ ...row, text: sum(row.value) }))),
    without > 0 && html("p", { class: "fine" }, `Without any cache it would be ${sum(without)}: `
      + `the engines' own caches save ${share(1 - before / without)} already.`));
}

function first({ summary, saved, trace, rate, kind, cautions }) {
  const facts = trace && [trace.format, trace.requests && `${count(trace.requests)} requests`,
    trace.sessions && `${count(trace.sessions)} sessions`, trace.span_s && span(trace.span_s),
    trace.input_tokens && `${rough(trace.input_tokens)} prompt tokens`].filter(Boolean);
  return html("header", null,
    html("p", { class: "brand" }, html("strong", null, "Preheat"),
      kind === "live" ? " live report" : " replay report"),
    trace && html(summary ? "p" : "h1", { class: "trace" },
      html("bdi", null, trace.name), html("small", null, facts.join(" · "))),
    (summary || saved) && html("div", { class: "hero" },
      summary && sums(summary, rate), saved && picture(saved)),
    cautions?.length > 0 && html("aside", null, html("strong", null, "Read with care"), list(cautions)));
}

function stored({ requests, stored_requests: kept, joined_requests: joined, spared_output_tokens: spared, notes }) {
  const tokens = isNumber(spared) ? `; ${rough(spared)} output tokens were not generated` : "";
  return [html("p", { class: "answers" }, `The response cache answered ${count(kept + joined)} of ${count(requests)} `
    + `requests (${share((kept + joined) / Math.max(1, requests))}) without an engine: ${count(kept)} from the store, `
    + `${count(joined)} with the answer to an equal one under way${tokens}.`), list(notes)];
}

function savings({ saved: { levers, together }, answers, rate }) {
  const all = [...levers].sort((a, b) => b.saved_share - a.saved_share);
  if (together) all.unshift({ ...together, role: "ours" });
  const priced = (gpu_s) => (rate ? (gpu_s / 3600) * rate.gpu_hour_money : null);
  return section("What saves what",
    "Each lever alone, against the baseline. Levers overlap: they don't add up. "
      + "Left of zero is a loss.",
    ["prefill", "GPU-second", "baseline", ...levers.map((lever) => lever.name)],
    bars(all.map((lever) => bar(lever, "saved_share", share)), 0.2),
    answers && stored(answers),
    table("Saved by lever",
      ["lever", "saved, share of prefill", "saved, GPU-seconds", "saved, money"],
      all.map((lever) => [lever.name, share(lever.saved_share),
        isSchedule(lever.saved_share) ? "≈ 0" : sum(lever.saved_gpu_s),
        money(lever.saved_money ?? priced(lever.saved_gpu_s), rate)])));
}

function waiting({ latency: { arms, slo_ttft_s: target, notes } }) {
  const dots = [["p50_s", 0], ["p95_s", 1], ["p99_s", 3]];
  const waits = (of) => ["mean_s", "p50_s", "p95_s", "p99_s"].map((field) => seconds(of?.[field]));
  return section("How long clients wait",
    "Time to first token, on a logarithmic axis. Circle: half of the requests waited at most this long; "
      + "square: 95%; diamond: 99%.",
    ["TTFT", "service TTFT", "p50, p95, p99", "goodput"],
    ranges(arms.map((arm) => ({ name: arm.name, role: arm.role,
      text: waits(arm.ttft).slice(1).join(" · "),
      values: dots.map(([field, mark]) => ({ value: arm.ttft?.[field], mark })) })), seconds),
    table("Time to first token", ["arm", "mean", "p50", "p95", "p99",
      `goodput${isNumber(target) ? `, within ${seconds(target)}` : ""}`, "goodput, requests/s"],
      arms.map((arm) => [arm.name, ...waits(arm.ttft), share(arm.goodput_share), plain(arm.goodput_per_s)])),
    arms.some((arm) => arm.service_ttft) && table("Service TTFT, without the queue",
      ["arm", "mean", "p50", "p95", "p99"], arms.map((arm) => [arm.name, ...waits(arm.service_ttft)])),
    arms.some((arm) => arm.service_ttft)
      && html("p", { class: "fine" }, "Service TTFT leaves out what a stored answer served: it never came to a worker."),
    list(notes));
}

// Whether the lines of a chart would lie on each other.
function coincide(rows) {
  const [first, ...others] = rows;
  const top = Math.max(...rows.flatMap((row) => row.ys.filter(isNumber).map(Math.abs)), 0);
  return others.every((row) => row.ys.length === first.ys.length
    && row.ys.every((y, n) => isNumber(y) === isNumber(first.ys[n]) && !(Math.abs(y - first.ys[n]) > 0.01 * top)));
}

function after({ events }) {
  const x = { label: "minutes after the event", unit: "min", format: plain };
  const chart = (event, title, format, field) => {
    const rows = event.arms.filter((arm) => arm[field]?.length)
      .map((arm) => ({ ...arm, xs: arm.minute, ys: arm[field] }));
    if (rows.length > 1 && coincide(rows)) return html("p", { class: "fine" }, `${title}: no visible difference here.`);
    return rows.length > 0
      && plotted(title, { x, y: { label: "", format }, rows, event: 0, label: `${event.name}: ${title}` });
  };
  return section("After an event", "Minute by minute, in each arm. The upright line is the event.",
    ["TTFT", "p50, p95, p99", "token hit ratio"],
    events.map((event) => [html("h3", null, event.name), event.note && html("p", null, event.note),
      html("div", { class: "pair" }, chart(event, "TTFT, p95 of the minute", seconds, "ttft_p95_s"),
        chart(event, "Token hit ratio of the minute", share, "hit_token_ratio"))]));
}

function routing({ balance: { rules, notes } }) {
  const hasPrompts = rules.some((rule) => isNumber(rule.prefill_share));
  return section("Which worker gets it", hasPrompts
    ? "Prefill still done under each routing rule, of what it would be without any cache. Less is better."
    : "The mean time to first token under each routing rule. Less is better.",
    ["prefill", "token hit ratio", "max ÷ mean", "TTFT", ...rules.map((rule) => rule.name)],
    bars(rules.map((rule) => (hasPrompts ? bar(rule, "prefill_share", share) : bar(rule, "ttft_mean_s", seconds)))),
    table("Routing rules", ["rule", "prefill done", "token hit ratio", "work, max ÷ mean", "TTFT mean", "TTFT p99"],
      rules.map((rule) => [rule.name, share(rule.prefill_share), share(rule.hit_token_ratio),
        times(rule.work_max_mean_ratio), seconds(rule.ttft_mean_s), seconds(rule.ttft_p99_s)])),
    list(notes));
}

function sizes({ capacity: { curves, notes } }) {
  const named = curves.map((curve) => ({ ...curve, name: curve.policy,
    xs: curve.capacity_tokens, ys: curve.hit_token_ratio }));
  const closed = named.filter((curve) => isNumber(curve.gap_closed_share))
    .sort((a, b) => b.gap_closed_share - a.gap_closed_share);
  return section("How large a cache",
    "Nothing gets above infinite; between LRU and Belady lies what a better policy could win.",
    ["token hit ratio", "LRU", "Belady", "infinite", "gap closed", ...curves.map((curve) => curve.policy)],
    plotted("Token hit ratio against capacity", {
      x: { label: "capacity, tokens of KV (logarithmic)", unit: "tokens", format: rough, log: true },
      y: { label: "token hit ratio", format: share }, rows: named }),
    closed.length > 0 && [html("h3", null, "Share of the gap between LRU and Belady closed"),
      bars(closed.map((curve) => bar(curve, "gap_closed_share", share)), 1)],
    list(notes));
}

function stakes({ headroom }) {
  return section("What there is to win", "Each lever at its best, before any policy of ours.",
    ["prefill", "GPU-second", "TTFT", "p50, p95, p99"],
    headroom.map((one) => [table(one.title, one.columns, one.rows),
      one.note && html("p", { class: "fine" }, one.note),
      one.verdict && html("p", { class: "verdict" }, html("strong", null, "Verdict: "), one.verdict)]));
}

function added({ ablation: { measure, unit, mechanisms } }) {
  const told = (value) => (unit === "share" ? share(value) : `${plain(value)} ${unit ?? ""}`);
  return section("What each mechanism adds", `${measure}.`, ["ablation"],
    bars(mechanisms.map((one) => ({ ...bar(one, "added", plain), text: told(one.added) }))));
}

function price({ price: { curves, notes } }) {
  return section("The price of memory", "What room in each pool is worth as time goes by.", ["price μ"],
    plotted("Price μ", {
      x: { label: "hours", unit: "h", format: plain }, y: { label: "GPU-seconds a GiB·hour", format: plain },
      rows: curves.map((curve) => ({ name: curve.pool, xs: curve.at_s.map((at) => at / 3600),
        ys: curve.price_gpu_s_per_gib_h })) }),
    list(notes));
}

function made(report) {
  const { rate, preheat_version: version } = report;
  const [trace, settings] = [report.trace ?? {}, report.settings ?? {}];
  const some = (value, unit = "") => value && `${count(value)}${unit}`;
  const facts = [
    ["Trace", trace.name], ["Format", trace.format], ["Requests", some(trace.requests)],
    ["Prompt tokens", some(trace.input_tokens)], ["Output tokens", some(trace.output_tokens)],
    ["Block", some(trace.block_tokens, " tokens")], ["Lines skipped", some(trace.skipped_lines)],
    ["Workers", some(settings.workers)], ["HBM a worker", some(settings.hbm_tokens, " tokens of KV")],
    ["DRAM a worker", some(settings.dram_tokens, " tokens of KV")],
    ["Answers kept", isNumber(settings.answers_ttl_s) && span(settings.answers_ttl_s)],
    ["Service model", Object.entries(settings.service ?? {})
      .map(([name, value]) => `${name} ${plain(value)}`).join(", ")],
    ["Rate", rate && `${money(rate.gpu_hour_money, rate)} a GPU-hour`],
    ["Preheat", version], ["Command", settings.command && html("code", null, settings.command)],
  ].filter(([, value]) => value);
  return section("What was simulated", "The trace, what was done to it, and what it ran on.", ["block"],
    html("dl", { class: "facts" }, facts.map(([name, value]) =>
      html("div", null, html("dt", null, name), html("dd", null, value)))),
    list([...(trace.rules ?? []), ...(settings.rules ?? [])]));
}

// The whole ----------------------------------------------------------------------------------------

const SECTIONS = { saved: savings, latency: waiting, events: after, balance: routing, capacity: sizes,
  headroom: stakes, ablation: added, price };

function draw(report) {
  const isThere = (part) => part != null && part.length !== 0;
  const shown = report.summary ? SECTIONS : { headroom: stakes, ...SECTIONS };   // there it is the answer
  const drawn = Object.entries(shown).filter(([name]) => isThere(report[name])).map(([, show]) => show(report));
  if (report.trace || report.settings) drawn.push(made(report));
  if (report.trace) document.title = `${report.trace.name} · Preheat report`;
  const links = drawn.map((one) => html("a", { href: `#${one.id}` }, one.querySelector("h2").textContent));
  return [first(report), links.length > 0 && html("nav", { "aria-label": "Sections" }, links), ...drawn];
}

function opened() {
  const failed = (why) => [html("p", { class: "failed" }, why)];
  let report = null;
  try {
    report = JSON.parse(document.getElementById("report").textContent);
  } catch (error) {
    return failed(`The report in this file is not JSON: ${error.message}`);
  }
  if (report?.schema === SCHEMA) return draw(report);
  return failed(`This page draws ${SCHEMA}; the report in it says its schema is ${report?.schema ?? "unknown"}.`);
}

document.getElementById("page").replaceChildren(...opened().filter(Boolean));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details.words").forEach((one) => { one.open = true; });
});
