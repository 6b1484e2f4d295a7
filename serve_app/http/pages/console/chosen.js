// The models that are chosen: names that are served, as boxes to tick, and an address that is written.

import { byId, make, on } from "./dom.js";
import { ask } from "./service.js";

const FEW = 12; // names that are found by looking
const SHOWN = 40; // of many, so that a keyboard passes them

export class Chosen {
  constructor() {
    this.entries = new Map();
    on("find-model", "input", (event) => (event.stopPropagation(), this.find()));
  }

  /** Names that were ticked, and the address that was written. */
  get names() {
    const ticked = [...byId("chips").querySelectorAll("input:checked")].map((each) => each.value);
    const written = byId("address").value.trim();
    return written ? [...ticked, written] : ticked;
  }

  /** What the service says of a name; of one that is in no list, as a mix of adapters, what it says of the base. */
  entry(name) {
    return this.entries.get(name) ?? this.entries.get(name.split(":")[0]);
  }

  /** Whether one of them can. */
  can(capability) {
    return this.names.some((name) => this.entry(name)?.capabilities.includes(capability));
  }

  /** Those that refuse a parameter, whatever is sent for it. */
  refusing(parameter) {
    return this.names.filter((name) => this.entry(name)?.refuses?.includes(parameter));
  }

  /** Says what those that are chosen cannot do. capability: what is asked of them;  absent: that were chosen, and are not served */
  tell(capability, absent) {
    const gone = absent.length ? [`Not served now: ${absent.join(", ")}.`] : [];
    const known = this.names.filter((name) => this.entry(name));
    const unable = known.filter((name) => !this.entry(name).capabilities.includes(capability)).map((name) => `${name} takes no ${capability}s.`);
    const engines = new Map(known.map((name) => this.entry(name)).filter(({ lacks }) => lacks.length).map((each) => [each.engine, each.lacks]));
    const lacking = [...engines].map(([engine, lacks]) => `Models that ${engine} computes lack: ${lacks.join(", ")}.`);
    byId("chosen-lack").textContent = [...gone, ...unable, ...lacking].join(" ");
  }

  /** The names that are served and write something. Raises Refused, Lost. */
  async served() {
    const entries = (await ask("v1/models")).data;
    this.entries = new Map(entries.map((each) => [each.id, each]));
    byId("address").placeholder = entries.some(({ lacks }) => !lacks.includes("mixed adapters")) ? "or a mix: base:one*0.6+two*0.4" : "or a version: base:adapter@version";
    return entries.filter(({ capabilities }) => capabilities.length).map(({ id }) => id);
  }

  offer(names, ticked, why = "No model is ready yet; this list fills by itself.") {
    const boxes = [...byId("chips").querySelectorAll("input")];
    if (names.length && boxes.map((box) => box.value).join("\n") === names.join("\n")) {
      for (const box of boxes) box.checked = ticked.has(box.value); // the focus stays
      return this.find();
    }
    const chips = names.map((name) => make("label", {}, make("input", { type: "checkbox", value: name, checked: ticked.has(name) }), name));
    byId("chips").replaceChildren(...(chips.length ? chips : [make("p", { class: "muted" }, why)]));
    byId("find-model").hidden = names.length <= FEW;
    byId("find-model").placeholder = `find one of ${names.length}${names.length > SHOWN ? `, ${SHOWN} are shown` : ""}`;
    this.find();
  }

  /** Leaves the first names in which a text stands, and those that are ticked. */
  find() {
    const { hidden, value } = byId("find-model");
    const wanted = hidden ? "" : value.trim().toLowerCase();
    let room = SHOWN;
    for (const label of byId("chips").querySelectorAll("label")) {
      const isFound = room > 0 && label.textContent.toLowerCase().includes(wanted);
      room -= isFound;
      label.hidden = !isFound && !label.firstChild.checked;
    }
  }
}
