// What the pages do besides HTML. Each of them works without this, except that of events.
"use strict";
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
// Reads the page again while somebody looks at it, and not while something is selected, pressed or typed.
const outdated = document.querySelector("[data-outdated]");
const { again } = document.querySelector("main").dataset;
let { live } = document.querySelector("main").dataset;
const isSeen = () => document.visibilityState === "visible";
const isUsed = (main) => !document.getSelection().isCollapsed || main.matches(":active") || main.querySelector("input:not([type=checkbox]):focus");
const nameOf = (element) => [element.tagName, element.closest("[data-key]")?.dataset.key, element.getAttribute("href"), element.getAttribute("name"), element.getAttribute("aria-label")].join();
// What is open, scrolled, chosen, filled in and focused stays so.
const KEPT = "details, .scroll, pre, input:not([type=hidden])";
const replace = (main, next) => {
  const kept = new Map();
  for (const element of main.querySelectorAll(KEPT)) {
    const { open, scrollLeft, scrollTop, checked, value } = element;
    kept.set(nameOf(element), { open, scrollLeft, scrollTop, checked, value });
  }
  const focused = main.contains(document.activeElement) && document.activeElement;
  main.replaceWith(document.adoptNode(next));
  for (const element of next.querySelectorAll(KEPT)) Object.assign(element, kept.get(nameOf(element)));
  const wanted = focused === main ? next : focused && [...next.querySelectorAll(focused.tagName)].find((element) => nameOf(element) === nameOf(focused));
  if (wanted) wanted.focus({ preventScroll: true });
};
const say = (isOutdated) => {
  if (isOutdated === outdated.hasChildNodes()) return;
  const link = Object.assign(document.createElement("a"), { href: "", textContent: "Load it again" });
  outdated.replaceChildren(...(isOutdated ? ["This page is not up to date. ", link] : []));
};
let due = false, waits = false, reading = false, isCut = false, source = null, notBefore = 0;
// In a second, or after so many; not before ten times as long as the last reading took.
const soon = (seconds = 1) => {
  due = true;
  if (waits || reading || !isSeen()) return;
  waits = true;
  setTimeout(() => { waits = false; renew(); }, Math.max(seconds * 1000, notBefore - performance.now()));
};
const renew = async () => {
  const main = document.querySelector("main");
  if (!isSeen()) return;
  if (isUsed(main)) { say(true); soon(); return; }
  let pause = 1;
  const begun = performance.now();
  [due, reading] = [false, true];
  try {
    const answer = await fetch(location.href, { redirect: "error", signal: AbortSignal.timeout(30_000) });
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    if (!answer.ok || !next) throw new Error(answer.statusText);
    const names = new Set([...next.querySelectorAll("input")].map(nameOf));
    // A chosen row that the next page does not have would be lost.
    if (![...main.querySelectorAll("input:checked")].every((chosen) => names.has(nameOf(chosen)))) [due, pause] = [true, 15];
    else if (isUsed(main)) due = true;
    else {
      replace(main, next);
      if (next.dataset.live !== live) { live = next.dataset.live; unfollow(); follow(); }
    }
  } catch { [due, pause] = [true, 5]; }
  reading = false;
  notBefore = performance.now() + 10 * (performance.now() - begun);
  say(due || isCut);
  if (due) soon(pause);
};
// Every so many seconds.
if (again) setInterval(soon, again * 1000);
// After events, while the page is seen: a browser has few connections, which hidden pages would keep.
const follow = () => {
  if (!isSeen()) unfollow();
  if (!live || !isSeen() || source) return;
  source = new EventSource(live);
  // Events begin up to a second later.
  source.onopen = () => { isCut = false; setTimeout(soon, 1000); };
  source.onmessage = () => soon();
  source.addEventListener("missed", () => soon());
  source.onerror = (event) => { if (event.target.readyState === EventSource.CLOSED) { isCut = true; say(true); } };
};
const unfollow = () => {
  source?.close();
  [source, isCut] = [null, false];
};
document.addEventListener("visibilitychange", follow);
follow();
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
  // Also of a hidden page: a connection that is opened again behind an event begins there, a new one does not.
  const events = new EventSource(tail.dataset.tail);
  events.onopen = () => { state.textContent = "Connected: events appear here as they happen."; };
  events.onerror = () => { state.textContent = events.readyState === EventSource.CLOSED ? "Not connected. Load the page again." : "Not connected; trying again."; };
  events.addEventListener("missed", (event) => add("", "missed", null, `${JSON.parse(event.data).missed ?? "An unknown number of"} events were missed.`));
  events.onmessage = (event) => {
    const { topic, at, job, ...details } = JSON.parse(event.data);
    add(at?.$date ?? "", topic, job?.$oid, JSON.stringify(details));
  };
}
