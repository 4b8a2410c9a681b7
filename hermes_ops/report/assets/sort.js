"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const compare = (one, other) => {
    const [a, b] = [Number(one), Number(other)];
    if (one === "" || other === "") return (one === "") - (other === "");
    return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const order = (a, b) => {
        const [one, other] = [key(a, column), key(b, column)];
        const found = compare(one, other);
        return down && one !== "" && other !== "" ? -found : found;
      };
      table.tBodies[0].append(...rows.sort(order));
    });
  });
}
