// Begins here: is the service there, does it want a key, and which section is looked at.

import { Access } from "./access.js";
import { Adapters } from "./adapters.js";
import { Api } from "./api.js";
import { Batches } from "./batches.js";
import { byId, on } from "./dom.js";
import { Live } from "./live.js";
import { memory } from "./memory.js";
import { showModels } from "./models.js";
import { Playground } from "./playground.js";
import { show } from "./problems.js";
import { Lost, Refused, ask, session, signals, watch } from "./service.js";

const LINKS = [...byId("sections").children];
const FIRST = /\/docs\/*$/.test(location.pathname) ? "api" : "playground";
const live = new Live();
let playground = null;
let api = null;
/** Sections of a service that asks for keys. */
let guarded = {};
const adapters = new Adapters(() => showAll());

/** Reads the service's description, which needs a key where any is asked for; then shows what was asked for. */
async function enter() {
  try {
    const document = await ask("openapi.json");
    const asksForKeys = document.security !== undefined;
    playground ??= new Playground(document);
    api ??= new Api(document);
    if (asksForKeys && !guarded.access) guarded = { access: new Access(document), batches: new Batches(document) };
    if (!asksForKeys) guarded = {};
    byId("version").textContent = `Version ${document.info.version}`;
    byId("sections").hidden = false;
    byId("sign-out").hidden = !session.key;
    for (const link of LINKS) link.hidden = link.dataset.needs === "keys" && !asksForKeys;
    await look();
  } catch (error) {
    if (error.status !== 401 && !(error instanceof Lost)) throw error;
  }
}

/** Shows the section that the address names. again: the page looks by itself, and disturbs nobody */
async function look({ again = false } = {}) {
  const [wanted, query] = location.hash.slice(1).split("?");
  const name = LINKS.some((link) => link.hash === `#${wanted}` && !link.hidden) ? wanted : FIRST;
  reveal(name);
  if (name === "live") void live.start();
  else live.stop();
  try {
    if (name === "playground") {
      const refused = await playground.refresh(again ? [] : new URLSearchParams(query).getAll("model"));
      if (refused?.status === 403 && guarded.access && !wanted) location.replace("#access"); // a key that is for something else
    }
    if (name === "models") await showAll();
    if (name === "api") api.open(again ? null : new URLSearchParams(query).get("part"));
    if (!again || !guarded[name]?.isShown) await guarded[name]?.refresh();
  } catch (error) {
    if (!(error instanceof Lost || error instanceof Refused)) throw error;
  }
}

async function showAll() {
  await showModels();
  await adapters.refresh();
}

function reveal(name) {
  for (const section of byId("main").children) section.hidden = section.id !== name;
  for (const link of LINKS) link.ariaCurrent = link.hash === `#${name}` ? "page" : null;
  document.title = `${LINKS.find((link) => link.ariaCurrent)?.textContent ?? "Sign in"} · serve_app`;
}

function askForKey(refused) {
  live.stop();
  if (session.key) memory.refusal = refused;
  memory.forget();
  session.key = null;
  if (playground) return location.reload(); // the page has what was asked under that key
  const { refusal } = memory;
  show("sign-in-problem", refusal && new Refused(refusal.status, refusal.said));
  byId("sections").hidden = true;
  byId("sign-out").hidden = true;
  reveal("sign-in");
  byId("key").focus();
}

async function signIn() {
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) return show("sign-in-problem", new Error("A key has no blanks, and letters of the English alphabet alone."));
  session.key = key;
  await enter();
}

function signOut() {
  memory.forget();
  session.key = null;
  location.hash = "";
  location.reload();
}

function heard({ state, models, before }) {
  const words = { ready: "Connected", loading: `Loading ${models?.join(", ") ?? ""}`.trim(), lost: "Not reachable" };
  byId("state").textContent = words[state];
  byId("state-dot").className = `dot ${state}`;
  byId("lost").hidden = state !== "lost";
  const isBack = before === "lost" || before === "doubted";
  if (state === "lost" || (!isBack && before !== "loading")) return;
  if (playground && byId("sign-in").hidden) void look({ again: true });
  else if (!playground && (session.key || byId("sign-in").hidden)) void enter();
}

signals.addEventListener("unknown", (event) => askForKey(event.detail));
signals.addEventListener("state", (event) => heard(event.detail));
addEventListener("hashchange", () => playground && byId("sign-in").hidden && look());
on("sign-in-form", "submit", signIn);
on("sign-out", "click", signOut);
void watch();
void enter();
