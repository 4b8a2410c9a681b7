"use strict";
{
  // Airflow's own choice of theme, which its pages keep under this name.
  const dress = () => {
    const theme = localStorage.getItem("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  dress();
  addEventListener("storage", dress);

  // Every few seconds the parts marked data-live are fetched anew, added and removed; forms stay as
  // they are.
  const note = document.getElementById("stale");
  const say = (words) => { note.textContent = words; note.hidden = words === ""; };
  const inUse = (part) =>
    part.contains(document.activeElement) ||
    (!getSelection().isCollapsed && getSelection().containsNode(part, true));
  const update = (fresh) => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (inUse(part) || next?.innerHTML === part.innerHTML) continue;
      if (next) part.replaceWith(document.importNode(next, true));
      else part.remove();
    }
    for (const next of fresh.querySelectorAll("[data-live]")) {
      if (document.getElementById(next.id)) continue;
      const before = document.getElementById(next.previousElementSibling?.id);
      const part = document.importNode(next, true);
      if (before) before.after(part);
      else document.querySelector("main").prepend(part);
    }
  };
  const refresh = async () => {
    const answer = await fetch(location.href, { redirect: "error" });
    if (answer.status === 401) return say("You are no longer logged in: log in to Airflow again.");
    if (!answer.ok) return say(`The page could not be refreshed (${answer.status}).`);
    update(new DOMParser().parseFromString(await answer.text(), "text/html"));
    say("");
  };
  const seconds = Number(document.body.dataset.refreshS);
  const loop = async () => {
    if (!document.hidden) {
      await refresh().catch(() => say("Airflow does not answer; what is shown is older."));
    }
    setTimeout(loop, 1000 * seconds);
  };
  if (seconds) setTimeout(loop, 1000 * seconds);
}
