// Keeps in this tab what was written and answered, so that a reload or a refusal loses nothing.

import { byId, make } from "./dom.js";

const KEPT = "serve_app.playground";
const MOST = 30;

/** The draft of the form and the earlier requests, the newest first. A browser without room keeps fewer. */
export const memory = {
  read() {
    try {
      return { draft: null, past: [], ...JSON.parse(sessionStorage.getItem(KEPT)) };
    } catch {
      return { draft: null, past: [] };
    }
  },
  write(kept) {
    for (let number = MOST; number >= 0; number = Math.floor(number / 2) || (number ? 0 : -1)) {
      try {
        return sessionStorage.setItem(KEPT, JSON.stringify({ ...kept, past: kept.past.slice(0, number) }));
      } catch {
        // The tab's storage is full: keep fewer.
      }
    }
  },
  forget: () => sessionStorage.removeItem(KEPT),
};

/** Lists the earlier requests; `again` gets the one that is pressed. */
export function showPast(past, again) {
  byId("past").hidden = !past.length;
  byId("past-list").replaceChildren(
    ...past.map((each) => {
      const asked = each.draft.kind === "chat" ? each.draft.message : each.draft.prompt;
      const when = new Date(each.at).toLocaleTimeString();
      const button = make("button", { type: "button", click: () => again(each) }, make("b", {}, each.answers.map(({ name }) => name).join(", ")), ` ${asked}`);
      return make("li", {}, make("time", { class: "muted" }, when), button);
    }),
  );
}

/** Saves a text as a file of the person's. */
export function save(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
