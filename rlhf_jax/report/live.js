"use strict";
// A served page follows its runs: it polls the version of their files and, when that has changed, takes the contents of
// a new page, and puts back what the reader had open, chosen, hidden and zoomed.

const POLL_MS = 3000;
const touched = { pointer: false, select: -Infinity };

// An update would end a drag, a selection of text, or an open list of choices.
function isBusy() {
  const choosing = document.activeElement?.tagName === "SELECT" && performance.now() - touched.select < 10000;
  return touched.pointer || choosing || !document.getSelection().isCollapsed;
}

const openTab = () => document.querySelector(".tab.open");
const plain = (node) => (node?.textContent ?? "").replace(/\s*\(\d+\)$/, "").trim();

// Elements with a name that the next page has too: repeated texts are numbered.
function named(elements, text) {
  const counts = {}, names = new Map();
  for (const one of elements) {
    const name = text(one);
    counts[name] = (counts[name] ?? 0) + 1;
    names.set(`${name}#${counts[name]}`, one);
  }
  return names;
}

const landmarks = (root) => named(root.querySelectorAll("h2, h3, .sample > details[open]"), (one) => plain(one.firstChild));
const detailsOf = (root) => named([...root.querySelectorAll("details")].filter((one) => !one.closest(".sample")), (one) => plain(one.querySelector("summary")));
const controls = (root) => named(root.querySelectorAll(".filters select, .filters input, [data-bins]"), (one) => one.className || "bins");
const figures = (root) => named(root.querySelectorAll(".card"), (one) => plain(one.querySelector("figcaption").firstChild));
const chosen = (control) => (control.tagName === "SELECT" ? control.selectedOptions[0]?.text : control.value);

function zoom(plot) {
  const x = plot?.data[0], { min, max } = plot?.scales.x ?? {};
  return x?.length && (min > x[0] || max < x.at(-1)) ? { min, max } : null;
}

function rememberTab(root) {
  const buttons = [...root.querySelectorAll("button.run")], details = [...detailsOf(root)], page = root.querySelector(".samples .where");
  const samples = [...named(root.querySelectorAll(".sample"), (one) => plain(one.querySelector("summary")))];
  const isOpen = ([, one]) => (one.querySelector(":scope > details") ?? one).open;
  const step = root.querySelector(".of-step"), bins = root.querySelector("[data-bins]"), openSamples = samples.filter(isOpen).map(([name]) => name);
  // What shows the latest update shows the new latest one, unless one of its rows is being read.
  const following = new Set([
    step && step.selectedIndex === step.options.length - 1 && !openSamples.length ? "of-step#1" : "",
    bins && bins.selectedIndex === bins.options.length - 1 ? "bins#1" : "",
  ]);
  return {
    hidden: buttons.filter((one) => one.getAttribute("aria-pressed") === "false").map(plain),
    open: details.filter(isOpen).map(([name]) => name),
    closed: details.filter((one) => !isOpen(one)).map(([name]) => name),
    following: [...following].filter(Boolean),
    choices: [...controls(root)].filter(([name]) => !following.has(name)).map(([name, one]) => [name, chosen(one)]),
    row: page ? parseInt(page.textContent) || 1 : 1,
    samples: openSamples,
    figures: [...figures(root)].map(([name, one]) => [name, { about: !!one.querySelector(".about"), zoom: zoom(one.querySelector(".plot")?.plot) }]),
    wide: [...root.querySelectorAll(".scroll")].map((one) => one.scrollLeft),
  };
}

function restoreTab(root, state) {
  for (const button of root.querySelectorAll("button.run")) if (state.hidden.includes(plain(button))) button.click();
  for (const [name, one] of detailsOf(root)) if (state.open.includes(name) || state.closed.includes(name)) one.open = state.open.includes(name);
  const present = controls(root);
  for (const [name, value] of state.choices) {
    const control = present.get(name), option = [...(control?.options ?? [])].find((one) => one.text === value);
    if (!control || chosen(control) === value || (control.options && !option)) continue;
    control.value = option ? option.value : value;
    control.dispatchEvent(new Event(option ? "change" : "input"));
    if (option && control.closest(".samples")) control.dispatchEvent(new Event("input")); // colour, order, ending
  }
  for (const control of state.following.map((name) => present.get(name)).filter(Boolean)) {
    control.selectedIndex = control.options.length - 1;
    control.dispatchEvent(new Event("change"));
  }
  const after = root.querySelector(".samples .after");
  for (let row = 1; after && row + 20 <= state.row && !after.disabled; row += 20) after.click();
  const cards = figures(root);
  for (const [name, { about }] of state.figures) if (about) cards.get(name)?.querySelector(".what")?.click();
  root.querySelectorAll(".scroll").forEach((one, i) => (one.scrollLeft = state.wide[i] ?? 0));
}

// What drawing a tab resets.
function restoreDrawn(root, state) {
  const cards = figures(root);
  for (const [name, one] of named(root.querySelectorAll(".sample"), (sample) => plain(sample.querySelector("summary"))))
    if (state.samples.includes(name)) one.querySelector("details").open = true;
  for (const [name, figure] of state.figures) if (figure.zoom) cards.get(name)?.querySelector(".plot")?.plot?.setScale("x", figure.zoom);
}

// The last heading or open sample above the middle of the window stays where it is: tables above it may grow.
function scrollPlace() {
  const tops = [...landmarks(openTab())].filter(([, one]) => one.offsetParent).map(([name, one]) => [name, one.getBoundingClientRect().top]);
  return { above: tops.filter(([, top]) => top < innerHeight / 2), y: scrollY };
}

function scrollBack({ above, y }) {
  const present = landmarks(openTab()), [name, top] = above.findLast(([name]) => present.has(name)) ?? [];
  scrollTo({ top: y > 0 && name ? scrollY + present.get(name).getBoundingClientRect().top - top : y, behavior: "instant" });
}

function focusedControl() {
  const one = document.activeElement, root = openTab();
  const [name] = [...controls(root)].find(([, control]) => control === one) ?? [];
  return name && { name, range: [one.selectionStart, one.selectionEnd] };
}

function focusBack(focus) {
  const one = focus && controls(openTab()).get(focus.name);
  one?.focus({ preventScroll: true });
  if (one && typeof focus.range[0] === "number") one.setSelectionRange(...focus.range);
}

const settled = () => new Promise((done) => setTimeout(done, 50)); // details tell of their opening in a later task

async function update() {
  const answer = await fetch("./", { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const next = JSON.parse(fresh.getElementById("data").textContent).tabs;
  if (typeof tabs === "undefined" || !next.length) return location.reload(); // before the first run the page has no charts
  if (isBusy()) return;
  const name = openTab().id.slice(4), place = scrollPlace(), focus = focusedControl();
  const states = Object.fromEntries(tabs.filter((tab) => redraws[tab.tab]).map((tab) => [tab.tab, rememberTab(document.getElementById(`tab-${tab.tab}`))]));
  const height = document.body.style.minHeight;
  document.body.style.minHeight = `${document.body.scrollHeight}px`; // an empty page would scroll to its top
  for (const box of document.querySelectorAll(".plot")) {
    box.watch?.disconnect();
    box.plot?.destroy();
  }
  tabs.splice(0, tabs.length, ...next);
  for (const tab of Object.keys(redraws)) delete redraws[tab];
  for (const part of ["main", "nav", "header p"]) document.querySelector(part).replaceWith(document.adoptNode(fresh.querySelector(part)));
  for (const tab of tabs) document.getElementById(`button-${tab.tab}`).addEventListener("click", () => { location.hash = tab.tab; open(tab.tab); });
  const shown = (tabs.find((tab) => tab.tab === name) ?? tabs[0]).tab;
  for (const tab of [...tabs.filter((one) => one.tab !== shown && states[one.tab]).map((one) => one.tab), shown]) {
    open(tab);
    if (states[tab]) restoreTab(openTab(), states[tab]);
  }
  redraw();
  await settled();
  if (states[shown]) restoreDrawn(openTab(), states[shown]);
  document.body.style.minHeight = height;
  scrollBack(place);
  focusBack(focus);
  document.body.dataset.version = fresh.body.dataset.version;
}

function say(text) {
  const line = document.querySelector("header p"), status = line.querySelector(".live") ?? document.createElement("span");
  status.className = "live";
  status.setAttribute("role", "status");
  if (status.textContent !== text) status.textContent = text;
  if (!status.isConnected) line.append(status);
}

async function poll() {
  let wait = POLL_MS;
  try {
    if (!document.hidden) {
      const answer = await fetch("version", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const version = await answer.text(), start = performance.now();
      const changed = () => version !== document.body.dataset.version;
      if (changed() && !isBusy()) await update();
      wait = Math.max(wait, 10 * (performance.now() - start)); // a large page takes at most a tenth of the time
      say(changed() && isBusy() ? ", new data waits while text or a list is selected" : ", live");
    }
  } catch {
    say(", the server does not answer");
  }
  setTimeout(poll, wait);
}

addEventListener("pointerdown", (event) => { touched.pointer = true; if (event.target.tagName === "SELECT") touched.select = performance.now(); });
for (const name of ["pointerup", "pointercancel", "blur"]) addEventListener(name, () => (touched.pointer = false));
addEventListener("keydown", (event) => { if (event.target.tagName === "SELECT") touched.select = performance.now(); });
say(", live");
setTimeout(poll, POLL_MS);
