// The description of the API: each route and each body, folded, with an index in which words are found.

import { byId, make, on, table } from "./dom.js";
import { rangeOf } from "./schema.js";

export class Api {
  /** document: /openapi.json, which is shown when somebody looks */
  constructor(document) {
    this.document = document;
    this.parts = [];
    on("find-part", "input", () => this.find());
  }

  /** Opens the part of this name; null is none. */
  open(name) {
    if (!this.parts.length) this.build();
    const part = this.parts.find((each) => each.name === name);
    if (!part) return;
    part.details.open = true;
    part.details.scrollIntoView();
    part.details.firstChild.focus({ preventScroll: true });
  }

  build() {
    const { paths, components } = this.document;
    for (const [path, operations] of Object.entries(paths)) {
      for (const [method, each] of Object.entries(operations)) this.add(path.startsWith("/admin") ? "of-admin" : "of-routes", `${method.toUpperCase()} ${path}`, operation(each));
    }
    for (const [name, schema] of Object.entries(components.schemas)) this.add("of-schemas", name, [schema.properties ? members(name, schema) : words(schema)]);
  }

  add(index, name, content) {
    const link = make("a", { href: `#api?part=${encodeURIComponent(name)}` }, name);
    const details = make("details", { class: "panel" }, make("summary", {}, make("code", {}, name)), ...content);
    byId(index).append(link);
    byId("api-parts").append(details);
    this.parts.push({ name, link, details, text: details.textContent.toLowerCase() });
  }

  /** Leaves the parts in which a text stands, and their places in the index. */
  find() {
    const wanted = byId("find-part").value.trim().toLowerCase();
    for (const { link, details, text } of this.parts) link.hidden = details.hidden = !text.includes(wanted);
    byId("parts-found").textContent = wanted && `${this.parts.filter(({ link }) => !link.hidden).length} found`;
  }
}

function operation({ summary, parameters = [], requestBody, responses }) {
  const bodies = Object.values(requestBody?.content ?? {}).map(({ schema }) => make("p", {}, `Body: ${words(schema)}`));
  const answers = Object.entries(responses).map(([status, { description, content = {} }]) => {
    const kinds = Object.entries(content).map(([type, each]) => `${type} ${words(each.schema ?? each.itemSchema)}`);
    return make("li", {}, `${status}: ${description} ${kinds.join(", ")}`);
  });
  const told = parameters.map((each) => make("p", {}, make("code", {}, each.name), ` in the ${each.in}: ${words(each.schema)}. ${each.description ?? ""}`));
  return [make("p", {}, summary), ...told, ...bodies, make("ul", {}, ...answers)];
}

function members(name, { properties, required = [] }) {
  const columns = [
    ["name", ([member]) => make("code", {}, `${member}${required.includes(member) ? " *" : ""}`)],
    ["type", ([, schema]) => make("span", { class: "wrap" }, words(schema))],
    ["default", ([, schema]) => make("code", {}, "default" in schema ? JSON.stringify(schema.default) : "")],
    ["what it is", ([, schema]) => make("span", { class: "wrap" }, schema.description ?? "")],
  ];
  return table(`Members of ${name}`, columns, Object.entries(properties));
}

/** A schema in a few words. */
function words(schema) {
  if (schema === undefined) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return [...new Set(schema.anyOf.map(words))].join(" | ");
  if (schema.enum ?? "const" in schema) return (schema.enum ?? [schema.const]).map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `[${words(schema.items) || "…"}]`;
  return `${schema.type ?? "any"} ${rangeOf(schema)}`.trim();
}
