"use strict";
/* Sensitivity, predicted against measured, exchanges. */

const MEASURES = {
  accuracy: { name: "accuracy [%]", sign: 1, meaning: "accuracies on calibration images; higher is better" },
  loss: { name: "loss", sign: -1, meaning: "losses on calibration images; lower is better" },
  kl: {
    name: "KL divergence",
    sign: -1,
    meaning: "KL divergences from the float model on calibration images; lower is better",
  },
  ap: { name: "AP [%]", sign: 1, meaning: "means of box and mask AP on calibration images; higher is better" },
};

function roleOf(number) {
  return SEARCHED[number].role;
}

/* ---- sensitivity ---- */

function byRole(values) {
  return ROLES.map((role) => ({
    role,
    data: SEARCHED.map((layer, i) => ({ x: layer.block, y: values[i], name: layer.name }))
      .filter((_, i) => SEARCHED[i].role === role && SEARCHED[i].block >= 0),
  })).filter(({ data }) => data.length);
}

function roleFigure(key, title, caption, axisTitle, values) {
  const describe = byRole(values())
    .map(({ role, data }) => `${role} ${short(Math.min(...data.map((d) => d.y)))} to ${short(Math.max(...data.map((d) => d.y)))}`)
    .join(", ");
  return figure(key, title, caption, `${title}, by block and role: ${describe}`, () => ({
    data: {
      datasets: byRole(values()).map(({ role, data }) =>
        line(role, data, colour(role), {
          borderDash: DASHES[role], pointRadius: 4.5, pointHitRadius: 10, pointHoverRadius: 7, pointStyle: SHAPES[role], borderWidth: 1.75,
        }),
      ),
    },
    options: options({
      x: axis("block", { ticks: { stepSize: 1, precision: 0 } }),
      y: costAxis(axisTitle, values()),
      label: ({ raw }) => `${raw.name}: ${short(raw.y, 4)}`,
    }),
  }));
}

function buildSensitivity() {
  const body = byId("sensitivity-body");
  const found = RUN.sensitivity;
  if (!found) {
    body.append(paragraph("The plan was given: the run measured no sensitivity."));
    return;
  }
  const rows = () => SEARCHED.map((layer, i) => [layer.name, layer.role, ...(found.before ? [found.before[i], found.after[i]] : []), ...found.cost[i]]);
  const columns = ["layer", "role", ...(found.before ? ["before", "after"] : []), ...found.choices.map((bits) => `cost at ${widths(bits)}`)];
  if (found.before) {
    const factors = Object.entries(found.role_scale).map(([role, value]) => `${role} ${short(value)}`).join(", ");
    body.append(
      paragraph(
        "Fisher traces of different roles have different scales and cannot be compared. A factor for " +
          `each role, from probes of single layers, makes them comparable: ${factors}.`,
      ),
      make(
        "div",
        { class: "charts" },
        roleFigure("before", "Before type scaling", "Trace of the Fisher matrix.", "trace", () => found.before),
        roleFigure("after", "After type scaling", "Trace times the factor of its role.", "trace × factor", () => found.after),
      ),
      valuesBehind("Sensitivities as a table", columns, rows),
    );
    return;
  }
  const target = RUN.bits.target;
  let chosen = found.choices.reduce((best, [weight], i) => (weight <= target ? i : best), 0);
  const select = make("select", { id: "width" });
  found.choices.forEach((bits, i) => select.append(make("option", { value: String(i) }, `${widths(bits)} bits`)));
  select.value = String(chosen);
  select.addEventListener("change", () => {
    chosen = Number(select.value);
    paint("cost");
  });
  const unit = METRIC_UNITS[RUN.config.metric];
  body.append(
    paragraph(
      `The metric ${RUN.config.metric} has no role factors: its costs are in one unit for all roles` +
        `${unit ? ` (${unit})` : ""}, so there is no before and after. The metric fisher has them.`,
    ),
    make("div", { class: "controls" }, make("label", { for: "width" }, "Cost of each layer at"), select),
    roleFigure("cost", "Cost by block", "What quantizing this layer alone is expected to cost.", "cost", () => found.cost.map((row) => row[chosen])),
    valuesBehind("Costs as a table", columns, rows),
  );
}

/* ---- predicted and measured ---- */

function roleDots(points) {
  return ROLES.map((role) => ({ role, data: points.filter((p) => roleOf(p.layer) === role) }))
    .filter(({ data }) => data.length)
    .map(({ role, data }) => dots(role, data, colour(role), { pointStyle: SHAPES[role], pointRadius: 6 }));
}

function layerScatter(key, title, caption, xTitle, yTitle, points) {
  return figure(key, title, caption, `${title}: ${plural(points.length, "layer")}, rank correlation ${fixed(rankCorrelation(points), 2)}`, () => ({
    data: { datasets: roleDots(points) },
    options: options({
      x: costAxis(xTitle, points.map((p) => p.x)),
      y: costAxis(yTitle, points.map((p) => p.y)),
      label: ({ raw }) => `${SEARCHED[raw.layer].name}: predicted ${short(raw.x)}, measured ${short(raw.y)}`,
    }),
  }));
}

/* Spearman's: of the ranks, equal values sharing theirs. */
function rankCorrelation(points) {
  if (points.length < 3) return null;
  const ranks = (values) => values.map((v) => mean(values.flatMap((w) => (w < v ? [1, 1] : w === v ? [0.5, 0.5] : [0, 0]))));
  const [a, b] = [ranks(points.map((p) => p.x)), ranks(points.map((p) => p.y))];
  const [ma, mb] = [mean(a), mean(b)];
  const product = (u, mu, v, mv) => u.reduce((sum, value, i) => sum + (value - mu) * (v[i] - mv), 0);
  const spread = Math.sqrt(product(a, ma, a, ma) * product(b, mb, b, mb));
  return spread ? product(a, ma, b, mb) / spread : null;
}

function correlationText(points) {
  const found = rankCorrelation(points);
  return known(found) ? ` Rank correlation ${trueMinus(fixed(found, 2))}.` : "";
}

function buildMeasured() {
  const body = byId("measured-body");
  const figures = [];
  if (RUN.probes) {
    const points = RUN.probes.layers.map((p) => ({ x: p.predicted, y: p.measured, layer: p.layer })).filter((p) => known(p.y));
    figures.push(
      layerScatter(
        "probes",
        `Probes at ${plural(RUN.probes.bits, "bit")}`,
        `One layer quantized, all else in float: scaled trace against the measured harm (${RUN.probes.signal}). The role factors come from these probes.${correlationText(points)}`,
        "scaled trace",
        `harm (${RUN.probes.signal})`,
        points,
      ),
    );
  }
  const errors = errorPoints();
  if (errors.length) {
    figures.push(
      layerScatter(
        "errors",
        "Cost and output error of each layer",
        `At the widths of the run. The error is that of the layer's output relative to the output, on calibration tokens. A layer above the others' trend is cheap for its error.${correlationText(errors)}`,
        "predicted cost",
        "relative output error",
        errors,
      ),
    );
  }
  const moves = RUN.exchanges.steps
    .filter((step) => known(step.predicted) && known(step.gained))
    .map((step) => ({ x: -step.predicted, y: step.gained, accepted: step.accepted, step }));
  if (moves.length) figures.push(exchangeScatter(moves));
  if (!figures.length) {
    body.append(paragraph("The run measured nothing layer by layer: its plan was given, or its files are of an older version."));
    return;
  }
  body.append(make("div", { class: "charts" }, ...figures));
}

function errorPoints() {
  if (!RUN.histograms || !RUN.sensitivity) return [];
  const columns = RUN.sensitivity.choices.map(widths);
  return SEARCHED.map((layer, i) => {
    const entry = RUN.histograms.layers[layer.name];
    const column = columns.indexOf(widths(RUN.plans.run.widths[i]));
    if (!entry || column < 0) return null;
    return { x: RUN.sensitivity.cost[i][column], y: entry.error, layer: i };
  }).filter(known);
}

function exchangeScatter(moves) {
  const of = (accepted) => moves.filter((move) => move.accepted === accepted);
  return figure(
    "moves",
    "Exchanges: expected and real gain",
    `Fall of the predicted cost against the measured rise of the score (${RUN.exchanges.measure}). Above zero the exchange helped.${correlationText(moves)}`,
    `Predicted against measured gain of ${plural(moves.length, "exchange")}, ${of(true).length} accepted`,
    () => ({
      data: {
        datasets: [
          dots("accepted", of(true), colour("good"), { pointStyle: "circle", pointRadius: 6 }),
          dots("rejected", of(false), colour("bad"), { pointStyle: "crossRot", pointRadius: 6, borderWidth: 2 }),
        ],
      },
      options: options({
        x: axis("predicted fall of the cost"),
        y: axis("measured rise of the score", { grid: { color: (c) => (c.tick && c.tick.value === 0 ? colour("muted") : colour("grid")) } }),
        label: ({ raw }) => `${raw.step.widened.join(", ")} wider: predicted ${short(raw.x)}, measured ${short(raw.y)}`,
      }),
    }),
  );
}

/* ---- exchanges ---- */

function buildExchanges() {
  const body = byId("exchanges-body");
  const { steps, start, uniform, measure } = RUN.exchanges;
  if (!steps.length) {
    body.append(paragraph("No exchange was tried in this run."));
    return;
  }
  const { name, sign, meaning } = MEASURES[measure];
  const accepted = steps.filter((step) => step.accepted).length;
  const tried = steps.map((step, i) => ({ x: i + 1, y: sign * step.score, step }));
  let best = start;
  const course = known(start) ? [{ x: 0, y: sign * start }] : [];
  steps.forEach((step, i) => {
    if (step.accepted) best = step.score;
    if (known(best)) course.push({ x: i + 1, y: sign * best });
  });
  body.append(
    paragraph(`${plural(steps.length, "exchange")} of bits between layers tried, ${accepted} accepted. Scores are ${meaning}.`),
    figure("course", `Score of every attempt: ${name}`, null, `${name} of ${plural(steps.length, "attempt")}, ${accepted} accepted; values in the table below`, () => ({
      data: {
        datasets: [
          dots("accepted", tried.filter((t) => t.step.accepted), colour("good"), { pointStyle: "circle", pointRadius: 6 }),
          dots("rejected", tried.filter((t) => !t.step.accepted), colour("bad"), { pointStyle: "crossRot", pointRadius: 6, borderWidth: 2 }),
          line("best so far", course, colour("accent"), { stepped: "before" }),
          line("uniform plan", [{ x: 0, y: sign * uniform }, { x: steps.length, y: sign * uniform }], colour("text"), { borderDash: [5, 4], borderWidth: 1.5 }),
        ],
      },
      options: options({
        x: axis("attempt", { min: 0, max: steps.length + 0.5, ticks: { precision: 0 } }),
        y: axis(name),
        label: ({ raw }) => `${raw.step ? changesText(raw.step) : ""} ${short(raw.y, 4)}`,
      }),
    })),
    valuesBehind("Exchanges as a table", ["attempt", "change", "score", "accepted", "mean weight bits"], () =>
      steps.map((step, i) => [String(i + 1), changesText(step), trueMinus(short(step.score, 5)), step.accepted ? "yes" : "no", step.mean_weight_bits]),
    ),
  );
}

function changesText(step) {
  if (step.changes) {
    return Object.entries(step.changes).map(([name, { from, to }]) => `${name} ${widths(from)} → ${widths(to)}`).join(", ");
  }
  return [...step.widened.map((name) => `${name} wider`), ...step.narrowed.map((name) => `${name} narrower`)].join(", ");
}
