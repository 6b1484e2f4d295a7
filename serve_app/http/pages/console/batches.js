// Batches of the key's tenant: a file of requests is sent, its progress is followed, its answers are saved.

import { button, byId, count, empty, make, on, removal, save, table, when } from "./dom.js";
import { attemptIn, show } from "./problems.js";
import { Lost, ask, download } from "./service.js";

const EVERY_MS = 2000;
const WINDOW = "24h";
const KINDS = { completed: "good", failed: "bad", expired: "bad" };
const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);
const MOST_LISTED = 100;
const attempt = attemptIn("batches-problem");

const nameOf = (batch) => batch.metadata?.name ?? batch.id;

export class Batches {
  /** document: what says which endpoints a batch may have */
  constructor(document) {
    this.endpoints = document.components.schemas.NewBatch.properties.endpoint.enum;
    this.listed = "";
    on("send-batch", "submit", () => attempt(() => this.send()));
  }

  refresh() {
    return attempt(() => this.look());
  }

  /** Lists the batches, and looks again while one has not ended and the person is here. */
  async look() {
    clearTimeout(this.timer);
    let goesOn = false;
    try {
      goesOn = await this.fetch();
    } catch (error) {
      goesOn = error instanceof Lost || error.status >= 500 || error.status === 429;
      throw error;
    } finally {
      if (goesOn) this.timer = setTimeout(() => byId("batches").hidden || this.follow(), EVERY_MS);
    }
  }

  /** Looks again; why it could not is told until it can. */
  async follow() {
    const before = this.fault;
    this.fault = await this.look().catch((error) => error);
    if (before || this.fault) show("batches-problem", this.fault);
  }

  /** Whether one of them has not ended. */
  async fetch() {
    const { data, has_more: hasMore } = await ask(`v1/batches?limit=${MOST_LISTED}`);
    const listed = JSON.stringify(data.map((each) => [each.id, each.status]));
    if (listed === this.listed) data.forEach((each) => byId(`progress-${each.id}`).replaceChildren(...progress(each))); // buttons stay
    else this.list(data, hasMore);
    this.listed = listed;
    this.isShown = true;
    return data.some((each) => !ENDED.has(each.status));
  }

  list(data, hasMore) {
    const columns = [
      ["file", (each) => nameOf(each)],
      ["sent", (each) => when(each.created_at)],
      ["state", (each) => make("span", { class: "wrap" }, make("span", { class: `tag ${KINDS[each.status] ?? ""}` }, each.status.replaceAll("_", " ")), faults(each))],
      ["requests", (each) => make("div", { id: `progress-${each.id}` }, ...progress(each))],
      ["", (each) => this.actions(each)],
    ];
    const more = hasMore ? [make("p", { class: "muted" }, `These are the newest ${MOST_LISTED}.`)] : [];
    byId("batch-list").replaceChildren(data.length ? table("Batches", columns, data) : empty("There is no batch yet. Send a file of requests below."), ...more);
  }

  actions(batch) {
    const files = [["Answers", batch.output_file_id], ["Failures", batch.error_file_id]].filter(([, id]) => id);
    const saving = files.map(([word, id]) =>
      button(word, () => attempt(() => this.save(word, id, batch)), `Save ${word.toLowerCase()} of ${nameOf(batch)}`),
    );
    const cancel = () => attempt(async () => (await ask(`v1/batches/${batch.id}/cancel`, { method: "POST" }), await this.look()));
    const mayCancel = !ENDED.has(batch.status) && batch.status !== "cancelling";
    return make("span", {}, ...saving, mayCancel ? removal(`Cancel ${nameOf(batch)}`, "Cancel", "No more of its lines begin", cancel) : null);
  }

  async save(word, id, batch) {
    save(`${nameOf(batch).replace(/\.jsonl$/, "")}-${word.toLowerCase()}.jsonl`, await download(`v1/files/${id}/content`));
  }

  /** Sends the file that was chosen, and has its requests computed at the endpoint that its first line names. */
  async send() {
    const [file] = byId("batch-file").files;
    if (!file) throw new Error("Choose a file first: one request per line, as JSON.");
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    const endpoint = await endpointIn(file, this.endpoints);
    const { id } = await ask("v1/files", { method: "POST", body: form });
    const body = { input_file_id: id, endpoint, completion_window: WINDOW, metadata: { name: file.name } };
    await ask("v1/batches", { method: "POST", body });
    byId("send-batch").reset();
    await this.look();
  }
}

function progress({ request_counts: { total, completed, failed }, usage, status }) {
  if (!total) return ["–"];
  const told = `${count(completed)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}, ${count(usage.total_tokens)} tokens`;
  return [told, make("progress", { class: "gauge", max: total, value: ENDED.has(status) ? total : completed + failed, "aria-hidden": "true" })];
}

/** What is wrong with the first line that was refused. */
function faults({ errors }) {
  const [first, ...others] = errors?.data ?? [];
  if (!first) return null;
  return ` ${first.line ? `Line ${first.line}: ` : ""}${first.message}${others.length ? ` (and ${others.length} more)` : ""}`;
}

/** The endpoint that the first line names; a line that names none is the service's to refuse. */
async function endpointIn(file, endpoints) {
  const [line] = (await file.slice(0, 1 << 20).text()).split("\n", 1);
  const named = endpoints.find((each) => line.includes(JSON.stringify(each)));
  return named ?? endpoints[0];
}
