// Publishes adapters: what each name means, the version before, and a form for another; for keys that may.

import { byId, empty, make, on, removal, table, when } from "./dom.js";
import { attemptIn } from "./problems.js";
import { ask } from "./service.js";

const ROUTE = "admin/adapters";
const short = (version) => make("code", { title: version }, version.slice(0, 12));
const tag = (text) => make("span", { class: "tag" }, text);

/** Shows what is published, if the key may see it. changed: called when something else is served */
export class Adapters {
  constructor(changed) {
    this.changed = changed;
    on("publish", "submit", () => this.attempt(() => this.publish()));
  }

  async refresh() {
    try {
      const listed = await ask(ROUTE);
      byId("adapter-list").replaceChildren(listed.data.length ? this.table(listed.data) : empty("No adapter is served. Publish the first one below."));
      byId("adapters").hidden = false;
    } catch (error) {
      if (error.status !== 403) throw error;
      byId("adapters").hidden = true;
    }
  }

  table(entries) {
    const columns = [
      ["name", (each) => make("code", {}, each.id)],
      ["version", (each) => make("span", {}, each.reason ? tag(`unusable: ${each.reason}`) : short(each.version), each.refused ? tag(`its folder is refused: ${each.refused}`) : null)],
      ["canary", (each) => (each.canary ? this.canary(each.canary) : "–")],
      ["before", (each) => (each.previous ? short(each.previous.version) : "–")],
      ["published", (each) => (each.published_at ? `${when(each.published_at)} by ${each.by}` : "in its folder")],
      ["replicas", (each) => `${each.replicas} of ${each.ready_replicas}`, true],
      ["", (each) => make("span", {}, each.previous || each.canary ? this.action(each, "Roll back", "The version before answers", () => this.rollBack(each)) : null, this.action(each, "Withdraw", "Nobody can use it", () => this.withdraw(each)))],
    ];
    return table("Adapters and their versions", columns, entries);
  }

  /** A version that is tried: its share, and how its requests compare with those beside it. */
  canary(tried) {
    const told = ({ requests, errors }) => `${errors} of ${requests} failed`;
    const figures = [`${told(tried.counted)} (beside it ${told(tried.beside)})`];
    if (tried.divergence !== null) figures.push(`divergence ${tried.divergence.toFixed(2)} nats per token`);
    if (tried.held !== null) figures.push(`held: ${tried.held}`);
    return make("span", {}, short(tried.version), ` ${+(100 * tried.share).toFixed(2)} % of requests. ${figures.join(", ")}`);
  }

  action(entry, word, consequence, act) {
    return removal(`${word} ${entry.id}`, word, consequence, () => this.attempt(act));
  }

  async publish() {
    const [name, path, canary] = ["publish-name", "publish-path", "publish-canary"].map((id) => byId(id).value.trim());
    const body = { lora_name: name, lora_path: path, load_inplace: byId("publish-in-place").checked, canary: canary || null };
    await ask(ROUTE, { method: "POST", body });
    byId("publish").reset();
  }

  rollBack(entry) {
    return ask(`${ROUTE}/rollback`, { method: "POST", body: { lora_name: entry.id } });
  }

  withdraw(entry) {
    return ask(`${ROUTE}?lora_name=${encodeURIComponent(entry.id)}`, { method: "DELETE" });
  }

  attempt(act) {
    return attemptIn("adapters-problem")(async () => (await act(), await this.changed()));
  }
}
