// What was used: bars by day, divided by model or tenant, and the same figures as a table.

import { byId, count, empty, make, on, shape, table } from "./dom.js";
import { attemptIn } from "./problems.js";
import { ask } from "./service.js";

const DAY_MS = 86_400_000;
const MEASURES = {
  completion_tokens: ["written tokens", count],
  prompt_tokens: ["prompt tokens", count],
  cached_tokens: ["of these cached", count],
  requests: ["requests", count],
  engine_seconds: ["engine seconds", (value) => value.toFixed(1)],
  cost: ["cost", (value) => value.toFixed(4)],
};
const MOST_SERIES = 6;
const OTHERS = "all others";
const HEIGHT = 100;

export class Usage {
  constructor() {
    this.isAdmin = false;
    this.rows = [];
    byId("usage-measure").replaceChildren(...Object.entries(MEASURES).map(([value, [title]]) => make("option", { value }, title)));
    for (const id of ["usage-measure", "usage-by"]) on(id, "change", () => this.draw());
    on("usage-days", "change", () => attemptIn("access-problem")(() => this.refresh(this.isAdmin)));
  }

  /** isAdmin: whether all tenants are told of, else the key's own alone */
  async refresh(isAdmin) {
    this.isAdmin = isAdmin;
    byId("usage-by-field").hidden = !isAdmin;
    const names = isAdmin ? ["tenant", "model"] : ["model"];
    this.days = lastDays(Number(byId("usage-days").value));
    const query = `by=${[...names, "day"].join(",")}&since=${this.days[0]}`;
    this.rows = (await ask(`${isAdmin ? "admin" : "v1"}/usage?${query}`)).data;
    const columns = [
      ["day", (row) => row.day],
      ...names.map((name) => [name, (row) => make("code", {}, row[name])]),
      ...Object.entries(MEASURES).map(([name, [title, told]]) => [title, (row) => told(row[name]), true]),
    ];
    const sorted = [...this.rows].sort((one, two) => two.day.localeCompare(one.day));
    byId("usage").replaceChildren(sorted.length ? table("Usage by day", columns, sorted) : empty("Nothing was used in these days. A request shows up here a moment after it has ended."));
    this.draw();
  }

  draw() {
    const measure = byId("usage-measure").value;
    const [title, told] = MEASURES[measure];
    const by = this.isAdmin ? byId("usage-by").value : "model";
    const series = seriesOf(this.rows, { by, measure });
    const totals = this.days.map((day) => sum(series.map(([, values]) => values.get(day) ?? 0)));
    const most = Math.max(...totals);
    byId("usage-chart").hidden = !most;
    byId("usage-caption").textContent = `${told(sum(totals))} ${title} in ${this.days.length} days, at most ${told(most)} in one`;
    byId("usage-bars").replaceChildren(...bars(series, { days: this.days, most, told }));
    byId("usage-bars").setAttribute("viewBox", `0 0 ${this.days.length} ${HEIGHT}`);
    byId("usage-bars").ariaLabel = `${title} by day; the lines below have the figures`;
    byId("usage-first").textContent = this.days[0];
    byId("usage-last").textContent = this.days.at(-1);
    const keys = series.map(([name, values], at) => make("li", {}, make("span", { class: `key s${at}` }), make("code", {}, name), ` ${told(sum([...values.values()]))}`));
    byId("usage-legend").replaceChildren(...keys);
  }
}

const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

/** The last days until today as the ledger names them, in UTC. */
function lastDays(number) {
  return Array.from({ length: number }, (_, at) => new Date(Date.now() - (number - 1 - at) * DAY_MS).toISOString().slice(0, 10));
}

/** Each name with its amounts by day, the largest first; those that have no colour of their own are one. */
function seriesOf(rows, { by, measure }) {
  const totals = new Map();
  for (const row of rows) totals.set(row[by], (totals.get(row[by]) ?? 0) + row[measure]);
  const names = [...totals].sort((one, two) => two[1] - one[1]).map(([name]) => name);
  const shown = names.length > MOST_SERIES + 1 ? [...names.slice(0, MOST_SERIES), OTHERS] : names;
  const series = new Map(shown.map((name) => [name, new Map()]));
  for (const row of rows) {
    const values = series.get(row[by]) ?? series.get(OTHERS);
    values.set(row.day, (values.get(row.day) ?? 0) + row[measure]);
  }
  return [...series];
}

function bars(series, { days, most, told }) {
  const drawn = [shape("line", { x1: 0, y1: HEIGHT, x2: days.length, y2: HEIGHT })];
  days.forEach((day, x) => {
    let top = HEIGHT;
    series.forEach(([name, values], at) => {
      const value = values.get(day) ?? 0;
      const height = most ? (value / most) * HEIGHT : 0;
      if (!height) return;
      top -= height;
      const bar = shape("rect", { class: `s${at}`, x: x + 0.1, y: top, width: 0.8, height });
      bar.append(shape("title"));
      bar.firstChild.textContent = `${day} ${name}: ${told(value)}`;
      drawn.push(bar);
    });
  });
  return drawn;
}
