// Sends a request and hands what comes of it to its answers, whole or as it is written.

import { ask, listen, refusalIn } from "./service.js";

export const PATHS = { completion: "v1/completions", chat: "v1/chat/completions" };

/**
 * Raises Refused, Lost, AbortError; answers that had not ended are left as they are then.
 * answerOf: the answer of a choice's number and of the model that it names. Returns the usage.
 */
export async function carryOut(kind, body, { answerOf, signal }) {
  const take = kind === "chat" ? takeChat : takeCompletion;
  const sent = { method: "POST", body, signal };
  let usage = null;
  const see = (part) => {
    const refusal = refusalIn(part);
    if (refusal) throw refusal;
    usage = part.usage ?? usage;
    for (const choice of part.choices ?? []) take(choice, answerOf(choice.index, choice.model));
  };
  if (!body.stream) {
    see(await ask(PATHS[kind], sent));
    return usage;
  }
  for await (const data of listen(PATHS[kind], sent)) {
    if (data !== "[DONE]") see(JSON.parse(data));
  }
  return usage;
}

function takeCompletion(choice, answer) {
  if (choice.text || choice.logprobs) answer.write(choice.text ?? "", choice.logprobs);
  if (choice.finish_reason) answer.finish(choice.finish_reason);
}

function takeChat(choice, answer) {
  const said = choice.delta ?? choice.message ?? {};
  const text = `${said.reasoning_content ?? ""}${said.content ?? ""}`;
  if (text || choice.logprobs?.content?.length) answer.say(text, choice.logprobs);
  (said.tool_calls ?? []).forEach((call, at) => answer.call({ index: at, ...call }));
  if (choice.finish_reason) answer.finish(choice.finish_reason);
}
