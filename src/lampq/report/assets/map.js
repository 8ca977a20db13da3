"use strict";
/* The map of widths, the budget slider, and the plan to download. */

const SEARCHED = RUN.layers.filter((layer) => layer.searched);
const PLACE = new Map(SEARCHED.map((layer, i) => [layer.name, i]));
const shown = { source: "run", budget: 0, layer: 0 };
const cells = new Map();

/* The plan that is shown: widths by searched layer, predicted cost and size; null if there is none. */
function shownPlan() {
  if (shown.source !== "budget") return RUN.plans[shown.source];
  const number = RUN.frontier.plan_of_budget[shown.budget];
  if (number === null) return null;
  const plan = RUN.frontier.plans[number];
  return { ...plan, widths: plan.columns.map((column) => RUN.sensitivity.choices[column]) };
}

/* The same content as a plan.json of a run. */
function planFile(plan) {
  const total = SEARCHED.reduce((sum, layer) => sum + layer.params, 0);
  const bits = plan.widths.reduce((sum, [weight], i) => sum + weight * SEARCHED[i].params, 0);
  return {
    mean_weight_bits: bits / total,
    mean_activation_bits: mean(plan.widths.map(([, activation]) => activation)),
    layers: Object.fromEntries(
      plan.widths.map(([weight, activation], i) => [SEARCHED[i].name, { weight, activation }]),
    ),
  };
}

function download() {
  const plan = shownPlan();
  if (!plan) return;
  const text = `${JSON.stringify(planFile(plan), null, 2)}\n`;
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a", { href: address, download: "plan.json" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/* ---- the grid ---- */

function roleName(role) {
  return role.replace("_", " ");
}

function cell(number) {
  const layer = RUN.layers[number];
  const button = make("button", { type: "button", class: "cell", role: "gridcell", tabindex: "-1" });
  if (!layer.searched) button.classList.add("fixed");
  button.addEventListener("click", () => chooseLayer(number));
  cells.set(number, button);
  return button;
}

function rowOf(row, stage, stages) {
  const inBlock = row.block >= 0;
  const where = stages > 1 ? `stage ${stage + 1}, ` : "";
  const head = make(
    "span",
    { class: "head", role: "rowheader", "aria-label": inBlock ? `${where}block ${row.block}` : "outside the blocks" },
    inBlock ? String(row.block) : "",
  );
  const entries = Object.values(row.layers).flat();
  if (!inBlock && entries.every((number) => !RUN.layers[number].searched)) {
    return make("div", { class: "row single", role: "row" }, head, ...entries.map(cell));
  }
  const columns = ROLES.map((role) => {
    const numbers = row.layers[role] || [];
    if (!numbers.length) return make("span", { class: "cell empty", role: "gridcell" });
    if (numbers.length === 1) return cell(numbers[0]);
    return make("div", { class: "several", role: "presentation" }, ...numbers.map(cell));
  });
  return make("div", { class: "row", role: "row" }, head, ...columns);
}

function buildMap() {
  const several = RUN.stages.length > 1;
  const title = (text) =>
    several ? make("div", { class: "title", "aria-hidden": "true" }, text) : null;
  const heads = ROLES.map((role) => make("span", { class: "head", role: "columnheader" }, role));
  const corner = make("span", { class: "head", role: "columnheader" }, make("span", { class: "hidden" }, "block"));
  const roles = make("div", { class: "row roles", role: "row" }, corner, ...heads);
  byId("map").append(
    make("div", { class: "stage", role: "rowgroup" }, title(""), make("div", { class: "rows", role: "presentation" }, roles)),
    ...RUN.stages.map((rows, stage) =>
      make(
        "div",
        { class: "stage", role: "rowgroup" },
        title(`stage ${stage + 1}`),
        make("div", { class: "rows", role: "presentation" }, ...rows.map((row) => rowOf(row, stage, RUN.stages.length))),
      ),
    ),
  );
  // on a wide screen a row stands upright: its width follows from how many there are
  const rows = RUN.stages.flat();
  const blocks = [...byId("map").querySelectorAll(".row:not(.roles, .single)")].length;
  const numbers = { blocks, singles: rows.length - blocks, gaps: RUN.stages.length };
  for (const [name, value] of Object.entries(numbers)) byId("map").style.setProperty(`--${name}`, value);
  byId("map").classList.toggle("dense", blocks > 16);
  byId("map").addEventListener("keydown", moveInMap);
}

/* Arrow keys go to the nearest cell in that direction, however the map is laid out. */
function moveInMap(event) {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const all = [...cells.values()];
  if (event.key === "Home" || event.key === "End") {
    event.preventDefault();
    focusCell(all[event.key === "Home" ? 0 : all.length - 1]);
    return;
  }
  const step = steps[event.key];
  if (!step || !event.target.classList.contains("cell")) return;
  event.preventDefault();
  const middle = (box) => [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const from = middle(event.target.getBoundingClientRect());
  let best = null;
  for (const other of all) {
    const box = other.getBoundingClientRect();
    const to = middle(box);
    const along = (to[0] - from[0]) * step[0] + (to[1] - from[1]) * step[1];
    const inside = step[0]
      ? Math.max(0, box.top - from[1], from[1] - box.bottom)
      : Math.max(0, box.left - from[0], from[0] - box.right);
    const far = along + 5 * inside;
    if (along > 3 && (best === null || far < best.far)) best = { other, far };
  }
  if (best) focusCell(best.other);
}

function focusCell(button) {
  for (const other of cells.values()) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
}

function showMap() {
  const plan = shownPlan();
  const own = RUN.plans.run.widths;
  const noMark = shown.source === "run";
  for (const [number, button] of cells) {
    const layer = RUN.layers[number];
    const place = PLACE.get(layer.name);
    const bits = layer.searched ? plan && plan.widths[place] : layer.bits;
    const text = bits ? widths(bits) : "–";
    button.classList.toggle("pair", text.length > 1);
    button.classList.toggle("unknown", !bits);
    button.style.background = bits ? `var(--w${bits[0]})` : "";
    const dark = document.documentElement.dataset.theme === "dark";
    button.classList.toggle("ink", Boolean(bits) && (dark ? bits[0] <= 3 : bits[0] >= 6));
    let change = 0;
    if (bits && layer.searched && !noMark) {
      change = bits[0] - own[place][0] || bits[1] - own[place][1];
    }
    const mark = change ? make("span", { class: "mark", "aria-hidden": "true" }, change > 0 ? "▲" : "▼") : null;
    const what = layer.searched ? null : make("span", { class: "what" }, roleName(layer.role));
    button.replaceChildren(...[text, what, mark].filter(Boolean));
    const moved = change ? `, ${change > 0 ? "wider" : "narrower"} than in the run` : "";
    const said = bits ? `${bits[0]} bits weight, ${bits[1]} bits input${moved}` : "no plan";
    button.setAttribute("aria-label", `${layer.name}: ${said}${layer.searched ? "" : ", not searched"}`);
    button.title = `${layer.name}\n${said}`;
    const selected = number === shown.layer;
    button.setAttribute("aria-selected", String(selected));
    button.tabIndex = selected ? 0 : -1;
  }
}

/* ---- sources, slider, facts ---- */

function buildSources() {
  const names = [["run", RUN.plans.initial ? "Plan of this run" : "Plan of this run (given)"]];
  const same = (one, other) => one.every((bits, i) => widths(bits) === widths(other[i]));
  if (RUN.plans.initial && !same(RUN.plans.initial.widths, RUN.plans.run.widths)) {
    names.push(["initial", "Before the exchanges"]);
  }
  if (RUN.frontier) names.push(["budget", "Best for a budget"]);
  for (const [value, name] of names) {
    const input = make("input", { type: "radio", name: "source", value });
    input.checked = value === shown.source;
    input.addEventListener("change", () => {
      shown.source = value;
      showPlan();
    });
    byId("sources").append(make("label", {}, input, name));
  }
  const slider = byId("budget");
  if (!RUN.frontier) {
    byId("slider-row").hidden = true;
    byId("budget-note").textContent =
      "The plan was given, so no costs were measured: there is nothing to plan other budgets with.";
    return;
  }
  shown.budget = budgetNumber(RUN.bits.target);
  slider.value = RUN.frontier.budgets[shown.budget];
  slider.addEventListener("input", () => chooseBudget(budgetNumber(Number(slider.value))));
}

function budgetNumber(bits) {
  const all = RUN.frontier.budgets;
  return Math.min(all.length - 1, Math.max(0, Math.round((bits - all[0]) * 10)));
}

function chooseBudget(number) {
  shown.budget = number;
  shown.source = "budget";
  byId("budget").value = RUN.frontier.budgets[number];
  for (const input of document.querySelectorAll("input[name=source]")) {
    input.checked = input.value === "budget";
  }
  showPlan();
}

/* What cannot be planned is said, not guessed. */
function budgetNote() {
  const weights = [...new Set(RUN.sensitivity.choices.map(([weight]) => weight))];
  const [least, most] = [Math.min(...weights), Math.max(...weights)];
  const budget = RUN.frontier.budgets[shown.budget];
  const parts = [`Costs are known for ${weights.join(", ")} bits; no other width can be planned.`];
  if (known(RUN.bits.target_activation)) {
    parts.push(`Inputs average at most ${short(RUN.bits.target_activation)} bits, as in the run.`);
  }
  const number = RUN.frontier.plan_of_budget[shown.budget];
  if (budget < least) {
    parts.push(`There is no plan below ${least} bits.`);
  } else if (number === null) {
    parts.push("The solver found no plan for this budget in the time it had.");
  } else if (budget > most) {
    parts.push(`Above ${most} bits the plan does not change.`);
  }
  if (number !== null && !RUN.frontier.plans[number].proven) {
    parts.push("This plan is the best found in time, not proved to be the best.");
  }
  return parts.join(" ");
}

function planFacts(plan) {
  const run = RUN.plans.run;
  if (!plan) return [["Plan", "none for this budget"]];
  const file = planFile(plan);
  const changed = plan.widths.filter((bits, i) => widths(bits) !== widths(run.widths[i])).length;
  const bytes = shown.source === "run" ? RUN.bytes.mixed : plan.bytes;
  return [
    ["Mean weight bits", short(file.mean_weight_bits, 4)],
    ["Mean input bits", short(file.mean_activation_bits, 4)],
    [shown.source === "run" ? "File" : "File, about", megabytes(bytes)],
    ["Predicted cost", known(plan.cost) ? short(plan.cost, 4) : null],
    ["Against the run", shown.source === "run" ? null : `${plural(changed, "layer")} differ${changed === 1 ? "s" : ""}`],
  ];
}

function showPlan() {
  const plan = shownPlan();
  byId("download").disabled = !plan;
  facts(byId("plan-facts"), planFacts(plan));
  if (RUN.frontier) {
    const budget = RUN.frontier.budgets[shown.budget];
    byId("budget-value").textContent = `${budget.toFixed(1)} bits`;
    const spoken = plan && shown.source === "budget"
      ? `, file about ${megabytes(plan.bytes)}, predicted cost ${short(plan.cost)}`
      : plan ? "" : ", no plan";
    byId("budget").setAttribute("aria-valuetext", `${budget.toFixed(1)} bits${spoken}`);
    byId("budget-note").textContent = budgetNote();
  }
  showMap();
  moveMarker();
}

function buildLegend() {
  const used = new Set(RUN.layers.map((layer) => layer.bits[0]));
  for (const [weight] of RUN.sensitivity ? RUN.sensitivity.choices : []) used.add(weight);
  const boxes = [...used].sort((a, b) => a - b).map((bits) => {
    const box = make("i");
    box.style.background = `var(--w${bits})`;
    return make("span", {}, box, plural(bits, "bit"));
  });
  byId("legend").replaceChildren(...boxes, make("span", {}, "▲ ▼ wider, narrower than in the run"));
}
