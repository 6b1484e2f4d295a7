// The controls of parameters: ranges, defaults and descriptions are those of the service.

import { byId, make, on } from "./dom.js";
import { valueOf } from "./schema.js";

const FIRST = ["max_tokens", "temperature", "top_p", "seed", "stop"];
const BEGINNING = { max_tokens: "64" };
const ELSEWHERE = new Set(["model", "prompt", "messages", "stream", "stream_options", "logprobs", "top_logprobs"]);

export class Parameters {
  /** kinds: of each kind of request its parameters by name */
  constructor(kinds) {
    this.kinds = kinds;
    this.kind = "completion";
    this.shown = new Map();
    this.refusing = () => [];
    this.grid = byId("parameters");
    this.more = byId("more");
    on(this.more, "change", () => this.pick());
    for (const event of ["focusin", "pointerover"]) on(this.grid, event, (at) => this.tell(at.target));
    FIRST.forEach((name) => this.add(name));
    this.offer();
  }

  get known() {
    return this.kinds[this.kind];
  }

  /** Everything that is set and that this kind of request has. */
  values() {
    const found = {};
    for (const [name, control] of this.shown) {
      const each = this.known.get(name);
      const value = each && valueOf(each, control.value);
      if (value !== undefined) found[name] = value;
    }
    return found;
  }

  /** What stands in each control, as it was written. */
  texts() {
    return [...this.shown].map(([name, control]) => [name, control.value]);
  }

  /** Writes such texts into the controls; those that are not shown yet are added. */
  restore(texts) {
    for (const [name, text] of texts) {
      const control = this.shown.get(name) ?? this.add(name, { isRemovable: true });
      if (control) control.value = text;
    }
    this.offer();
  }

  /** refusing: the chosen models that refuse a parameter */
  use(kind, refusing) {
    this.kind = kind;
    this.refusing = refusing;
    for (const [name, control] of this.shown) {
      const field = control.closest(".field");
      field.hidden = !this.known.has(name);
      field.querySelector(".range").textContent = this.told(name);
    }
    this.offer();
  }

  add(name, { isRemovable = false } = {}) {
    const each = this.known.get(name);
    if (!each || this.shown.has(name)) return null;
    const control = this.control(each);
    control.value = BEGINNING[name] ?? "";
    const heading = make("div", { class: "heading" }, make("label", { for: control.id }, name));
    if (isRemovable) heading.append(this.removal(name));
    const range = make("p", { class: "range" }, this.told(name));
    const about = make("span", { class: "unseen", id: `${control.id}-about` }, `${each.about} Must be ${each.words}.`);
    const isWide = ["texts", "json", "text"].includes(each.kind);
    this.grid.append(make("div", { class: isWide ? "field wide" : "field", "data-parameter": name }, heading, control, range, about));
    this.shown.set(name, control);
    return control;
  }

  control(each) {
    const id = `parameter-${each.name}`;
    const shared = { id, "aria-describedby": `${id}-about` };
    const usual = (each.default ?? null) === null ? "not set" : `default ${JSON.stringify(each.default)}`;
    if (each.kind === "boolean" || each.kind === "choice") {
      const values = each.kind === "boolean" ? ["true", "false"] : each.form.enum;
      const options = values.map((value) => make("option", {}, value));
      return make("select", shared, make("option", { value: "" }, usual), ...options);
    }
    if (each.kind === "texts" || each.kind === "json") {
      const hint = each.kind === "json" ? `JSON, ${usual}` : "one per line; \\n is a line break";
      return make("textarea", { ...shared, rows: each.kind === "json" ? 3 : 1, placeholder: hint });
    }
    if (each.kind === "text") return make("input", { ...shared, placeholder: usual });
    const step = each.kind === "integer" ? 1 : "any";
    const bounds = { min: each.form.minimum ?? each.form.exclusiveMinimum, max: each.form.maximum, step };
    return make("input", { ...shared, ...bounds, type: "number", inputmode: "decimal", placeholder: usual });
  }

  removal(name) {
    const remove = () => {
      this.shown.get(name).closest(".field").remove();
      this.shown.delete(name);
      this.offer();
      this.more.focus();
    };
    return make("button", { class: "remove", "aria-label": `Remove ${name}`, click: remove }, "×");
  }

  offer() {
    const names = [...this.known.keys()].filter((name) => !this.shown.has(name) && !ELSEWHERE.has(name));
    const options = names.map((name) => {
      const refused = this.refused(name);
      return make("option", { value: name, disabled: refused !== "" }, refused ? `${name}, ${refused}` : name);
    });
    this.more.replaceChildren(make("option", { value: "" }, `one of ${names.length} more`), ...options);
  }

  refused(name) {
    const by = this.refusing(name);
    return by.length ? `refused by ${by.join(", ")}` : "";
  }

  told(name) {
    const each = this.known.get(name);
    return this.refused(name) || each?.range || { boolean: "true or false", choice: "one of a list", json: "JSON" }[each?.kind] || "";
  }

  pick() {
    const control = this.add(this.more.value, { isRemovable: true });
    this.offer();
    control?.focus();
    control?.dispatchEvent(new Event("input", { bubbles: true }));
  }

  tell(target) {
    const name = target.closest?.(".field")?.dataset.parameter;
    const each = name && this.known.get(name);
    if (each) byId("about").replaceChildren(make("code", {}, name), ` ${each.about}${each.words ? ` Must be ${each.words}.` : ""}`);
  }
}
