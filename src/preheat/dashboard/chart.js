"use strict";
// Small charts in SVG. Text becomes text nodes only, so nothing in a report can become markup.

const make = (space, tag, attributes, children) => {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value != null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child != null && child !== false));
  return node;
};
const html = (tag, attributes, ...children) =>
  make("http://www.w3.org/1999/xhtml", tag, attributes, children);
const svg = (tag, attributes, ...children) =>
  make("http://www.w3.org/2000/svg", tag, attributes, children);

// Scales --------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function extent(numbers) {
  const [low, high] = numbers.filter(isNumber)
    .reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [Infinity, -Infinity]);
  return low <= high ? [low, high] : [0, 1];
}

// Round numbers from low to high, at most about `most` of them.
function ticks(low, high, most) {
  const rough = (high - low || 1) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

// 1, 2, 5, 10, … or, where that would be too many, powers of ten, or every few of them.
function logTicks(low, high, most) {
  let found = [];
  for (const [stride, factors] of [[1, [1, 2, 5]], [1, [1, 3]], [1, [1]], [2, [1]], [3, [1]], [6, [1]]]) {
    found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) {
      if (power % stride === 0) found.push(...factors.map((factor) => Number(`${factor}e${power}`)));
    }
    found = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (found.length <= most) break;
  }
  return found;
}

const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text) {
  ruler.font = "12px system-ui, sans-serif";
  return ruler.measureText(text).width;
}

// Who is who: a colour, a dash and a mark each, so that none of them is needed alone -------------

const MARKS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
  "M-4-4H4V4H-4z",
  "M0-5L5 4H-5z",
  "M0-5.5L5.5 0L0 5.5L-5.5 0z",
];

// Adds to each row its `look`: a class of page.css, numbered within its role.
function dressed(rows) {
  const counts = {};
  return rows.map((row) => {
    const role = ["ours", "baseline", "bound"].includes(row.role) ? row.role : "other";
    const n = counts[role] ?? 0;
    counts[role] = n + 1;
    const most = role === "other" ? 6 : 2;
    return { ...row, look: `${role}${(n % most) + 1}${n >= most ? " again" : ""}`, mark: MARKS[n % 4] };
  });
}

function swatch(row) {
  return svg("svg", { class: `swatch ${row.look}`, width: 30, height: 12, "aria-hidden": "true" },
    svg("path", { class: "line", d: "M1 6H29" }),
    svg("path", { class: "mark", d: row.mark, transform: "translate(15 6)" }));
}

// Bars: a row of text and a bar below it -------------------------------

// rows: {name, note, value, text, role}; the axis reaches to `least`, so that little looks little
function bars(rows, least = 0) {
  const [low, high] = extent(rows.flatMap((row) => [0, least, row.value]));
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const wide = (one, other) => `${(100 * Math.abs(one - other)) / (high - low || 1)}%`;
  return html("ul", { class: "bars" }, dressed(rows).map((row) => html("li", null,
    html("span", { class: "name" }, row.name, row.note && html("small", null, row.note)),
    html("span", { class: "value" }, row.text),
    svg("svg", { class: `bar ${row.look}`, height: 16, width: "100%", "aria-hidden": "true" },
      svg("rect", { class: "track", y: 3, height: 10, width: "100%" }),
      isNumber(row.value) && svg("rect", { class: row.value < 0 ? "fill loss" : "fill", y: 3, height: 10,
        x: at(Math.min(0, row.value)), width: wide(row.value, 0) }),
      low < 0 && svg("line", { class: "zero", x1: at(0), x2: at(0), y1: 0, y2: 16 })))));
}

// Ranges: several dots a row on one logarithmic axis ---------------------------------------------

// rows: {name, note, values: [{value, mark}], text, role}
function ranges(rows, format) {
  const values = rows.flatMap((row) => row.values.map((dot) => dot.value)).filter((value) => value > 0);
  let [low, high] = values.length ? extent(values) : [1, 10];
  [low, high] = [low / 1.3, high * 1.3];
  const part = (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low);
  const at = (value) => `${100 * part(value)}%`;
  const anchor = (value) => (part(value) < 0.07 ? "start" : part(value) > 0.93 ? "end" : "middle");
  const marks = logTicks(low, high, 5);
  const grid = () => marks.map((tick) =>
    svg("line", { class: "grid", x1: at(tick), x2: at(tick), y1: 0, y2: "100%" }));
  return html("ul", { class: "bars ranges" }, dressed(rows).map((row) => {
    const known = row.values.filter((dot) => dot.value >= 0);   // 0 stands at the left edge
    const [least, most] = extent(known.map((dot) => dot.value));
    return html("li", null,
      html("span", { class: "name" }, row.name, row.note && html("small", null, row.note)),
      html("span", { class: "value" }, row.text),
      svg("svg", { class: `bar ${row.look}`, height: 20, width: "100%", "aria-hidden": "true" },
        grid(),
        known.length > 1 && svg("line", { class: "span", x1: at(least), x2: at(most), y1: 10, y2: 10 }),
        known.map((dot) => svg("svg", { x: at(dot.value), y: 10, overflow: "visible" },
          svg("path", { class: "mark", d: MARKS[dot.mark] })))));
  }), html("li", { "aria-hidden": "true" },
    svg("svg", { class: "bar", height: 18, width: "100%" },
      marks.map((tick) => svg("text", { x: at(tick), y: 13, "text-anchor": anchor(tick) }, format(tick))))));
}

// Lines --------------------------------------------------------------------------------------------

// At most a few points for each pixel: first, least, most and last keep every peak in sight.
function thinned(points, width) {
  if (points.length <= width * 2) return points;
  const columns = new Map();
  for (const point of points) {
    const column = Math.floor(point[0]);
    const kept = columns.get(column);
    if (!kept) columns.set(column, [point, point, point, point]);
    else {
      if (point[1] < kept[1][1]) kept[1] = point;
      if (point[1] > kept[2][1]) kept[2] = point;
      kept[3] = point;
    }
  }
  return [...columns.values()].flatMap((kept) => [...new Set(kept)].sort((a, b) => a[0] - b[0]));
}

// All points of a short line; of a long one some, at other places for each line.
function marked(points, order) {
  const stride = points.length <= 12 ? 1 : Math.ceil(points.length / 7);
  return points.filter(([, y], n) => isNumber(y) && n % stride === Math.floor(order * stride / 4) % stride);
}

// A line through the points; it breaks where a value is missing.
const pathOf = (points) => points.map(([x, y], n) => {
  const step = n > 0 && isNumber(points[n - 1][1]) ? "L" : "M";
  return isNumber(y) ? `${step}${x.toFixed(1)} ${y.toFixed(1)}` : "";
}).join("");

// The place in ascending `xs` that is nearest to `x`.
function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// x, y: {label, format, log}; rows: {name, role, xs, ys}; event: an x where something happened
function lines({ label, x, y, rows, event }) {
  const series = dressed(rows);
  const stops = [...new Set(rows.flatMap((row) => row.xs))].sort((a, b) => a - b);
  const [x0, x1] = extent(stops);
  const isLog = x.log && x0 > 0 && x1 > x0;
  const top = Math.max(0, extent(rows.flatMap((row) => row.ys))[1]) || 1;
  const bottom = Math.min(0, extent(rows.flatMap((row) => row.ys))[0]);
  const tip = html("div", { class: "tip", hidden: true });
  const spoken = html("div", { class: "unseen", "aria-live": "polite" });
  const plot = html("div", { class: "plot" });
  let place = null;   // what turns values into pixels, as last drawn
  let stop = -1;      // which of `stops` is pointed at

  function draw() {
    const width = plot.clientWidth;
    if (!width || place?.width === width) return;
    const height = Math.round(Math.min(360, Math.max(230, width * 0.45)));
    const yTicks = ticks(bottom, top * 1.04, 5);
    const left = Math.ceil(Math.max(...yTicks.map((tick) => textWidth(y.format(tick))))) + 10;
    const right = width - 16;
    const base = height - 42;
    const head = y.label ? 24 : 8;
    const toX = isLog
      ? (value) => left + ((right - left) * Math.log(value / x0)) / Math.log(x1 / x0)
      : (value) => left + ((right - left) * (value - x0)) / (x1 - x0 || 1);
    const ceiling = Math.max(top * 1.04, yTicks.at(-1));
    const toY = (value) => head + ((base - head) * (ceiling - value)) / (ceiling - bottom);
    const room = Math.max(2, Math.floor((right - left) / 64));
    const xTicks = isLog ? logTicks(x0, x1, room) : ticks(x0, x1, room);
    place = { width, toX, pixels: stops.map(toX) };
    plot.replaceChildren(
      svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
        "aria-label": `${label}. Left and right arrow keys read the values.` },
        svg("text", { class: "axis", x: 0, y: 12 }, y.label),
        svg("text", { class: "axis", x: right, y: height - 4, "text-anchor": "end" }, x.label),
        yTicks.map((tick) => [
          svg("line", { class: tick ? "grid" : "zero", x1: left, x2: right, y1: toY(tick), y2: toY(tick) }),
          svg("text", { x: left - 7, y: toY(tick) + 4, "text-anchor": "end" }, y.format(tick))]),
        xTicks.map((tick) => [
          svg("line", { class: "grid", x1: toX(tick), x2: toX(tick), y1: base, y2: base + 5 }),
          svg("text", { x: toX(tick), y: base + 19, "text-anchor": "middle" }, x.format(tick))]),
        isNumber(event) && svg("line", { class: "event", x1: toX(event), x2: toX(event), y1: head, y2: base }),
        series.map((row, order) => {
          const points = row.xs.map((value, n) => [toX(value), isNumber(row.ys[n]) ? toY(row.ys[n]) : NaN]);
          return svg("g", { class: row.look },
            svg("path", { class: "line", d: pathOf(thinned(points, right - left)) }),
            marked(points, order).map(([a, b]) =>
              svg("path", { class: "mark", d: row.mark, transform: `translate(${a} ${b})` })));
        }),
        svg("line", { class: "cursor", y1: head, y2: base, visibility: "hidden" })));
    point(-1);
  }

  function point(n) {
    stop = n;
    const cursor = plot.querySelector(".cursor");
    tip.hidden = n < 0;
    cursor?.setAttribute("visibility", n < 0 ? "hidden" : "visible");
    if (n < 0 || !cursor) return;
    const pixel = place.pixels[n];
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    const read = series.map((row) => {
      const near = nearest(row.xs, stops[n]);
      const isHere = row.xs.length && Math.abs(place.toX(row.xs[near]) - pixel) < 12;
      return { row, value: isHere ? row.ys[near] : null };
    }).filter(({ value }) => isNumber(value)).sort((a, b) => b.value - a.value);
    const where = `${x.format(stops[n])} ${x.unit ?? ""}`.trim();
    tip.replaceChildren(html("strong", null, where), ...read.map(({ row, value }) =>
      html("div", null, swatch(row), html("span", null, row.name), html("b", null, y.format(value)))));
    const side = pixel > place.width / 2 ? pixel - tip.offsetWidth - 14 : pixel + 14;
    tip.style.left = `${Math.max(0, Math.min(side, place.width - tip.offsetWidth))}px`;
    const values = read.map(({ row, value }) => `${row.name} ${y.format(value)}`);
    spoken.textContent = `${where}: ${values.join(", ")}`;
  }

  plot.addEventListener("pointermove", (move) => {
    if (!place || !stops.length) return;
    const pixel = move.clientX - plot.getBoundingClientRect().left;
    point(nearest(place.pixels, pixel));
  });
  plot.addEventListener("pointerleave", () => point(-1));
  plot.addEventListener("focusout", () => point(-1));
  plot.addEventListener("keydown", (key) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key.key];
    if (key.key === "Escape") point(-1);
    if (!step) return;
    key.preventDefault();
    point(Math.max(0, Math.min(stops.length - 1, stop + step)));
  });
  new ResizeObserver(draw).observe(plot);
  return html("div", { class: "chart" },
    html("ul", { class: "legend" }, series.map((row) => html("li", null, swatch(row), row.name))),
    html("div", { class: "stage" }, plot, tip), spoken);
}
