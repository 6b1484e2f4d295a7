// The models that are chosen: names that are served, as boxes to tick, and an address that is written.

import { byId, make } from "./dom.js";
import { ask } from "./service.js";

export class Chosen {
  constructor() {
    this.capabilities = new Map();
  }

  /** Names that were ticked, and the address that was written. */
  get names() {
    const ticked = [...byId("chips").querySelectorAll("input:checked")].map((each) => each.value);
    const written = byId("address").value.trim();
    return written ? [...ticked, written] : ticked;
  }

  /** Whether one of them can; a name that is in no list, as a mix of adapters, can what its base can. */
  can(capability) {
    const of = (name) => this.capabilities.get(name) ?? this.capabilities.get(name.split(":")[0]) ?? [];
    return this.names.some((name) => of(name).includes(capability));
  }

  /** The names that are served. Raises Refused, Lost. */
  async served() {
    const entries = (await ask("v1/models")).data;
    this.capabilities = new Map(entries.map((each) => [each.id, each.capabilities]));
    return [...this.capabilities.keys()];
  }

  offer(names, ticked, why = "No model is ready yet; this list fills by itself.") {
    const boxes = [...byId("chips").querySelectorAll("input")];
    if (names.length && boxes.map((box) => box.value).join("\n") === names.join("\n")) {
      for (const box of boxes) box.checked = ticked.has(box.value); // the focus stays
      return;
    }
    const chips = names.map((name) => make("label", {}, make("input", { type: "checkbox", value: name, checked: ticked.has(name) }), name));
    byId("chips").replaceChildren(...(chips.length ? chips : [make("p", { class: "muted" }, why)]));
  }
}
