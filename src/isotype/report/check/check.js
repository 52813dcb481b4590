"use strict";
const rows = [...document.querySelectorAll(".part-row")];
const map = document.querySelector(".map");
const holds = (row, number) => row.dataset.findings.split(" ").includes(number);
const seek = (number) => {
  map.classList.toggle("seeking", number !== "");
  for (const row of rows) row.classList.toggle("lit", holds(row, number));
};
for (const entry of document.querySelectorAll(".index a")) {
  const number = entry.dataset.finding;
  if (!rows.some((row) => holds(row, number))) continue;
  for (const name of ["pointerenter", "focus"]) entry.addEventListener(name, () => seek(number));
  for (const name of ["pointerleave", "blur"]) entry.addEventListener(name, () => seek(""));
}
