"use strict";
// The page: tabs, theme, creation of charts, filter of options.

const tabs = JSON.parse(document.getElementById("data").textContent).tabs;
const redraws = {};

function card(tab, chart) {
  const box = element("div", { class: "plot" }), readout = element("div", { class: "readout" });
  const title = element("figcaption", {}, chart.title), explained = chart.metrics.filter((name) => tab.metrics[name]);
  const figure = element("figure", { class: "card" }, title, readout, box);
  if (explained.length) {
    title.title = explained.map((name) => `${name}: ${tab.metrics[name].filter(Boolean).join("\n")}`).join("\n\n");
    const what = element("button", { class: "what", "aria-label": "explain this metric", "aria-expanded": "false", text: "?" });
    what.addEventListener("click", () => {
      const open = figure.querySelector(".about");
      what.setAttribute("aria-expanded", String(!open));
      if (open) return open.remove();
      const about = element("div", { class: "about" });
      for (const name of explained) {
        const [meaning, healthy, action] = tab.metrics[name];
        about.append(element("p", {}, element("b", { text: name }), ` ${meaning}`));
        if (healthy) about.append(element("p", {}, element("b", { text: "Healthy: " }), healthy));
        if (action) about.append(element("p", {}, element("b", { text: "Otherwise: " }), action));
      }
      title.after(about);
    });
    title.append(what);
  }
  return [figure, () => curve(tab, chart, box, readout)];
}

function build(tab) {
  const root = document.getElementById(`tab-${tab.tab}`), draws = [];
  settings.hidden[tab.tab] = new Set();
  for (const section of tab.sections) {
    const cards = section.charts.map((chart) => card(tab, chart)), grid = element("div", { class: "grid" });
    grid.append(...cards.map(([figure]) => figure));
    const here = () => cards.forEach(([, draw]) => draw());
    if (section.closed) {
      const more = element("details", { class: "more" }, element("summary", { text: `${section.title} (${cards.length})` }), grid);
      more.addEventListener("toggle", () => more.open && here());
      draws.push(() => more.open && here());
      root.querySelector(".sections").append(more);
    } else {
      draws.push(here);
      root.querySelector(".sections").append(element("h2", { text: section.title }), grid);
    }
  }
  for (const box of root.querySelectorAll("[data-scatter]")) {
    const readout = element("div", { class: "readout" });
    box.before(readout);
    draws.push(() => scatter(tab, box.dataset.scatter, box, readout));
  }
  const bins = root.querySelector("[data-calibration]");
  if (bins) {
    const readout = element("div", { class: "readout" }), select = root.querySelector("[data-bins]");
    bins.before(readout);
    tab.calibration.forEach((found, i) => {
      const words = [tab.runs.length > 1 ? tab.runs[found.run] : "", found.set, `update ${found.step}`].filter(Boolean).join(", ");
      select.append(element("option", { value: i, text: words }));
    });
    select.value = tab.calibration.length - 1;
    const draw = () => reliability(tab.calibration[+select.value], bins, readout);
    select.addEventListener("change", draw);
    draws.push(draw);
  }
  const samples = root.querySelector("[data-samples]");
  if (samples) draws.push(samplesOf(tab, samples));
  for (const button of root.querySelectorAll("button.run")) {
    button.addEventListener("click", () => {
      const hidden = settings.hidden[tab.tab], group = +button.dataset.group;
      if (!hidden.delete(group)) hidden.add(group);
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      redraws[tab.tab]();
    });
  }
  options(root);
  return () => draws.forEach((draw) => draw());
}

function options(root) {
  const which = root.querySelector(".of-options"), text = root.querySelector(".of-option");
  const rows = [...root.querySelectorAll(".config tbody tr")];
  const filter = () => {
    const words = text.value.toLowerCase();
    for (const row of rows) {
      const kept = { all: true, unusual: row.dataset.usual === "", changed: row.classList.contains("changed"), differs: row.classList.contains("differs") };
      row.hidden = !kept[which.value] || !(row.textContent + row.cells[0].title).toLowerCase().includes(words);
    }
  };
  which.addEventListener("change", filter);
  text.addEventListener("input", filter);
  filter();
}

function open(name) {
  for (const tab of tabs) {
    const here = tab.tab === name;
    document.getElementById(`tab-${tab.tab}`).classList.toggle("open", here);
    document.getElementById(`button-${tab.tab}`).setAttribute("aria-selected", String(here));
  }
  redraws[name] ??= build(tabs.find((tab) => tab.tab === name));
  redraws[name]();
}

function redraw() {
  for (const dot of document.querySelectorAll("[data-colour]")) dot.style.background = colour(+dot.dataset.colour);
  redraws[document.querySelector(".tab.open").id.slice(4)]?.();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (document.querySelector(".tab.open")) redraw();
}

document.body.classList.add("scripted");
const dark = matchMedia("(prefers-color-scheme: dark)");
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
document.getElementById("across").addEventListener("change", (event) => { settings.across = event.target.value; redraw(); });
document.getElementById("smooth").addEventListener("input", (event) => { settings.smooth = +event.target.value; redraw(); });
for (const tab of tabs) document.getElementById(`button-${tab.tab}`).addEventListener("click", () => { location.hash = tab.tab; open(tab.tab); });
const asked = tabs.find((tab) => `#${tab.tab}` === location.hash);
open((asked ?? tabs[0]).tab);
redraw();
document.body.dataset.ready = "1";
