"use strict";
const tip = document.createElement("div");
tip.className = "tip";
tip.setAttribute("role", "status");
tip.hidden = true;
document.body.append(tip);
const cells = [...document.querySelectorAll(".cell")];
const texts = new Map(cells.map((cell) => [cell, cell.title]));
const show = (cell) => {
  tip.textContent = texts.get(cell);
  tip.hidden = false;
  const at = cell.getBoundingClientRect(), box = tip.getBoundingClientRect(), wide = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(at.left + at.width / 2 - box.width / 2, wide - box.width - 8));
  const above = at.top - box.height - 10;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 10}px`;
};
const hide = () => { tip.hidden = true; };
for (const cell of cells) {
  cell.removeAttribute("title");
  cell.addEventListener("pointerenter", () => show(cell));
  cell.addEventListener("pointerleave", hide);
  cell.addEventListener("focus", () => show(cell));
  cell.addEventListener("blur", hide);
}
addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
for (const table of document.querySelectorAll(".stack")) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((at) => at.querySelector(".cell")));
  const all = rows.flat().filter(Boolean);
  const rove = (cell) => all.forEach((other) => { other.tabIndex = other === cell ? 0 : -1; });
  rove(all[0]);
  table.addEventListener("focusin", (event) => { if (texts.has(event.target)) rove(event.target); });
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    let y = rows.findIndex((row) => row.includes(event.target));
    if (!step || y < 0) return;
    let x = rows[y].indexOf(event.target);
    do { y += step[0]; x += step[1]; } while (rows[y] && x >= 0 && x < rows[y].length && !rows[y][x]);
    rows[y]?.[x]?.focus();
    event.preventDefault();
  });
}
const map = document.querySelector(".map");
const seek = (number) => {
  map.classList.toggle("seeking", number !== "");
  for (const cell of cells) cell.classList.toggle("lit", cell.dataset.findings.split(" ").includes(number));
};
for (const entry of document.querySelectorAll(".index a")) {
  const number = entry.dataset.finding;
  if (!cells.some((cell) => cell.dataset.findings.split(" ").includes(number))) continue;
  for (const name of ["pointerenter", "focus"]) entry.addEventListener(name, () => seek(number));
  for (const name of ["pointerleave", "blur"]) entry.addEventListener(name, () => seek(""));
}
