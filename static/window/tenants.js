/** Who takes the machine: each tenant's part of the last minute's work, and what it has open or was refused. */

/**
 * @import { TenantLoad, TenantsStatus } from "../api.js"
 */

import { el, tableOf } from "../dom.js";
import { count, number, percent } from "../format.js";

/**
 * The rows of the table: the tenants that are named, then the sum of the others, if there are some.
 * @param {TenantsStatus} status
 * @returns {string[][]}
 */
export function rowsOf({ tenants, others }) {
  /** @param {string} name  @param {TenantLoad} load */
  const row = (name, load) => [name, percent(load.share), number(load.waiting), number(load.running), number(load.refused)];
  const rows = tenants.map((load) => row(load.tenant, load));
  if (others.tenants > 0) rows.push(row(count(others.tenants, "other"), others));
  return rows;
}

/** A part of the window, which is there if the server has more than one tenant. */
export class Tenants {
  #card = el("div", { class: "tenants" });
  element = el(
    "section",
    { "aria-labelledby": "window-tenants", hidden: true },
    el("h3", { id: "window-tenants", class: "part" }, "Who takes the machine: the last minute"),
    this.#card,
  );

  /** @param {TenantsStatus} status */
  set(status) {
    const heads = ["Tenant", "Work", "Waiting", "Running", "Refused"];
    this.element.hidden = status.tenants.length + status.others.tenants < 2;
    this.#card.replaceChildren(tableOf("Tenants by their part of the work", heads, rowsOf(status)));
  }
}
