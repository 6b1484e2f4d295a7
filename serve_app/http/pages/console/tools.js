// The functions that a chat may call, each with a name, what it is for and a JSON Schema of its arguments.

import { button, byId, make, on } from "./dom.js";
import { parsed } from "./schema.js";

const EXAMPLE = {
  name: "get_weather",
  description: "The weather in a city now.",
  parameters: '{\n  "type": "object",\n  "properties": {"city": {"type": "string"}},\n  "required": ["city"]\n}',
};
const EMPTY = { name: "", description: "", parameters: '{"type": "object", "properties": {}}' };

export class Tools {
  constructor() {
    on("add-tool", "click", () => {
      this.add(byId("tool-list").children.length ? EMPTY : EXAMPLE).focus();
      this.changed();
    });
  }

  /** What is sent as `tools`; nothing where there is none, or no chosen model takes any. */
  values() {
    const tools = byId("tools").hidden ? [] : this.texts().map(functionOf);
    return tools.length ? { tools } : {};
  }

  /** What stands in the fields. */
  texts() {
    return [...byId("tool-list").children].map((each) => Object.fromEntries([...each.querySelectorAll("input, textarea")].map(({ name, value }) => [name, value])));
  }

  restore(texts = []) {
    byId("tool-list").replaceChildren();
    texts.forEach((each) => this.add(each));
    this.tell();
  }

  /** Adds the fields of one more function; the first of them. */
  add(texts) {
    const id = `tool-${(Tools.count = (Tools.count ?? 0) + 1)}`;
    const controls = [
      ["name", "Name", make("input", {})],
      ["description", "What it is for", make("input", { spellcheck: "true" })],
      ["parameters", "Arguments, as JSON Schema", make("textarea", { rows: 5, class: "mono" })],
    ];
    const fields = controls.map(([name, title, control]) => {
      Object.assign(control, { id: `${id}-${name}`, name, value: texts[name] });
      return make("div", { class: "field" }, make("label", { for: control.id }, title), control);
    });
    const remove = () => {
      element.remove();
      byId("add-tool").focus();
      this.changed();
    };
    const element = make("fieldset", { class: "tool" }, make("legend", { class: "unseen" }, "Function"), ...fields, button("Remove this function", remove));
    byId("tool-list").append(element);
    return controls[0][2];
  }

  /** Says how many there are. */
  tell() {
    const number = byId("tool-list").children.length;
    byId("tool-count").textContent = number ? `${number} to call` : "none";
  }

  changed() {
    this.tell();
    byId("tools").dispatchEvent(new Event("input", { bubbles: true }));
  }
}

function functionOf({ name, description, parameters }) {
  return { type: "function", function: { name, ...(description ? { description } : {}), ...(parameters ? { parameters: parsed(parameters) } : {}) } };
}
