// Earlier requests: a list that brings one back, and that can be saved, kept in the browser or forgotten.

import { byId, make, save } from "./dom.js";
import { memory, textOf } from "./memory.js";

export class Past {
  /** again: takes the request that is pressed */
  constructor(again) {
    this.again = again;
    byId("export").addEventListener("click", () => save("serve_app-requests.json", JSON.stringify(memory.past, null, 1), "application/json"));
    byId("export-markdown").addEventListener("click", () => save("serve_app-requests.md", asMarkdown(memory.past), "text/markdown"));
    byId("forget").addEventListener("click", () => this.keep([]));
    byId("stays").addEventListener("change", () => (memory.stays = byId("stays").checked));
  }

  add(request) {
    this.keep([request, ...memory.past]);
  }

  keep(past) {
    memory.past = past;
    this.show();
  }

  show() {
    const { past } = memory;
    byId("past").hidden = !past.length;
    byId("stays").checked = memory.stays;
    byId("past-list").replaceChildren(...past.map((each) => this.entry(each)));
  }

  entry(request) {
    const { at, draft, answers } = request;
    const asked = draft.kind === "chat" ? textOf(answers[0].turns.findLast(({ role }) => role === "user")) : draft.prompt;
    const when = new Date(at).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
    const button = make("button", { type: "button", click: () => this.again(request) }, make("b", {}, answers.map(({ name }) => name).join(", ")), ` ${asked}`);
    return make("li", {}, make("time", { class: "muted" }, when), button);
  }
}

/** Earlier requests as a document: what was set, what was asked, what each model wrote. */
function asMarkdown(past) {
  const of = ({ at, draft, answers }) => [
    `# ${new Date(at).toISOString()}`,
    ...draft.parameters.filter(([, text]) => text).map(([name, text]) => `* ${name}: ${JSON.stringify(text)}`),
    ...(draft.kind === "chat" ? [] : ["", "**prompt**", fenced(draft.prompt)]),
    ...answers.flatMap(({ name, text, end, turns = [] }) => ["", `## ${name}`, ...turns.flatMap((turn) => ["", `**${turn.role}**`, fenced(textOf(turn))]), "", `**answer** (${end})`, fenced(text)]),
  ];
  return `${past.flatMap((each) => [...of(each), ""]).join("\n")}`;
}

/** A text between marks that are longer than any within it. */
function fenced(text) {
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}\n${text}\n${fence}`;
}
