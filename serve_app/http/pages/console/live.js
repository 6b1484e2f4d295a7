// Replicas and queues as they are, from the events of /live; listens only while somebody looks.

import { byId, bytes, count, empty, make, seconds, shape, table } from "./dom.js";
import { show } from "./problems.js";
import { Lost, Refused, listen } from "./service.js";

const MAX_SAMPLES = 120;

export class Live {
  constructor() {
    this.samples = [];
  }

  /** Listens until `stop`, again and again: a stream ends after some minutes by itself. */
  async start() {
    this.stop();
    const { signal } = (this.stopping = new AbortController());
    this.last = null;
    while (!signal.aborted) {
      try {
        for await (const data of listen("live", { signal })) this.see(JSON.parse(data));
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused) {
          byId("live-body").hidden = true;
          show("live-problem", error);
          if (error.status !== 503) return;
        } else if (!(error instanceof Lost)) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  stop() {
    this.stopping?.abort();
  }

  see(now) {
    show("live-problem", null);
    byId("live-body").hidden = false;
    byId("live-router").textContent = now.router;
    const perReplica = ratesBetween(this.last, now);
    const rate = [...perReplica.values()].reduce((sum, each) => sum + each, 0);
    if (this.last) this.samples = [...this.samples, rate].slice(-MAX_SAMPLES);
    this.last = now;
    tiles(now, rate);
    chart(this.samples);
    queues(now);
    replicas(now, perReplica);
  }
}

/** Tokens per second of each replica that was there before; one that began anew has none yet. */
function ratesBetween(before, now) {
  const known = new Map((before?.replicas ?? []).map((replica) => [replica.id, replica.completion_tokens]));
  const passed = now.at - (before?.at ?? now.at);
  return new Map(
    now.replicas.map((replica) => {
      const gained = replica.completion_tokens - (known.get(replica.id) ?? replica.completion_tokens);
      return [replica.id, passed > 0 ? Math.max(0, gained / passed) : 0];
    }),
  );
}

function tiles(now, rate) {
  const sum = (name) => now.replicas.reduce((all, replica) => all + replica[name], 0);
  const refused = Object.values(now.refused).reduce((all, each) => all + each, 0);
  const told = [
    ["Tokens per second", rate.toFixed(rate < 10 ? 1 : 0), ""],
    ["Requests open", count(now.requests.open), ` of ${count(now.requests.limit)}`],
    ["Sequences running", count(sum("running")), sum("slots") ? ` of ${count(sum("slots"))}` : ""],
    ["Sequences waiting", count(sum("waiting")), ""],
    ["Refused at the door", count(refused), ""],
  ];
  byId("tiles").replaceChildren(
    ...told.map(([title, value, rest]) => make("div", { class: "tile" }, make("dt", {}, title), make("dd", {}, value, make("small", {}, rest)))),
  );
}

function chart(samples) {
  const most = Math.max(10, ...samples) * 1.1;
  const points = samples.map((rate, at) => `${(600 * (at + MAX_SAMPLES - samples.length)) / (MAX_SAMPLES - 1)},${88 - (86 * rate) / most}`);
  const floor = shape("line", { x1: 0, y1: 88, x2: 600, y2: 88 });
  const first = points[0]?.split(",")[0];
  const drawn = points.length > 1 ? [shape("polygon", { points: `${first},88 ${points.join(" ")} 600,88` }), shape("polyline", { points: points.join(" ") })] : [];
  byId("chart").replaceChildren(floor, ...drawn);
  const told = samples.length ? `now ${samples.at(-1).toFixed(0)}, at most ${Math.max(...samples).toFixed(0)} tokens per second` : "No tokens yet";
  byId("chart").ariaLabel = told;
}

function gauge(value, most, text) {
  const bar = most ? make("progress", { class: "gauge", max: most, value, "aria-hidden": "true" }) : null;
  return make("div", {}, text, bar);
}

/** Those that run, and what of it changes. */
function replicasOf(now, model) {
  const running = now.replicas.filter((each) => each.model === model).length;
  const scale = now.scales.find((each) => each.id === model);
  if (!scale) return count(running);
  const changes = ["starting", "draining"].filter((name) => scale[name]).map((name) => `${count(scale[name])} ${name}`);
  return [`${count(running)} of ${count(scale.wanted)}`, ...changes].join(", ");
}

function queues(now) {
  const waiting = (ids, state) => ids.map((id) => ({ id, state }));
  const columns = [
    ["model", (model) => make("code", {}, model.id)],
    ["state", (model) => (model.state ? make("span", { class: "tag" }, model.state) : make("span", { class: "tag good" }, "ready"))],
    ["replicas", (model) => (model.state === "asleep" ? "–" : replicasOf(now, model.id))],
    ["inside, of so many places", (model) => (model.state ? "–" : gauge(model.sequences, model.places, `${count(model.sequences)} of ${count(model.places)}`))],
    ["a request now would wait", (model) => (model.state ? "–" : seconds(model.wait_s)), true],
  ];
  const rows = [...now.models, ...waiting(now.loading, "loading"), ...waiting(now.asleep, "asleep")];
  refill("queues", rows.length ? table("Queues", columns, rows) : empty("No model says how much it can hold."));
}

function replicas(now, rates) {
  const memory = (each) => `${bytes(each.blocks_used * each.block_bytes)} of ${bytes(each.blocks * each.block_bytes)}`;
  const columns = [
    ["replica", (each) => make("code", {}, each.id)],
    ["model", (each) => each.model],
    ["running", (each) => gauge(each.running, each.slots, each.slots ? `${count(each.running)} of ${count(each.slots)}` : count(each.running))],
    ["waiting", (each) => count(each.waiting), true],
    ["keys and values", (each) => gauge(each.blocks_used, each.blocks, each.block_bytes ? memory(each) : `${count(each.blocks_used)} of ${count(each.blocks)} blocks`)],
    ["tokens/s", (each) => rates.get(each.id).toFixed(0), true],
    ["steps", (each) => count(each.steps), true],
    ["from cache", (each) => count(each.prefix_hit_tokens), true],
    ["failures", (each) => (each.failures ? make("span", { class: "tag bad" }, count(each.failures)) : "0"), true],
  ];
  refill("replicas", now.replicas.length ? table("Replicas", columns, now.replicas) : empty("No replica is ready. They appear here as soon as they have loaded."));
}

/** Takes the new content in; how far it was scrolled, and the focus, stay. */
function refill(id, content) {
  const before = byId(id).firstElementChild;
  const [left, hadFocus] = [before?.scrollLeft ?? 0, before === document.activeElement];
  byId(id).replaceChildren(content);
  content.scrollLeft = left;
  if (hadFocus) content.focus();
}
