"use strict";
// The table of samples. All content is text from a model, and is inserted as text nodes only.

const PAGE = 20;

function samplesOf(tab, root) {
  const { prompts, files } = tab.samples, part = (name) => root.querySelector(name);
  const run = part(".of-run"), kind = part(".of-kind"), step = part(".of-step"), colouring = part(".of-colour");
  const inputs = [".of-colour", ".of-end", ".of-least", ".of-most", ".of-order", ".of-text"].map(part);
  let first = 0;

  function choices(select, values, labels, wanted) {
    select.replaceChildren(...values.map((value, i) => element("option", { value, text: labels[i] })));
    if (values.map(String).includes(String(wanted))) select.value = wanted;
  }
  const unique = (values) => [...new Set(values)];
  const ofRun = () => files.filter((file) => file.run === +run.value);
  const here = () => ofRun().filter((file) => file.kind === kind.value);

  function fill(from) {
    if (from === "all") {
      const runs = unique(files.map((file) => file.run));
      choices(run, runs, runs.map((i) => tab.runs[i]), runs[0]);
    }
    if (from !== "step") {
      const kinds = unique(ofRun().map((file) => file.kind));
      choices(kind, kinds, kinds, kind.value);
      const steps = here().map((file) => file.step);
      choices(step, steps, steps.map((s) => s.toLocaleString("en")), steps.includes(+step.value) && from !== "all" ? step.value : steps.at(-1));
    }
    first = 0;
    show();
  }

  const total = (row) => (row.kl ? row.kl.reduce((sum, x) => sum + (x ?? 0), 0) : undefined);

  function wanted() {
    const file = here().find((one) => one.step === +step.value);
    if (!file) return [];
    const [, end, least, most, order, text] = inputs.map((input) => input.value);
    const words = text.toLowerCase();
    const score = (row) => row.score ?? row.advantage;
    const found = file.rows.map((row, i) => ({ row, i })).filter(({ row }) =>
      (end === "" || (row.ended === undefined ? false : row.ended === (end === "yes"))) &&
      (least === "" || score(row) >= +least) && (most === "" || score(row) <= +most) &&
      (words === "" || row.text.toLowerCase().includes(words) || prompts[row.p].toLowerCase().includes(words)));
    const keys = { score: (r) => score(r), "-score": (r) => -score(r), "-length": (r) => -(r.length ?? r.tokens?.length), "-kl": (r) => -total(r) };
    const key = keys[order];
    if (key) {
      const at = (item) => { const x = key(item.row); return Number.isFinite(x) ? x : Infinity; };
      found.sort((a, b) => at(a) - at(b) || a.i - b.i);
    }
    return found;
  }

  // The absolute value with full color: the 98th percentile.
  function scaleOf(rows, name) {
    const sizes = rows.flatMap((row) => row[name] ?? (name === "advantages" && row.advantage !== undefined ? [row.advantage] : []));
    const sorted = sizes.filter((x) => x !== null).map(Math.abs).sort((a, b) => a - b);
    return sorted.length ? Math.max(sorted[Math.floor(0.98 * (sorted.length - 1))], 1e-6) : 0;
  }

  function shade(x, scale) {
    const share = Math.min(Math.abs(x) / scale, 1) * +css("--shade");
    return `rgba(${css(x > 0 ? "--up" : "--down")}, ${share.toFixed(3)})`;
  }

  function show() {
    const found = wanted(), name = colouring.value, words = inputs[5].value.toLowerCase();
    first = Math.min(first, Math.max(found.length - 1, 0) - (Math.max(found.length - 1, 0) % PAGE));
    const scale = name ? scaleOf(found.map(({ row }) => row), name) : 0;
    part(".rows").replaceChildren(...found.slice(first, first + PAGE).map(({ row }) => card(row, name, scale, words)));
    part(".where").textContent = found.length
      ? `${first + 1} to ${Math.min(first + PAGE, found.length)} of ${found.length}` : "no matching rows";
    part(".before").disabled = first === 0;
    part(".after").disabled = first + PAGE >= found.length;
    legend(name, scale, found.length);
  }

  function legend(name, scale, count) {
    const line = part(".legend");
    line.replaceChildren();
    if (!name || !count) return;
    const what = { kl: "log π − log π_ref of a token, nats", advantages: "advantage" }[name];
    if (!scale) {
      line.textContent = { kl: "these rows have no KL of tokens", advantages: "these rows have no advantages" }[name];
      return;
    }
    const ramp = element("i", { class: "ramp" });
    const [up, down] = [css("--up"), css("--down")], most = css("--shade");
    ramp.style.background = `linear-gradient(90deg, rgba(${down}, ${most}), transparent, rgba(${up}, ${most}))`;
    line.append(`${what}: −${short(scale)}`, ramp, `+${short(scale)}; hover over a token for its value`);
  }

  function marked(parent, text, words) {
    if (!words) return parent.append(text);
    const lower = text.toLowerCase();
    let from = 0;
    for (let at; lower.length === text.length && (at = lower.indexOf(words, from)) >= 0; from = at + words.length)
      parent.append(text.slice(from, at), element("mark", { text: text.slice(at, at + words.length) }));
    parent.append(text.slice(from));
  }

  function response(row, name, scale, words) {
    const line = element("div", { class: "text", dir: "auto" }), values = row[name];
    if (name && values && row.tokens) {
      row.tokens.forEach((token, i) => {
        if (token === "") return;
        const span = element("span", { text: token });
        if (values[i] !== null && scale) span.style.background = shade(values[i], scale);
        span.title = [["KL", row.kl], ["advantage", row.advantages]]
          .filter(([, of]) => of).map(([what, of]) => `${what} ${short(of[i])}`).join(", ");
        line.append(span);
      });
    } else if (row.text === "") {
      line.append(element("span", { class: "empty", text: "(empty)" }));
    } else {
      const span = element("span");
      marked(span, row.text, words);
      if (name === "advantages" && row.advantage !== undefined && scale) span.style.background = shade(row.advantage, scale);
      line.append(span);
    }
    return line;
  }

  function fact(parent, name, value) {
    if (value !== undefined && value !== null) parent.append(element("span", {}, `${name} `, element("b", { text: typeof value === "number" ? short(value) : value })));
  }

  function facts(row) {
    const line = element("div", { class: "facts" });
    fact(line, "score", row.score);
    fact(line, "length", row.length ?? row.tokens?.length);
    fact(line, "KL", total(row));
    fact(line, "advantage", row.advantage);
    if (row.ended !== undefined) line.append(row.ended ? "ended" : "truncated");
    for (const [name, value] of Object.entries(row.more ?? {})) fact(line, name, value);
    return line;
  }

  function card(row, name, scale, words) {
    const details = element("details", {}, element("summary", { text: prompts[row.p].replace(/\s+/g, " ").trim() || "(no prompt)", title: "the full prompt, and responses of other updates" }));
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      const prompt = element("div", { class: "prompt", dir: "auto" });
      marked(prompt, prompts[row.p], words);
      details.append(prompt);
      for (const file of ofRun()) {
        if (file.step === +step.value && file.kind === kind.value) continue;
        for (const other of file.rows.filter((one) => one.p === row.p).slice(0, 4)) {
          const head = facts(other);
          head.prepend(element("b", { text: `update ${file.step.toLocaleString("en")}${file.kind === "training" ? ", training" : ""}` }));
          details.append(head, response(other, name, scale, ""));
        }
      }
    });
    const images = (row.images ?? []).map((src) => element("img", { src, alt: "image of the prompt" }));
    return element("article", { class: "sample" }, facts(row), ...images, response(row, name, scale, words), details);
  }

  run.addEventListener("change", () => fill("run"));
  kind.addEventListener("change", () => fill("kind"));
  step.addEventListener("change", () => fill("step"));
  for (const input of inputs) input.addEventListener("input", () => { first = 0; show(); });
  part(".before").addEventListener("click", () => { first -= PAGE; show(); });
  part(".after").addEventListener("click", () => { first += PAGE; show(); });
  fill("all");
  return show;
}
