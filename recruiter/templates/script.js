// What the pages do besides HTML. Each of them works without this.
"use strict";
// `/` goes to the filter.
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const filter = document.querySelector("details.filter");
  const field = filter && filter.querySelector("input:not([type=hidden])");
  if (!field) return;
  event.preventDefault();
  filter.open = true;
  field.focus();
});
// A form is sent once. The page may come back from the browser's history.
document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  for (const button of event.target.querySelectorAll("button")) setTimeout(() => { button.disabled = true; });
});
window.addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("form[method=post] button")) button.disabled = false;
});
// Fields that are empty are not in the address.
document.addEventListener("formdata", (event) => {
  if (event.target.method !== "get") return;
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
});
// Reads the page again while somebody looks at it, and not while it is used.
const renew = async () => {
  const main = document.querySelector("main");
  const used = main.contains(document.activeElement) && document.activeElement !== main;
  if (document.visibilityState !== "visible" || used || !document.getSelection().isCollapsed || main.querySelector(":checked")) return;
  try {
    const answer = await fetch(location.href, { redirect: "error" });
    const next = answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    if (next) main.replaceWith(document.adoptNode(next));
  } catch { /* The next one may succeed. */ }
};
// Every so many seconds.
const { again, live } = document.querySelector("main").dataset;
if (again) {
  const later = () => setTimeout(async () => { await renew(); later(); }, again * 1000);
  later();
}
// After events, at most once per second.
if (live) {
  let waits = false;
  new EventSource(live).onmessage = () => {
    if (waits) return;
    waits = true;
    setTimeout(async () => { waits = false; await renew(); }, 1000);
  };
}
// A list of events grows at its begin.
const tail = document.querySelector("[data-tail]");
if (tail) {
  const most = 500, state = document.querySelector("[data-tail-state]"), source = new EventSource(tail.dataset.tail);
  const cell = (row, content) => row.insertCell().append(content);
  const add = (at, topic, job, details) => {
    const row = tail.tBodies[0].insertRow(0);
    cell(row, at);
    cell(row, topic);
    const link = job ? Object.assign(document.createElement("a"), { href: `/jobs/${job}`, textContent: job }) : "";
    cell(row, link);
    cell(row, details);
    if (tail.tBodies[0].rows.length > most) tail.tBodies[0].deleteRow(most);
  };
  source.onopen = () => { state.textContent = "Connected: events appear here as they happen."; };
  source.onerror = () => { state.textContent = "Not connected; trying again."; };
  source.addEventListener("missed", (event) => add("", "missed", null, `${JSON.parse(event.data).missed ?? "An unknown number of"} events were missed.`));
  source.onmessage = (event) => {
    if (!event.data) return;
    const { topic, at, job, ...details } = JSON.parse(event.data);
    add(at?.$date ?? "", topic, job?.$oid, JSON.stringify(details));
  };
}
