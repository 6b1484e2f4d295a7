// Keeps what was written in this tab, and what was asked and answered in this browser.

import { session } from "./service.js";

const DRAFT = "serve_app.draft";
const PAST = "serve_app.past";
const WHERE = "serve_app.past.where";
const REFUSAL = "serve_app.refusal";
const MOST = 1000;

/** Requests under a key are for those who have it: their name is a digest of it, of 32 bits, by FNV-1a. */
function nameOfPast() {
  let digest = 0x811c9dc5;
  for (const letter of session.key ?? "") digest = Math.imul(digest ^ letter.charCodeAt(0), 0x01000193) >>> 0;
  return session.key ? `${PAST}.${digest.toString(16)}` : PAST;
}

const nameOfPlace = () => `${WHERE}${nameOfPast().slice(PAST.length)}`;
const place = () => (localStorage.getItem(nameOfPlace()) === "tab" ? sessionStorage : localStorage);
export const withoutImages = (_, value) => (value?.type === "image_url" ? { type: "text", text: "[an image, which is not kept]" } : value);

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

/** The draft of the form, and earlier requests, the newest first. A browser without room keeps fewer of them. */
export const memory = {
  get draft() {
    return read(sessionStorage, DRAFT);
  },
  set draft(draft) {
    try {
      sessionStorage.setItem(DRAFT, JSON.stringify(draft, withoutImages));
    } catch {
      sessionStorage.removeItem(DRAFT); // an old one is worse than none
    }
  },
  get past() {
    return read(place(), nameOfPast()) ?? [];
  },
  set past(past) {
    for (let number = Math.max(1, Math.min(MOST, past.length)); number; number = Math.floor(number * 0.9)) {
      try {
        return place().setItem(nameOfPast(), JSON.stringify(past.slice(0, number), withoutImages));
      } catch {
        // The storage is full.
      }
    }
  },
  /** Whether earlier requests stay in the browser when the tab is closed. */
  get stays() {
    return place() === localStorage;
  },
  set stays(stays) {
    const { past } = this;
    place().removeItem(nameOfPast());
    if (stays) localStorage.removeItem(nameOfPlace());
    else localStorage.setItem(nameOfPlace(), "tab");
    this.past = past;
  },
  /** Why the service wants another key, once: it outlives the page, which has what was asked under the last one. */
  get refusal() {
    const refusal = read(sessionStorage, REFUSAL);
    sessionStorage.removeItem(REFUSAL);
    return refusal;
  },
  set refusal({ status, message, facts }) {
    sessionStorage.setItem(REFUSAL, JSON.stringify({ status, said: { message, ...facts } }));
  },
  /** The draft, and the earlier requests under the key that this tab has. */
  forget() {
    sessionStorage.removeItem(DRAFT);
    if (session.key) for (const storage of [localStorage, sessionStorage]) for (const name of [nameOfPast(), nameOfPlace()]) storage.removeItem(name);
  },
};

/** What a turn of a chat says, with the calls that it makes. */
export function textOf({ content, tool_calls: calls = [] }) {
  const parts = Array.isArray(content) ? content.map((part) => part.text ?? "") : [content ?? ""];
  return [...parts, ...calls.map(asCall)].filter(Boolean).join("\n");
}

export const asCall = (call) => `${call.function.name}(${call.function.arguments})`;

/** What a model said, as a turn of a chat. */
export const replyOf = (content, calls) => ({ role: "assistant", content, ...(calls.length ? { tool_calls: calls } : {}) });

/** What an answer of a chat goes on from: the model, and its turns without the system's. */
export const threadOf = ({ name, text, turns = [], calls = [] }) => [name.split(" #")[0], [...turns.filter(({ role }) => role !== "system"), replyOf(text, calls)]];
