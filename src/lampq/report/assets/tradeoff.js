"use strict";
/* File size against predicted cost and measured accuracy. */

const METRIC_UNITS = {
  output: "expected KL divergence",
  kl: "measured KL divergence of one layer",
  loss: "measured rise of the loss of one layer",
  recon: "relative output error",
  fisher: "scaled Fisher trace with penalty",
  hawq: "curvature × squared change",
  nuclear: "nuclear norm × squared error",
};

function paragraph(text) {
  return make("p", { class: "hint" }, text);
}

function sizeRange() {
  const plans = RUN.frontier ? [...RUN.frontier.plans, ...RUN.frontier.uniform] : [];
  const sizes = [...plans, ...RUN.others].map((plan) => plan.bytes / 1e6);
  sizes.push(RUN.bytes.mixed / 1e6, RUN.bytes.uniform / 1e6);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const margin = Math.max(0.05 * (high - low), 0.04 * high);
  return { min: Math.max(0, low - margin), max: high + margin };
}

function sizeAxis() {
  return axis("file [MB]", sizeRange());
}

function buildTradeoff() {
  const body = byId("tradeoff-body");
  const figures = [];
  if (RUN.frontier) figures.push(predictedFigure());
  const measured = measuredFigure();
  if (measured) figures.push(measured);
  if (RUN.frontier) {
    body.append(
      paragraph(
        `Every budget from 2 to ${RUN.frontier.budgets.at(-1)} bits has its exact optimum on the costs of this run. The slider above ` +
          "moves the ring; a click on the curve moves the slider. Costs are predictions: accuracy is " +
          "known only where it was measured.",
      ),
    );
  } else {
    body.append(paragraph("The plan was given, so there are no costs and no curve."));
  }
  body.append(make("div", { class: "charts" }, ...figures));
  const [columns, rows] = RUN.detailed;
  if (rows.length) {
    const short = (row) => row.map((value) => (typeof value === "number" ? Number(fixed(value, 2)) : value));
    body.append(valuesBehind("AP [%] by size and class", columns, () => rows.map(short)));
  }
  if (RUN.frontier) body.append(frontierTable());
}

function frontierTable() {
  const { budgets, plan_of_budget: numbers, plans } = RUN.frontier;
  return valuesBehind("All budgets as a table", ["budget", "mean weight bits", "file [MB]", "predicted cost", "proved"], () =>
    budgets.map((budget, i) => {
      const plan = numbers[i] === null ? null : plans[numbers[i]];
      if (!plan) return [budget.toFixed(1), null, null, null, "no plan"];
      const columns = plan.columns.map((column) => RUN.sensitivity.choices[column]);
      const bits = planFile({ widths: columns }).mean_weight_bits;
      return [budget.toFixed(1), bits, plan.bytes / 1e6, plan.cost, plan.proven ? "yes" : "no"];
    }),
  );
}

function predictedFigure() {
  const { budgets, plan_of_budget: numbers, plans, uniform } = RUN.frontier;
  const curve = budgets
    .map((budget, i) => (numbers[i] === null ? null : { budget, number: i, ...plans[numbers[i]] }))
    .filter(known)
    .map((plan) => ({ x: plan.bytes / 1e6, y: plan.cost, budget: plan.budget, number: plan.number }));
  const alone = uniform.map((plan) => ({ x: plan.bytes / 1e6, y: plan.cost, bits: widths(plan.bits) }));
  const run = RUN.plans.run;
  const own = known(run.cost) ? [{ x: RUN.bytes.mixed / 1e6, y: run.cost }] : [];
  const unit = METRIC_UNITS[RUN.config.metric];
  const values = [...curve, ...alone, ...own].map((point) => point.y);
  return figure(
    "predicted",
    "Predicted cost by size",
    `Sum over layers, metric ${RUN.config.metric}${unit ? ` (${unit})` : ""}. Lower is better.`,
    `Predicted cost of the best plan against file size, ${plural(curve.length, "budget")}; values in the table below`,
    () => ({
      data: {
        datasets: [
          dots("shown above", ringed(), colour("text"), {
            pointRadius: 9, borderWidth: 3, backgroundColor: "transparent", pointHitRadius: 0,
          }),
          dots("this run", own, colour("level"), { pointStyle: "rectRot", pointRadius: 8 }),
          dots("one width for all", alone, colour("other"), { pointStyle: "triangle", pointRadius: 6 }),
          line("best for a budget", curve, colour("accent"), { pointHitRadius: 10 }),
        ],
      },
      options: options({
        x: sizeAxis(),
        y: costAxis("predicted cost", values),
        onClick: (event, items, chart) => {
          const near = chart
            .getElementsAtEventForMode(event.native, "nearest", { intersect: false }, false)
            .find((item) => item.datasetIndex === 3);
          if (near) chooseBudget(curve[near.index].number);
        },
        label: ({ raw, dataset }) => {
          const name = known(raw.budget) ? `best for ${raw.budget.toFixed(1)} bits` : known(raw.bits) ? `all at ${raw.bits} bits` : dataset.label;
          return `${name}: ${raw.x.toFixed(3)} MB, cost ${short(raw.y)}`;
        },
      }),
    }),
  );
}

/* The ring at the plan that is shown. */
function ringed() {
  const plan = shownPlan();
  if (!plan || !known(plan.cost)) return [];
  return [{ x: (shown.source === "run" ? RUN.bytes.mixed : plan.bytes) / 1e6, y: plan.cost }];
}

function moveMarker() {
  const entry = charts.get("predicted");
  if (!entry || !entry.chart) return;
  entry.chart.data.datasets[0].data = ringed();
  entry.chart.update("none");
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function measuredPoints() {
  const { bytes } = RUN;
  const { images, values } = RUN.measured;
  const found = [{ name: "this run", score: values.mixed, bytes: bytes.mixed, kind: "run" }];
  if (values.uniform) found.push({ name: "uniform", score: values.uniform, bytes: bytes.uniform, kind: "uniform" });
  if (!known(images)) {
    return {
      found,
      float: values.fp32,
      where: "on calibration images: there were no evaluation pictures. The plan was chosen on these images, so this is too favourable",
    };
  }
  if (values.before_reconstruction) {
    found.push({ name: "before reconstruction", score: values.before_reconstruction, bytes: bytes.mixed, kind: "other" });
  }
  for (const other of RUN.others) found.push({ name: other.name, score: other, bytes: other.bytes, kind: "other" });
  const intervals = known(values.mixed.interval) ? ", with 95 % intervals" : "";
  return { found, float: values.fp32, where: `on ${plural(images, "evaluation image")}${intervals}` };
}

function interval(label, points, color, more) {
  const [low, high] = [points.map((e) => e.y - e.half), points.map((e) => e.y + e.half)];
  return line(label, uprights(points.map((e) => e.x), low, high), color, more);
}

function measuredFigure() {
  const { found, float, where } = measuredPoints();
  const { min, max } = sizeRange();
  const { axis: title, unit } = RUN.measured;
  const point = (entry) => ({ x: entry.bytes / 1e6, y: entry.score.value, name: entry.name, half: entry.score.interval });
  const group = (kind) => found.filter((entry) => entry.kind === kind).map(point);
  const all = found.map(point);
  const barred = all.filter((entry) => known(entry.half));
  return figure(
    "accuracy",
    "Measured by size",
    `${capital(title)} ${where}.${RUN.others.length ? "" : " lampq report FOLDER --with OTHER adds the scores of other runs."}`,
    `${capital(title)}: ${all.map((entry) => `${entry.name} ${fixed(entry.y, 2)}`).join(", ")}${float ? `, float model ${fixed(float.value, 2)}` : ""}`,
    () => ({
      data: {
        datasets: [
          dots("this run", group("run"), colour("level"), { pointStyle: "rectRot", pointRadius: 8 }),
          dots("uniform", group("uniform"), colour("other"), { pointStyle: "triangle", pointRadius: 7 }),
          ...(group("other").length ? [dots("other", group("other"), colour("fc1"), { pointStyle: "rect" })] : []),
          ...(float
            ? [line("float32", [{ x: min, y: float.value }, { x: max, y: float.value }], colour("text"), { borderDash: [5, 4], borderWidth: 1.5 })]
            : []),
          // that of the run is thin, so that it is seen on that of the uniform model
          interval("95 % interval", barred.filter((e) => e.name === "this run"), colour("level"), { borderWidth: 2 }),
          interval("", barred.filter((e) => e.name !== "this run"), faded(colour("other"), 0.4), { borderWidth: 7 }),
        ],
      },
      options: options({
        x: sizeAxis(),
        y: axis(title, { grace: "12%" }),
        legendFilter: (item) => item.text && (item.text !== "95 % interval" || barred.length > 0),
        label: ({ raw }) => `${raw.name}: ${fixed(raw.y, 2)}${unit}${known(raw.half) ? ` ± ${fixed(raw.half, 2)}` : ""}, ${raw.x.toFixed(3)} MB`,
      }),
    }),
  );
}
