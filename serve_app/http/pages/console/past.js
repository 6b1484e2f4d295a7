// Earlier requests: a list that brings one back, and that can be saved, kept in the browser or forgotten.

import { button, byId, make, on, removal, save, when } from "./dom.js";
import { memory, replyOf, textOf, withoutImages } from "./memory.js";

export class Past {
  /** again: takes the request that is pressed */
  constructor(again) {
    this.again = again;
    byId("past-actions").append(
      button("Save as JSON", () => save("serve_app-requests.json", JSON.stringify(memory.past, null, 1), "application/json")),
      button("Save as Markdown", () => save("serve_app-requests.md", asMarkdown(memory.past), "text/markdown")),
      removal("Forget earlier requests", "Forget them", "All of them are lost", () => this.keep([])),
    );
    on("stays", "change", () => (memory.stays = byId("stays").checked));
    on("past", "toggle", () => this.show());
    on("find-past", "input", () => this.show());
  }

  /** Adds one; a chat takes the place of the one that it goes on from, but for models that are asked no more. */
  add(request) {
    const { kind, chat } = request.draft;
    const goesOn = (old) => request.answers.every((each) => old.name !== each.name || begins(old.turns, each.turns));
    const { past } = memory;
    const before = past.find(({ draft, answers }) => kind === "chat" && draft.kind === kind && draft.chat === chat && answers.every(goesOn));
    const others = before?.answers.filter(({ name }) => request.answers.every((each) => each.name !== name)) ?? [];
    this.keep([{ ...request, answers: [...request.answers, ...others] }, ...past.filter((each) => each !== before)]);
  }

  keep(past) {
    memory.past = past;
    this.show();
  }

  show() {
    const { past } = memory;
    byId("past").hidden = !past.length;
    byId("stays").checked = memory.stays;
    if (!byId("past").open) return;
    const wanted = byId("find-past").value.trim().toLowerCase();
    const found = past.filter((each) => textsOf(each).some((text) => text.toLowerCase().includes(wanted)));
    byId("past-found").textContent = wanted ? `${found.length} of ${past.length}` : `${past.length}`;
    byId("past-list").replaceChildren(...found.map((each) => this.entry(each)));
  }

  entry(request) {
    const names = request.answers.map(({ name }) => name).join(", ");
    const again = make("button", { click: () => this.again(request) }, make("b", {}, names), ` ${askedIn(request)}`);
    return make("li", {}, make("time", { class: "muted" }, when(request.at / 1000)), again);
  }
}

/** Whether turns are the first of others; two tabs may go on from the same ones. */
const begins = (turns, others) => JSON.stringify(others, withoutImages).startsWith(JSON.stringify(turns, withoutImages).slice(0, -1));

const askedIn = ({ draft, answers }) => (draft.kind === "chat" ? textOf(answers[0].turns.find(({ role }) => role === "user")) : draft.prompt);

const textsOf = (request) => [askedIn(request), ...request.answers.flatMap(({ name, text, turns = [] }) => [name, text, ...turns.map(textOf)])];

/** Earlier requests as a document: what was set, what was asked, what each model wrote. */
function asMarkdown(past) {
  const of = ({ at, draft, answers }) => [
    `# ${new Date(at).toISOString()}`,
    ...draft.parameters.filter(([, text]) => text).map(([name, text]) => `* ${name}: ${JSON.stringify(text)}`),
    ...(draft.kind === "chat" ? [] : ["", "**prompt**", fenced(draft.prompt)]),
    ...answers.flatMap(({ name, text, end, turns = [], calls = [] }) => ["", `## ${name}`, ...turns.flatMap((turn) => ["", `**${turn.role}**`, fenced(textOf(turn))]), "", `**answer** (${end})`, fenced(textOf(replyOf(text, calls)))]),
  ];
  return past.flatMap((each) => [...of(each), ""]).join("\n");
}

/** A text between marks that are longer than any within it. */
function fenced(text) {
  const runs = text.match(/`+/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  return `${fence}\n${text}\n${fence}`;
}
