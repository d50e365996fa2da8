// What the pages do besides HTML. Each of them works without this, except that of events.
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
// Reads the page again while somebody looks at it. Of one that is being used, a notice says that it has changed.
const outdated = document.querySelector("[data-outdated]");
const { again, live } = document.querySelector("main").dataset;
const isSeen = () => document.visibilityState === "visible";
const isUsed = (main) => !document.getSelection().isCollapsed || main.querySelector("input:checked") || main.contains(document.activeElement?.closest("input, textarea, select, button"));
const nameOf = (element) => element.getAttribute("href") ?? element.getAttribute("aria-label") ?? element.textContent;
// What is open, scrolled and focused stays so.
const replace = (main, next) => {
  const states = [["details", "open"], [".scroll", "scrollLeft"], ["pre", "scrollTop"]];
  const kept = states.map(([selector, state]) => [...main.querySelectorAll(selector)].map((element) => element[state]));
  const focused = main.contains(document.activeElement) && document.activeElement !== main && document.activeElement;
  main.replaceWith(document.adoptNode(next));
  states.forEach(([selector, state], at) => next.querySelectorAll(selector).forEach((element, index) => { element[state] = kept[at][index] ?? element[state]; }));
  if (focused) [...next.querySelectorAll(focused.tagName)].find((element) => nameOf(element) === nameOf(focused))?.focus({ preventScroll: true });
};
let due = false, reading = false;
const renew = async () => {
  const main = document.querySelector("main");
  due = true;
  if (reading || !isSeen()) return;
  if (isUsed(main)) { outdated.hidden = Boolean(again); return; }
  [due, reading] = [false, true];
  try {
    const answer = await fetch(location.href, { redirect: "error", signal: AbortSignal.timeout(30_000) });
    const next = answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    if (next && !isUsed(main)) replace(main, next); else due = true;
  } catch { due = true; }
  reading = false;
  outdated.hidden = !due;
};
// Every so many seconds.
if (again) setInterval(renew, again * 1000);
// Events of a path while the page is seen: a browser has few connections, which hidden pages would keep.
const follow = (path, open) => {
  let source = null;
  const change = () => {
    if (isSeen() && !source) source = open(new EventSource(path));
    if (!isSeen() && source) { source.close(); source = null; }
  };
  document.addEventListener("visibilitychange", change);
  change();
};
// After events, at most once per second; and after the begin of a connection: its events begin up to a second later.
if (live) {
  let waits = false;
  const soon = () => {
    if (waits) return;
    waits = true;
    setTimeout(async () => { waits = false; await renew(); }, 1000);
  };
  follow(live, (source) => {
    source.onopen = () => setTimeout(soon, 1000);
    source.onmessage = soon;
    source.addEventListener("missed", soon);
    source.onerror = () => { if (source.readyState === EventSource.CLOSED) outdated.hidden = false; };
    return source;
  });
}
// A list of events grows at its begin, and can be held.
const tail = document.querySelector("[data-tail]");
if (tail) {
  const most = 500, state = document.querySelector("[data-tail-state]"), hold = document.querySelector("[data-hold]"), held = [];
  const show = ([at, topic, job, details]) => {
    const row = tail.tBodies[0].insertRow(0);
    const link = job ? Object.assign(document.createElement("a"), { href: `/jobs/${job}`, textContent: job }) : "";
    for (const content of [at, topic, link, details]) row.insertCell().append(content);
    if (tail.tBodies[0].rows.length > most) tail.tBodies[0].deleteRow(most);
  };
  const isHeld = () => hold.getAttribute("aria-pressed") === "true";
  const add = (...event) => {
    if (!isHeld()) return show(event);
    if (held.push(event) > most) held.shift();
  };
  hold.hidden = false;
  hold.onclick = () => {
    hold.setAttribute("aria-pressed", String(!isHeld()));
    if (!isHeld()) held.splice(0).forEach(show);
  };
  follow(tail.dataset.tail, (source) => {
    source.onopen = () => { state.textContent = "Connected: events appear here as they happen."; };
    source.onerror = () => { state.textContent = source.readyState === EventSource.CLOSED ? "Not connected. Load the page again." : "Not connected; trying again."; };
    source.addEventListener("missed", (event) => add("", "missed", null, `${JSON.parse(event.data).missed ?? "An unknown number of"} events were missed.`));
    source.onmessage = (event) => {
      const { topic, at, job, ...details } = JSON.parse(event.data);
      add(at?.$date ?? "", topic, job?.$oid, JSON.stringify(details));
    };
    return source;
  });
}
