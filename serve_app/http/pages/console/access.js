// Tenants and keys, for administrators; for any other key its own usage alone.

import { button, byId, copier, count, empty, make, on, removal, table, when } from "./dom.js";
import { attemptIn } from "./problems.js";
import { ask } from "./service.js";
import { Usage } from "./usage.js";

const attempt = attemptIn("access-problem");

export class Access {
  /** document: what says which scopes there are */
  constructor(document) {
    const scopes = document.components.schemas.NewKey.properties.scopes.items.enum;
    byId("key-scopes").replaceChildren(
      ...scopes.map((scope) => make("label", {}, make("input", { type: "checkbox", value: scope, checked: scope === "infer" }), scope)),
    );
    this.usage = new Usage();
    this.change = document.components.schemas.TenantChange.properties;
    on("edit-tenant", "submit", () => attempt(() => this.saveTenant()));
    on("edit-cancel", "click", () => (byId("edit-tenant").hidden = true));
    on("add-tenant", "submit", () => attempt(() => this.addTenant()));
    on("add-key", "submit", () => attempt(() => this.addKey()));
  }

  refresh() {
    return attempt(() => this.look());
  }

  async look() {
    const isAdmin = await this.showAll();
    for (const section of document.querySelectorAll("[data-needs=admin]")) section.hidden = !isAdmin;
    await this.usage.refresh(isAdmin);
    this.isShown = true;
  }

  /** Whether the key may see tenants and keys, which are shown then. */
  async showAll() {
    try {
      const [tenants, keys] = await Promise.all([ask("admin/tenants"), ask("admin/keys")]);
      this.showTenants(tenants.data);
      this.showKeys(keys.data);
      return true;
    } catch (error) {
      if (error.status === 403) return false;
      throw error;
    }
  }

  showTenants(tenants) {
    const columns = [
      ["name", (each) => each.name],
      ["models", (each) => make("code", {}, each.models.join(", ") || "none")],
      ["weight", (each) => String(each.weight), true],
      ["class", (each) => each.priority],
      ["limits", (each) => limitsOf(each)],
      ["", (each) => make("span", {}, this.editing(each), removal(`Remove ${each.name}`, "Remove", "It loses all its keys", () => this.remove(pathOf(each.name))))],
    ];
    byId("tenants").replaceChildren(tenants.length ? table("All tenants", columns, tenants) : empty("There is no tenant yet. Add the first one below."));
    const { value } = byId("key-tenant");
    byId("key-tenant").replaceChildren(...tenants.map(({ name }) => make("option", { selected: name === value }, name)));
  }

  editing(tenant) {
    return button("Edit", () => this.edit(tenant), `Edit ${tenant.name}`);
  }

  /** Opens the form with what the tenant has: its weight, class, models and limits, those of one request first. */
  edit(tenant) {
    this.edited = tenant.name;
    byId("edit-title").textContent = `Edit ${tenant.name}`;
    const limits = { max_n: tenant.max_n, max_tokens: tenant.max_tokens, ...tenant.limits };
    byId("edit-fields").replaceChildren(
      field("weight", make("input", { type: "number", step: "any", value: tenant.weight, min: this.change.weight.minimum, max: this.change.weight.maximum })),
      field("priority", make("select", {}, ...this.change.priority.enum.map((value) => make("option", { selected: value === tenant.priority }, value)))),
      field("models", make("input", { value: tenant.models.join(", ") })),
      ...Object.entries(limits).map(([name, value]) => field(name, make("input", { type: "number", step: "any", min: 0, value: value ?? "", placeholder: "no limit" }))),
    );
    byId("edit-tenant").hidden = false;
    byId("edit-fields").querySelector("input").focus();
  }

  async saveTenant() {
    const written = Object.fromEntries([...byId("edit-fields").querySelectorAll("input, select")].map((each) => [each.name, each.value]));
    const { weight, priority, models, ...bounds } = written;
    const { max_n, max_tokens, ...limits } = Object.fromEntries(Object.entries(bounds).map(([name, value]) => [name, value === "" ? null : Number(value)]));
    const body = { weight: Number(weight), priority, models: namesIn(models), max_n, max_tokens, limits };
    await ask(pathOf(this.edited), { method: "PATCH", body });
    byId("edit-tenant").hidden = true;
    await this.look();
  }

  showKeys(keys) {
    const columns = [
      ["id", (each) => make("code", {}, each.id)],
      ["tenant", (each) => each.tenant],
      ["for", (each) => each.scopes.join(", ")],
      ["made", (each) => when(each.created_at)],
      ["until", (each) => when(each.expires_at)],
      ["state", (each) => make("span", { class: each.is_valid ? "tag good" : "tag" }, each.is_valid ? "good" : each.revoked_at ? "revoked" : "expired")],
      ["", (each) => (each.is_valid ? this.keyActions(each) : "")],
    ];
    const sorted = [...keys].sort((one, two) => Number(two.is_valid) - Number(one.is_valid) || two.created_at - one.created_at);
    byId("keys").replaceChildren(sorted.length ? table("All keys", columns, sorted) : empty("There is no key yet."));
  }

  keyActions(key) {
    const path = `admin/keys/${encodeURIComponent(key.id)}`;
    const rotate = button("Rotate", () => attempt(async () => this.reveal(await ask(`${path}/rotate`, { method: "POST", body: {} }), "The old key stays good for a day.")), `Rotate ${key.id}`);
    return make("span", {}, rotate, removal(`Revoke ${key.id}`, "Revoke", "It is good for nothing then", () => this.remove(path)));
  }

  remove(path) {
    return attempt(async () => (await ask(path, { method: "DELETE" }), await this.look()));
  }

  async addTenant() {
    const models = namesIn(byId("tenant-models").value);
    await ask("admin/tenants", { method: "POST", body: { name: byId("tenant-name").value.trim(), models } });
    byId("tenant-name").value = "";
    await this.look();
  }

  async addKey() {
    const days = byId("key-days").value;
    const scopes = [...byId("key-scopes").querySelectorAll("input:checked")].map((each) => each.value);
    const body = { tenant: byId("key-tenant").value, scopes, ...(days === "" ? {} : { lifetime_s: Number(days) * 86400 }) };
    await this.reveal(await ask("admin/keys", { method: "POST", body }), "");
  }

  /** Shows a key this once. */
  async reveal(made, besides) {
    byId("new-key").replaceChildren(make("strong", {}, `A key of ${made.tenant}, shown this once. ${besides}`), make("code", { class: "secret" }, made.key), copier("Copy the key", () => made.key));
    byId("new-key").hidden = false;
    await this.look();
    byId("new-key").scrollIntoView({ block: "nearest" });
  }
}

const pathOf = (name) => `admin/tenants/${encodeURIComponent(name)}`;
const namesIn = (text) => text.split(/[\s,]+/).filter(Boolean);

function field(name, control) {
  control.id = `edit-${name}`;
  control.name = name;
  return make("div", { class: "field" }, make("div", { class: "heading" }, make("label", { for: control.id }, name.replaceAll("_", " "))), control);
}

function limitsOf(tenant) {
  const set = Object.entries({ ...tenant.limits, max_n: tenant.max_n, max_tokens: tenant.max_tokens }).filter(([, value]) => value !== null);
  return set.map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", ") || make("span", { class: "muted" }, "none");
}
