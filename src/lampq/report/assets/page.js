"use strict";
/* The headline, the layer that is looked into, the options of the run, and the start of it all. */

/* ---- headline ---- */

function card(title, big, small, rows) {
  return make(
    "div",
    { class: "card" },
    make("h2", {}, title),
    make("div", { class: known(big) ? "big" : "big none" }, known(big) ? big : "not measured"),
    make("p", { class: "small" }, small),
    rows.length
      ? make("table", {}, make("tbody", {}, ...rows.map(([name, ...values]) =>
          make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value))))))
      : null,
  );
}

function difference(points, better = 1) {
  return make("span", { class: better * points < 0 ? "bad" : "good" }, signed(points, 2));
}

function accuracyCard() {
  const { title, unit, images, values } = RUN.measured;
  const own = values.mixed;
  const better = unit ? 1 : -1;
  const rows = [["uniform", values.uniform], ["float32", values.fp32], ["before training", values.before_reconstruction]]
    .filter(([, score]) => score && known(score.value))
    .map(([name, score]) => [name, fixed(score.value, 2), difference(own.value - score.value, better)]);
  const spread = known(own.interval) ? `± ${fixed(own.interval, 2)}, ` : "";
  const about = known(images) ? `${spread}${images} images` : "no evaluation pictures were given";
  return card(title, known(own.value) ? `${fixed(own.value, 2)}${unit}` : null, about, rows);
}

function sizeCard() {
  const { fp32, uniform, mixed } = RUN.bytes;
  return card("Size of the file", megabytes(mixed), `${(fp32 / mixed).toFixed(1)} times smaller than float32`, [
    ["uniform", megabytes(uniform)],
    ["float32", megabytes(fp32)],
  ]);
}

function bitsCard() {
  const { bits } = RUN;
  return card(
    "Mean bits",
    `${short(bits.mean_weight_searched)} / ${short(bits.mean_activation_searched)}`,
    `weights / inputs, budget ${short(bits.target)}${known(bits.target_activation) ? ` / ${short(bits.target_activation)}` : ""}`,
    [
      ["uniform", short(RUN.uniform_bits)],
      ["whole model", short(bits.mean_weight_all)],
      ...(bits.first_tokens ? [["inputs, class token", String(bits.first_tokens.bits)]] : []),
    ],
  );
}

function speedCard() {
  const speed = RUN.speed;
  if (!speed) {
    return card("Speed", null, RUN.unmeasured_speed, []);
  }
  const time = (value) => `${short(value)} ms`;
  const rows = [["uniform", speed.uniform], ["float32", speed.fp32]]
    .filter(([, value]) => known(value))
    .map(([name, value]) => [name, time(value)]);
  const factor = known(speed.fp32) ? `${(speed.fp32 / speed.mixed).toFixed(2)} times the speed of float32` : "for one image";
  return card("Time for one image", time(speed.mixed), [factor, speed.note].filter(Boolean).join("; "), rows);
}

function buildHeadline() {
  const { config } = RUN;
  const parts = [`method ${config.method}`, `metric ${config.metric}`, `allocator ${config.allocator}`, `preset ${config.preset}`];
  if (config.profile === "speed") parts.push("profile speed");
  if (config.reconstruct) parts.push(`reconstructed by ${config.reconstruct}`);
  parts.push(`seed ${config.seed}`, `lampq ${RUN.versions.lampq}`);
  byId("lead").textContent = parts.join(" · ");
  byId("notices").append(...RUN.notices.map((text) => make("p", { class: "notice", role: "note" }, text)));
  byId("cards").append(accuracyCard(), sizeCard(), bitsCard(), speedCard());
}

/* ---- one layer ---- */

function buildPicker() {
  const select = byId("pick");
  RUN.stages.forEach((rows, stage) => {
    for (const row of rows) {
      const numbers = Object.values(row.layers).flat();
      const where = RUN.stages.length > 1 ? `stage ${stage + 1}, ` : "";
      const name = row.block >= 0 ? `${where}block ${row.block}` : roleName(RUN.layers[numbers[0]].role);
      const group = make("optgroup", { label: name });
      for (const number of numbers) group.append(make("option", { value: String(number) }, RUN.layers[number].name));
      select.append(group);
    }
  });
  select.addEventListener("change", () => chooseLayer(Number(select.value)));
  const order = [...select.options].map((option) => Number(option.value));
  const step = (by) => {
    const place = order.indexOf(shown.layer) + by;
    chooseLayer(order[(place + order.length) % order.length]);
  };
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
}

function buildLayer() {
  const body = byId("layer-body");
  if (!RUN.histograms) {
    body.append(paragraph("This run folder has no histograms.json: it was made by an older version, or the file was removed."));
    return;
  }
  body.append(
    make(
      "div",
      { class: "charts" },
      figure("weights", "Weights", "", "Histogram of the weights with the levels of their quantizer", () => histogramOf("weight")),
      figure("inputs", "Inputs", "", "Histogram of the inputs with the levels of their quantizer", () => histogramOf("input")),
    ),
    paragraph(
      "As the quantizers see them, at the widths of this run: after folding into a norm, and before any training. " +
        `Inputs are those of at most ${RUN.histograms.tokens} calibration tokens, drawn as for the fits. The tail of one in a thousand at either end may be outside.`,
    ),
  );
}

function levelsOf(entry) {
  const { levels } = entry;
  return Array.isArray(levels) ? levels : Array.from({ length: levels.count }, (_, i) => levels.first + i * levels.step);
}

function gridOwner(part, entry) {
  if (entry.kind.startsWith("token")) return "token";
  return part === "weight" ? "row" : "channel";
}

function histogramOf(part) {
  const layer = RUN.layers[shown.layer];
  const entry = (RUN.histograms.layers[layer.name] || {})[part];
  if (!entry) {
    return { type: "line", data: { datasets: [] }, options: options({ x: axis("not quantized"), y: axis(""), label: () => "", legend: false }) };
  }
  const { low, high, counts, unit } = entry;
  const step = (high - low) / counts.length;
  const total = counts.reduce((sum, count) => sum + count, entry.below + entry.above);
  const shares = counts.map((count) => (100 * count) / total);
  const bars = counts.map((count, i) => ({ x: low + (i + 0.5) * step, y: shares[i] }));
  const edges = [{ x: low, y: 0 }, ...bars, { x: high, y: 0 }];
  const top = Math.max(...shares);
  return {
    data: {
      datasets: [
        line("levels", uprights(levelsOf(entry), 0, 1.06 * top), faded(colour("level"), entry.bits > 5 ? 0.45 : 0.9), {
          borderWidth: entry.bits > 5 ? 1 : 1.5, pointHitRadius: 0,
        }),
        line(part === "weight" ? "weights" : "inputs", edges, colour("accent"), {
          stepped: "middle", fill: "origin", backgroundColor: faded(colour("fill"), 0.75), borderWidth: 1, pointHitRadius: 6, pointStyle: "rect",
        }),
      ],
    },
    options: options({
      x: axis(unit === "step" ? `in steps of the grid of each ${gridOwner(part, entry)}` : "value", { min: low, max: high, grid: { display: false } }),
      y: axis("share [%]", { min: 0, max: 1.06 * top }),
      label: ({ raw, dataset }) => (dataset.label === "levels" ? `level ${short(raw.x)}` : `${short(raw.x)}: ${short(raw.y)} %`),
    }),
  };
}

function histogramNote(part) {
  const layer = RUN.layers[shown.layer];
  const entry = (RUN.histograms.layers[layer.name] || {})[part];
  if (!entry) return `The ${part} is not quantized.`;
  const outside = entry.below + entry.above;
  const total = outside + entry.counts.reduce((sum, count) => sum + count, 0);
  const rest = outside ? ` ${short((100 * outside) / total, 2)} % lie outside the picture.` : "";
  const found = entry.kind.startsWith("token") ? " One range per token, found at run time." : "";
  return `${plural(levelsOf(entry).length, "level")} (${entry.kind}, ${plural(entry.bits, "bit")}).${found}${rest}`;
}

function chooseLayer(number) {
  shown.layer = number;
  byId("pick").value = String(number);
  showMap();
  const layer = RUN.layers[number];
  const place = PLACE.get(layer.name);
  const entry = RUN.histograms && RUN.histograms.layers[layer.name];
  const costs = layer.searched && RUN.sensitivity
    ? RUN.sensitivity.choices.map((bits, i) => `${widths(bits)}: ${short(RUN.sensitivity.cost[place][i], 2)}`).join(" · ")
    : null;
  facts(byId("layer-facts"), [
    ["Role", roleName(layer.role)],
    ["Weights", layer.params.toLocaleString("en")],
    ["Bits in this run", `${layer.bits[0]} weight, ${layer.bits[1]} input`],
    ["Relative output error", entry ? short(entry.error) : null],
    ["Cost at each width", costs, "wide"],
  ]);
  for (const [key, part] of [["weights", "weight"], ["inputs", "input"]]) {
    if (!charts.has(key)) continue;
    const { canvas, chart } = charts.get(key);
    const note = histogramNote(part);
    canvas.closest("figure").querySelector("figcaption").textContent = note;
    canvas.setAttribute("aria-label", `Histogram of the ${key} of ${layer.name}. ${note}`);
    if (chart) paint(key);
  }
}

/* ---- the run ---- */

function madeBy(synthesis) {
  return synthesis ? `, made from the model alone (${synthesis.settings.recipe})` : "";
}

function buildAbout() {
  const seconds = Object.entries(RUN.seconds).filter(([, value]) => value > 0);
  const pairs = (object) => Object.entries(object).map(([name, value]) => [name, text(value)]);
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const { solver, reconstruction } = RUN;
  const list = make("dl", { class: "facts" });
  facts(list, [
    ["Solver", `${solver.status}${solver.proven_optimal ? ", proved" : ""}`],
    ["Time", `${short(seconds.reduce((sum, [, value]) => sum + value, 0))} s`],
    ["By stage", seconds.map(([name, value]) => `${name} ${short(value, 2)} s`).join(" · "), "wide"],
    ["Calibration images", known(RUN.data.calibration_images) ? `${RUN.data.calibration_images}${madeBy(RUN.data.synthesis)}` : null],
    ["Reconstruction", reconstruction ? `${reconstruction.name}, ${reconstruction.kept ? "kept" : "not kept"}` : null],
  ]);
  byId("about-body").append(
    list,
    valuesBehind("Options", ["option", "value"], () => pairs(RUN.config)),
    valuesBehind("Data", ["name", "value"], () => pairs(RUN.data)),
    valuesBehind("Versions", ["package", "version"], () => pairs(RUN.versions)),
    make("p", { class: "hint" }, "Charts by Chart.js (MIT licence, in the source of this page)."),
  );
}

/* ---- theme and start ---- */

function showTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
}

function changeTheme(name) {
  showTheme(name);
  paintAll();
  showPlan();
}

function start() {
  showTheme(document.documentElement.dataset.theme);
  byId("theme").addEventListener("click", () =>
    changeTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  );
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) =>
    changeTheme(event.matches ? "dark" : "light"),
  );
  byId("download").addEventListener("click", download);
  buildHeadline();
  buildSources();
  buildMap();
  buildLegend();
  buildTradeoff();
  buildPicker();
  buildLayer();
  buildSensitivity();
  buildMeasured();
  buildExchanges();
  buildAbout();
  const first = RUN.layers.findIndex((layer) => layer.searched);
  chooseLayer(first);
  showPlan();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  setTimeout(() => paintAll(), 0);
}

start();
