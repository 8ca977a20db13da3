"use strict";
/* Numbers as text, elements, and charts in the colours of the theme. No string of the run is ever
   read as markup: all of them go in as text. */

const RUN = JSON.parse(document.getElementById("content").textContent);
const ROLES = ["qkv", "proj", "fc1", "fc2"];
// a shape beside a colour: roles can be told apart without seeing colours
const SHAPES = { qkv: "circle", proj: "triangle", fc1: "rect", fc2: "rectRot" };
const DASHES = { qkv: [], proj: [6, 3], fc1: [2, 3], fc2: [9, 3, 2, 3] };

const RAISED = Object.fromEntries([..."-0123456789"].map((sign, i) => [sign, "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"[i]]));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function known(value) {
  return value !== null && value !== undefined;
}

function fixed(value, digits) {
  return known(value) ? value.toFixed(digits) : "–";
}

function short(value, digits = 3) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    const [lead, power] = value.toExponential(digits - 1).split("e");
    const raised = [...String(Number(power))].map((sign) => RAISED[sign]).join("");
    return `${Number(lead) === 1 ? "" : `${Number(lead)}×`}10${raised}`;
  }
  return String(Number(value.toPrecision(digits)));
}

function signed(value, digits) {
  // a true minus sign, as wide as the plus
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}

function megabytes(bytes) {
  const size = bytes / 1e6;
  return `${size >= 100 ? size.toFixed(0) : size >= 1 ? size.toFixed(2) : size.toFixed(3)} MB`;
}

function widths([weight, activation]) {
  return weight === activation ? String(weight) : `${weight}/${activation}`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function facts(list, entries) {
  list.replaceChildren(
    ...entries
      .filter(([, value]) => known(value))
      .map(([name, value, kind = ""]) =>
        make("div", { class: kind }, make("dt", {}, name), make("dd", {}, value.replace(/: /g, ":\u00a0"))),
      ),
  );
}

/* A table behind a disclosure: what a chart shows, for those who cannot see it. It is filled when it
   is opened. */
function valuesBehind(title, columns, rows) {
  const box = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  const details = make("details", {}, make("summary", {}, title), box);
  details.addEventListener("toggle", () => {
    if (details.open && !box.firstChild) box.append(table(columns, rows()));
  });
  return details;
}

function table(columns, rows) {
  const numeric = columns.map((_, i) => rows.every((row) => typeof row[i] !== "string"));
  const cell = (tag, value, i) =>
    make(
      tag,
      { ...(numeric[i] ? { class: "number" } : {}), ...(tag === "th" ? { scope: "col" } : {}) },
      typeof value === "number" ? short(value, 5) : known(value) ? value : "–",
    );
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, ...columns.map((name, i) => cell("th", name, i)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((v, i) => cell("td", v, i))))),
  );
}

/* ---- charts ---- */

const charts = new Map();

function trueMinus(text) {
  return text.replace(/-/g, "−");
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function faded(hex, share) {
  return hex + Math.round(share * 255).toString(16).padStart(2, "0");
}

function axis(title, more = {}) {
  const { ticks = {}, ...rest } = more;
  return {
    type: "linear",
    title: { display: true, text: title, color: colour("muted"), font: { size: 12 } },
    grid: { color: colour("grid") },
    border: { color: colour("line") },
    ticks: {
      color: colour("muted"),
      maxRotation: 0,
      autoSkipPadding: 14,
      includeBounds: false,
      callback: (value) => trueMinus(short(value, 4)),
      ...ticks,
    },
    ...rest,
  };
}

/* A logarithmic axis if all values allow one, with few and round numbers on it. */
function costAxis(title, values) {
  const shown = values.filter(known);
  if (!shown.length || Math.min(...shown) <= 0) return axis(title);
  const decades = Math.log10(Math.max(...shown) / Math.min(...shown));
  const leads = decades > 2.2 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.ceil(decades / 7) || 1;
  return axis(title, {
    type: "logarithmic",
    afterBuildTicks(scale) {
      const ticks = [];
      for (let power = Math.floor(Math.log10(scale.min)); 10 ** power <= scale.max; power += 1) {
        if (power % every) continue;
        ticks.push(...leads.map((lead) => Number(`${lead}e${power}`)));
      }
      scale.ticks = ticks
        .filter((value) => value >= scale.min && value <= scale.max)
        .map((value) => ({ value }));
    },
  });
}

function options({ x, y, label, legend = true, onClick, legendFilter }) {
  return {
    animation: false,
    responsive: true,
    maintainAspectRatio: false,
    interaction: { mode: "nearest", intersect: true },
    scales: { x, y },
    onClick,
    plugins: {
      legend: {
        display: legend,
        position: "bottom",
        align: "start",
        onClick: null,
        labels: {
          color: colour("text"),
          usePointStyle: true,
          boxHeight: 7,
          padding: 14,
          filter: legendFilter,
        },
      },
      tooltip: {
        backgroundColor: colour("text"),
        titleColor: colour("card"),
        bodyColor: colour("card"),
        displayColors: false,
        callbacks: { title: () => "", label: (item) => trueMinus(label(item)) },
      },
    },
  };
}

/* A figure with an empty canvas; `draw` gives the configuration of its chart, now and whenever the
   theme changes. */
function figure(key, title, caption, describe, draw) {
  const canvas = make("canvas", { id: `chart-${key}`, role: "img", "aria-label": describe });
  const element = make(
    "figure",
    {},
    make("h3", {}, title),
    make("div", { class: "canvas" }, canvas),
    known(caption) ? make("figcaption", {}, caption) : null,
  );
  charts.set(key, { canvas, draw, chart: null });
  return element;
}

function paint(key) {
  const entry = charts.get(key);
  if (!entry) return;
  if (entry.chart) entry.chart.destroy();
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  entry.chart = new Chart(entry.canvas, entry.draw());
}

/* One chart after the other, so that the page can be used meanwhile. */
function paintAll(keys = [...charts.keys()]) {
  if (!keys.length) {
    document.documentElement.dataset.painted = String(Math.round(performance.now()));
    return;
  }
  paint(keys[0]);
  setTimeout(() => paintAll(keys.slice(1)), 0);
}

/* Short vertical lines, as one line with gaps. */
function uprights(at, from, to) {
  return at.flatMap((x, i) => [
    { x, y: Array.isArray(from) ? from[i] : from },
    { x, y: Array.isArray(to) ? to[i] : to },
    { x: NaN, y: NaN },
  ]);
}

function line(label, data, color, more = {}) {
  return {
    type: "line",
    label,
    data,
    borderColor: color,
    backgroundColor: color,
    borderWidth: 2,
    pointRadius: 0,
    pointHitRadius: 0,
    pointStyle: "line",
    ...more,
  };
}

function dots(label, data, color, more = {}) {
  return {
    type: "scatter",
    label,
    data,
    borderColor: color,
    backgroundColor: color,
    pointRadius: 5,
    pointHoverRadius: 7,
    pointHitRadius: 8,
    ...more,
  };
}
