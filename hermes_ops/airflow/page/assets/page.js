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
  // they are, and so does every element that has not changed: with it the focus, where a table is
  // scrolled to, and what a screen reader has read out.
  const note = document.getElementById("stale");
  const say = (words) => { if (note.textContent !== words) note.textContent = words; };
  const isSelected = (part) =>
    !getSelection().isCollapsed && getSelection().containsNode(part, true);
  const addressOf = (link) => link.getAttribute("href");

  // The new form of the link that has the focus: of those with its address the one in its place.
  const successor = (part, next) => {
    const focused = document.activeElement;
    if (!part.contains(focused)) return null;
    const links = (root) =>
      [...root.querySelectorAll("a")].filter((link) => addressOf(link) === addressOf(focused));
    const found = links(next);
    return found[Math.min(links(part).indexOf(focused), found.length - 1)] ?? null;
  };
  const renewChildren = (old, next, heir) => {
    const children = [...old.childNodes], nexts = [...next.childNodes];
    const kept = heir ? children.findIndex((c) => c.contains(document.activeElement)) : -1;
    const place = heir ? nexts.findIndex((c) => c.contains(heir)) : -1;
    const renewAll = (range, news, before) => {
      range.slice(news.length).forEach((child) => child.remove());
      news.forEach((child, i) => {
        if (i < range.length) renew(range[i], child, null);
        else old.insertBefore(child, before);
      });
    };
    if (kept < 0 || place < 0) return renewAll(children, nexts, null);
    renewAll(children.slice(0, kept), nexts.slice(0, place), children[kept]);
    renew(children[kept], nexts[place], heir);
    renewAll(children.slice(kept + 1), nexts.slice(place + 1), null);
  };
  const renew = (old, next, heir) => {
    if (old.isEqualNode(next)) return;
    const isElement = old.nodeType === Node.ELEMENT_NODE && old.nodeName === next.nodeName;
    if (!isElement || (old.nodeName === "A" && addressOf(old) !== addressOf(next))) {
      return old.replaceWith(next);
    }
    for (const name of old.getAttributeNames()) {
      if (!next.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const name of next.getAttributeNames()) {
      const value = next.getAttribute(name);
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    renewChildren(old, next, heir === next ? null : heir);
  };
  const update = (fresh) => {
    let skipped = "";
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (next?.isEqualNode(part)) continue;
      if (isSelected(part)) {
        skipped = "Where text is selected, the page is not refreshed.";
      } else if (next) {
        const imported = document.importNode(next, true);
        renew(part, imported, successor(part, imported));
      } else {
        part.remove();
      }
    }
    for (const next of fresh.querySelectorAll("[data-live]")) {
      if (document.getElementById(next.id)) continue;
      const before = document.getElementById(next.previousElementSibling?.id);
      const part = document.importNode(next, true);
      if (before) before.after(part);
      else document.querySelector("main").prepend(part);
    }
    return skipped;
  };
  const refresh = async () => {
    const answer = await fetch(location.href, { redirect: "error" });
    if (answer.status === 401) return say("You are no longer logged in: log in to Airflow again.");
    if (!answer.ok) return say(`The page could not be refreshed (${answer.status}).`);
    say(update(new DOMParser().parseFromString(await answer.text(), "text/html")));
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
