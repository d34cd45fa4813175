// Filters for the replays. It reads data attributes and sets `hidden`; it never builds HTML from data.
// Without it the page shows every replay.
"use strict";
(() => {
  const filters = document.getElementById("filters");
  if (!filters) return;
  const chips = [...filters.querySelectorAll("[data-delivery]")];
  const selects = [...filters.querySelectorAll("[data-filter]")];
  const tasks = [...document.querySelectorAll(".task")];
  const toggleAll = document.getElementById("toggle-all");

  const chosen = () => Object.fromEntries(selects.map((select) => [select.dataset.filter, select.value]));
  const pressed = () => new Set(chips.filter((c) => c.getAttribute("aria-pressed") === "true").map((c) => c.dataset.delivery));
  const words = (text) => (text || "").split(" ");

  function apply() {
    const { outcome = "", family = "", kind = "", emission = "" } = chosen();
    const deliveries = pressed();
    let shown = 0;
    for (const task of tasks) {
      const articles = [...task.querySelectorAll("article")];
      const candidates = articles.filter((a) => deliveries.has(a.dataset.delivery));
      const outcomes = new Set(candidates.map((a) => a.dataset.outcome === "success"));
      const taskMatches = (!family || task.dataset.family === family) && (!kind || task.dataset.kind === kind)
        && (outcome !== "disagree" || outcomes.size > 1);
      const matches = (a) => taskMatches && candidates.includes(a)
        && (!outcome || outcome === "disagree" || a.dataset.outcome === outcome)
        && (!emission || words(a.dataset.emissions).includes(emission));
      for (const article of articles) article.hidden = !matches(article);
      for (const step of task.querySelectorAll(".step")) {
        step.classList.toggle("dim", Boolean(emission) && !words(step.dataset.emission).includes(emission));
      }
      for (const tag of task.querySelectorAll("summary .outcome")) tag.classList.toggle("off", !deliveries.has(tag.dataset.delivery));
      const visible = articles.filter((a) => !a.hidden).length;
      task.hidden = visible === 0;
      shown += visible;
    }
    const total = document.querySelectorAll("article").length;
    document.getElementById("count").textContent = `${shown} of ${total} episodes`;
    document.getElementById("empty").hidden = shown > 0;
  }

  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      apply();
    });
  }
  for (const select of selects) select.addEventListener("change", apply);
  toggleAll.addEventListener("click", () => {
    const open = tasks.some((task) => !task.hidden && !task.open);
    for (const task of tasks) task.open = open;
    toggleAll.textContent = open ? "close all" : "open all";
  });
  filters.hidden = false;
  apply();
})();
