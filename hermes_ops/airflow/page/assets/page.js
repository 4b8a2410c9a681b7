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

  // Every few seconds the parts marked data-live are fetched anew; forms stay as they are.
  const note = document.getElementById("stale");
  const say = (words) => { note.textContent = words; note.hidden = words === ""; };
  const inUse = (part) =>
    part.contains(document.activeElement) ||
    (!getSelection().isCollapsed && getSelection().containsNode(part, true));
  const refresh = async () => {
    const answer = await fetch(location.href, { redirect: "error" });
    if (answer.status === 401) return say("You are no longer logged in: log in to Airflow again.");
    if (!answer.ok) return say(`The page could not be refreshed (${answer.status}).`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (next && !inUse(part) && next.innerHTML !== part.innerHTML) part.replaceWith(next);
    }
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
