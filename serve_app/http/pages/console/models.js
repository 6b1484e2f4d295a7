// What is served: bases with what they are, their adapters, and other names.

import { byId, count, empty, make, table } from "./dom.js";
import { show } from "./problems.js";
import { Refused, ask } from "./service.js";

export async function showModels() {
  try {
    const entries = (await ask("v1/models")).data;
    const bases = entries.filter((entry) => !entry.parent);
    const cards = bases.map((base) => cardOf(base, entries));
    const others = entries.filter((entry) => entry.parent && !bases.some((base) => base.id === entry.parent && isAdapterOf(base, entry)));
    const rest = others.length ? [make("section", { class: "panel model" }, make("header", {}, make("h2", {}, "Other names")), list("Other names", others, "stands for"))] : [];
    byId("model-list").replaceChildren(...(cards.length + rest.length ? [...cards, ...rest] : [empty("No model is ready yet. They appear here as soon as a replica has loaded one.")]));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    show("model-list", error);
  }
}

const isAdapterOf = (base, entry) => entry.id.startsWith(`${base.id}:`);
const tryIt = (...names) => `#playground?${names.map((name) => `model=${encodeURIComponent(name)}`).join("&")}`;
const trying = ({ id, capabilities }) => capabilities.length ? make("a", { href: tryIt(id) }, "Try it", make("span", { class: "unseen" }, ` with ${id}`)) : null;

function cardOf(base, entries) {
  const adapters = entries.filter((entry) => entry.parent === base.id && isAdapterOf(base, entry));
  const facts = [`${count(base.max_model_len)} tokens of context`, base.capabilities.join(", ") || "writes no text"];
  if (base.engine !== "own") facts.push(`computed by ${base.engine}`, `lacks ${base.lacks.join(", ")}`);
  const header = make(
    "header", {},
    make("h2", {}, base.id),
    make("span", { class: "muted" }, facts.join(" · ")),
    trying(base),
    adapters.length > 1 ? make("a", { href: tryIt(...adapters.map((entry) => entry.id)) }, "Compare its adapters") : null,
  );
  const body = adapters.length ? list(`Adapters of ${base.id}`, adapters, "files") : empty("It has no adapters.");
  return make("article", { class: "panel model", "aria-label": base.id }, header, body);
}

function sharesOf(weights) {
  const whole = Object.values(weights).reduce((sum, weight) => sum + weight, 0);
  return Object.entries(weights).map(([name, weight]) => `${name} ${+((100 * weight) / whole).toFixed(1)}%`).join(" · ");
}

function list(caption, entries, what) {
  return table(
    caption,
    [
      ["name", (entry) => make("code", {}, entry.id)],
      [what, (entry) => make("span", { class: "muted" }, entry.weights ? sharesOf(entry.weights) : entry.root)],
      ["", (entry) => trying(entry)],
    ],
    entries,
  );
}
