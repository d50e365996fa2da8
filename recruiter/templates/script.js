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
// A page that says so is read again while somebody looks at it, and not while it is used.
const seconds = Number(document.querySelector("main").dataset.again);
if (seconds > 0) {
  const again = async () => {
    const main = document.querySelector("main");
    const used = main.contains(document.activeElement) && document.activeElement !== main;
    if (document.visibilityState === "visible" && !used && document.getSelection().isCollapsed) {
      try {
        const answer = await fetch(location.href, { redirect: "error" });
        const next = answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        if (next) main.replaceWith(document.adoptNode(next));
      } catch { /* The next one may succeed. */ }
    }
    setTimeout(again, seconds * 1000);
  };
  setTimeout(again, seconds * 1000);
}
