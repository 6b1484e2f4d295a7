// Writes a request as a command and as a program that do the same.

import { byId, copier, on } from "./dom.js";
import { PATHS } from "./requests.js";
import { address, session } from "./service.js";

const NAMED = new Set(["model", "prompt", "messages", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty"]);
/** What OpenAI's client has arguments for; all else goes through `extra_body`. */

export class Code {
  /** requests: gives those that are to be written, with their bodies */
  constructor(requests) {
    this.requests = requests;
    this.buttons = [...document.querySelectorAll("[data-language]")];
    on("code", "toggle", () => this.write());
    byId("code-actions").append(copier("Copy the code", () => byId("code-text").textContent));
    for (const button of this.buttons) on(button, "click", () => this.speak(button));
  }

  speak(chosen) {
    for (const button of this.buttons) button.ariaPressed = button === chosen;
    this.write();
  }

  write() {
    if (!byId("code").open) return;
    const language = this.buttons.find((button) => button.ariaPressed === "true").dataset.language;
    const written = language === "curl" ? asCurl : asPython;
    byId("code-text").textContent = this.requests().map(({ body }) => written(body.messages ? "chat" : "completion", body)).join("\n\n") || "Choose a model first.";
  }
}

function asCurl(kind, body) {
  const key = session.key ? ` \\\n  -H "authorization: Bearer $SERVE_APP_KEY"` : "";
  const quoted = JSON.stringify(body, null, 1).replace(/\n\s*/g, " ").replaceAll("'", "'\\''");
  return `curl -N ${address(PATHS[kind])} \\\n  -H 'content-type: application/json'${key} \\\n  -d '${quoted}'`;
}

function asPython(kind, body) {
  const isChat = kind === "chat";
  const key = session.key ? 'os.environ["SERVE_APP_KEY"]' : '"none"';
  const entries = Object.entries(body).filter(([name]) => name !== "stream_options");
  const named = entries.filter(([name]) => NAMED.has(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  const others = entries.filter(([name]) => !NAMED.has(name));
  const besides = others.length ? [`    extra_body=${literal(Object.fromEntries(others))},`] : [];
  const call = `client.${isChat ? "chat.completions" : "completions"}.create(`;
  return [
    ...(session.key ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(String(address("v1")))}, api_key=${key})`,
    `answer = ${call}`,
    ...named,
    ...besides,
    ")",
    ...(body.stream ? streamed(isChat, Array.isArray(body.model)) : whole(isChat)),
  ].join("\n");
}

function streamed(isChat, isSeveral) {
  const text = isChat ? 'choice.delta.content or ""' : "choice.text";
  if (!isSeveral) return ["for chunk in answer:", "    for choice in chunk.choices:", `        print(${text}, end="", flush=True)`];
  return [
    "texts = {}",
    "for chunk in answer:",
    "    for choice in chunk.choices:",
    `        texts[choice.index] = texts.get(choice.index, "") + (${text})`,
    "print(texts)",
  ];
}

function whole(isChat) {
  return ["for choice in answer.choices:", `    print(choice.${isChat ? "message.content" : "text"})`];
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
