"use strict";
// Charts. A chart is rebuilt whenever its data or settings change, which takes a millisecond.

const settings = { across: "step", smooth: 0, hidden: {} };
const ACROSS = { step: "update", episode: "episodes", hours: "hours" };

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(i) {
  return css(`--c${i % 8}`);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function short(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return String(Number(x.toPrecision(4)));
}

function axisNumber(x) {
  if (x === null) return "";
  const size = Math.abs(x);
  if (size >= 1e9) return `${+(x / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(x / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(x / 1e3).toPrecision(4)}k`;
  if (size !== 0 && size < 1e-3) return x.toExponential(0);
  return String(+x.toPrecision(4));
}

// Steps in units of the selected x axis: unchanged, or interpolated from the group's clock.
function across(tab, group, steps) {
  const clock = tab.clocks[group], of = clock[settings.across];
  if (settings.across === "step" || !clock.step.length) return steps;
  let at = 0;
  return steps.map((step) => {
    while (at + 1 < clock.step.length && clock.step[at + 1] <= step) at++;
    const next = Math.min(at + 1, clock.step.length - 1), wide = clock.step[next] - clock.step[at];
    const from = of[at] ?? 0, to = of[next] ?? from;
    return wide > 0 && step > clock.step[at] ? from + ((to - from) * (step - clock.step[at])) / wide : step < clock.step[0] ? 0 : from;
  });
}

// Exponential moving average with bias correction; gaps remain gaps.
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((x) => {
    if (x === null) return null;
    mean = weight * mean + (1 - weight) * x;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function faded(hex, share) {
  return hex + Math.round(255 * share).toString(16).padStart(2, "0");
}

function axes(labels) {
  const base = {
    stroke: () => css("--quiet"), font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16,
    grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1, size: 4 },
    values: (u, splits) => splits.map(axisNumber),
  };
  return [{ ...base, label: labels[0], size: 30, space: 60 }, { ...base, label: labels[1], size: 54, space: 30 }];
}

function fitted(box, make) {
  box.plot?.destroy();
  box.replaceChildren();
  const plot = (box.plot = make(Math.max(box.clientWidth, 200), 210));
  box.watch ??= new ResizeObserver(() => {
    const width = Math.max(box.clientWidth, 200);
    if (box.clientWidth && box.plot.width !== width) box.plot.setSize({ width, height: 210 });
  });
  box.watch.observe(box);
  return plot;
}

// --- curves

function curve(tab, chart, box, readout) {
  const hidden = settings.hidden[tab.tab], tables = [], series = [{}], bands = [], lines = [];
  const one = tab.groups.length === 1;
  let positive = chart.log, low = Infinity, high = -Infinity;
  for (const [m, metric] of chart.metrics.entries()) {
    for (const [g, drawn] of Object.entries(tab.curves[metric])) {
      if (hidden.has(+g)) continue;
      const weight = metric.startsWith("eval") ? 0 : settings.smooth; // evaluations are few, and each averages many samples
      const shade = colour(one ? m : +g), few = drawn.y.length < 60, alone = drawn.y.length < 2;
      const x = across(tab, +g, tab.grids[drawn.x]), table = [x];
      const dash = !one && m ? [6, 4] : undefined;
      const points = { show: few || alone, size: 4, fill: shade };
      if (drawn.low) {
        table.push(...[drawn.high, drawn.low].map((edge) => (weight > 0 ? smoothed(edge, weight) : edge)));
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(shade, 0.18) });
      }
      if (weight > 0) {
        table.push(drawn.y);
        series.push({ stroke: faded(shade, 0.3), width: 1, points: { show: false } });
      }
      table.push(weight > 0 ? smoothed(drawn.y, weight) : drawn.y);
      series.push({ stroke: shade, width: 1.6, dash, points: weight > 0 ? { show: false } : points });
      lines.push({ at: series.length - 1, shade, dash: !!dash, group: g, name: one ? metric : tab.groups[g].label });
      for (const y of [...drawn.y, ...(drawn.low ?? [])]) {
        if (y === null) continue;
        positive &&= y > 0;
        low = Math.min(low, y);
        high = Math.max(high, y);
      }
      tables.push(table);
    }
  }
  readout.replaceChildren();
  if (!tables.length) {
    box.plot?.destroy();
    box.plot = undefined;
    box.replaceChildren();
    return;
  }
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
  if (!one && chart.metrics.length > 1) readout.append(element("span", { text: `solid: ${chart.metrics[0]}, dashed: ${chart.metrics.slice(1).join(", ")}` }));
  const items = {};
  for (const line of lines) {
    line.value = element("b");
    const known = one ? undefined : items[line.group];
    if (known) known.append(" ╌ ", line.value);
    else readout.append((items[line.group] = element("span", {}, mark(line), `${line.name} `, line.value)));
  }
  const showValues = (u, at) => {
    for (const line of lines) {
      let i = at ?? u.data[0].length - 1;
      while (i > 0 && (u.data[line.at][i] === undefined || u.data[line.at][i] === null)) i--;
      line.value.textContent = short(u.data[line.at][i]);
    }
  };
  const log = positive && high / low > 30;
  const zero = low === 0 && high === 0;  // uPlot's range would be 0 to 100
  fitted(box, (width, height) => new uPlot({
    width, height, series, bands, legend: { show: false }, axes: axes([ACROSS[settings.across]]),
    cursor: { sync: { key: tab.tab }, points: { size: 6 } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : zero ? { range: [-1, 1] } : {} },
    hooks: { setCursor: [(u) => showValues(u, u.cursor.idx)], ready: [(u) => showValues(u, null)] },
  }, data, box));
}

function mark(line) {
  const dot = element("i", { class: "dot" });
  dot.style.background = line.shade;
  return dot;
}

// --- points

function scatter(tab, name, box, readout) {
  const labels = { frontier: ["√KL, nats", "score"], measured: ["√KL, nats", "reward"], lengths: ["tokens", "score"] }[name];
  const hidden = settings.hidden[tab.tab], clouds = [];
  for (const kind of ["train", "eval"])
    for (const cloud of tab[name][kind]) if (!hidden.has(cloud.group)) clouds.push({ ...cloud, kind });
  const all = clouds.flatMap((cloud) => cloud.x.map((x, i) => [x, cloud.y[i]])).sort((a, b) => a[0] - b[0]);
  readout.replaceChildren();
  if (!all.length) {
    readout.textContent = "no run has both metrics yet";
    box.plot?.destroy();
    box.plot = undefined;
    box.replaceChildren();
    return;
  }
  const dot = (u, x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
  const paint = (u) => {
    const { ctx } = u, unit = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    for (const fit of tab[name].fits ?? []) {
      if (hidden.has(fit.group)) continue;
      ctx.beginPath();
      fit.x.forEach((x, i) => ctx[i ? "lineTo" : "moveTo"](...dot(u, x, fit.y[i])));
      ctx.strokeStyle = colour(fit.group);
      ctx.lineWidth = 2 * unit;
      ctx.stroke();
    }
    for (const cloud of clouds) {
      const shade = colour(cloud.group), n = cloud.x.length;
      if (cloud.kind === "eval") {
        ctx.beginPath();
        cloud.x.forEach((x, i) => ctx[i ? "lineTo" : "moveTo"](...dot(u, x, cloud.y[i])));
        ctx.strokeStyle = shade;
        ctx.lineWidth = 1.5 * unit;
        ctx.stroke();
      }
      cloud.x.forEach((x, i) => {
        ctx.beginPath();
        ctx.arc(...dot(u, x, cloud.y[i]), (cloud.kind === "eval" ? 4.5 : 3) * unit, 0, 2 * Math.PI);
        ctx.fillStyle = cloud.kind === "eval" ? css("--card") : faded(shade, 0.15 + 0.75 * ((i + 1) / n));
        ctx.fill();
        if (cloud.kind === "eval") ctx.stroke();
      });
    }
    ctx.restore();
  };
  const nearest = (u) => {
    const { left, top } = u.cursor;
    let best = null, least = 30 ** 2;
    for (const cloud of left < 0 ? [] : clouds)
      cloud.x.forEach((x, i) => {
        const far = (u.valToPos(x, "x") - left) ** 2 + (u.valToPos(cloud.y[i], "y") - top) ** 2;
        if (far < least) [least, best] = [far, [cloud, i]];
      });
    if (best === null) return showLegend();
    const [cloud, i] = best, where = tab.groups.length > 1 ? `${tab.groups[cloud.group].label}, ` : "";
    const held = cloud.kind === "eval" ? "held-out, " : "";
    readout.textContent = `${where}${held}update ${short(cloud.step[i])}: ${labels[0]} ${short(cloud.x[i])}, score ${short(cloud.y[i])}`;
  };
  const showLegend = () => {
    const held = clouds.some((cloud) => cloud.kind === "eval") ? "; rings: held-out" : "";
    const fits = tab[name].fits?.length ? "; lines: fits" : "";
    readout.textContent = `dots: updates, darker is later${held}${fits}`;
  };
  showLegend();
  fitted(box, (width, height) => new uPlot({
    width, height, legend: { show: false }, axes: axes(labels), scales: { x: { time: false, range: padded } },
    series: [{}, { paths: () => null, points: { show: false } }], cursor: { points: { show: false } },
    hooks: { draw: [paint], setCursor: [nearest] },
  }, [all.map((p) => p[0]), all.map((p) => p[1])], box));
}

function padded(u, low, high) {
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - room, high + room];
}

function reliability(found, box, readout) {
  const bins = found.bins, x = bins.map((bin) => bin[0]), y = bins.map((bin) => bin[1]);
  const paint = (u) => {
    const { ctx } = u, unit = devicePixelRatio, at = (a, b) => [u.valToPos(a, "x", true), u.valToPos(b, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    ctx.strokeStyle = css("--quiet");
    ctx.setLineDash([5 * unit, 5 * unit]);
    ctx.beginPath();
    ctx.moveTo(...at(0, 0));
    ctx.lineTo(...at(1, 1));
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.strokeStyle = ctx.fillStyle = colour(0);
    ctx.lineWidth = 1.5 * unit;
    for (const [confidence, accuracy, pairs] of bins) {
      const error = Math.sqrt((accuracy * (1 - accuracy)) / pairs);
      ctx.beginPath();
      ctx.moveTo(...at(confidence, accuracy - error));
      ctx.lineTo(...at(confidence, accuracy + error));
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(...at(confidence, accuracy), 4 * unit, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.restore();
  };
  const all = `${short(found.pairs)} pairs, calibration error ${short(found.error)}`;
  readout.textContent = all;
  fitted(box, (width, height) => new uPlot({
    width, height, legend: { show: false }, axes: axes(["confidence", "accuracy"]),
    scales: { x: { time: false, range: () => [0.48, 1.02] }, y: { range: () => [Math.min(0.38, ...y) - 0.02, 1.02] } },
    series: [{}, { paths: () => null, points: { show: false } }], cursor: { points: { show: false } },
    hooks: {
      draw: [paint],
      setCursor: [(u) => {
        const bin = bins[u.cursor.idx ?? -1];
        readout.textContent = bin ? `${short(bin[2])} pairs: confidence ${short(bin[0])}, accuracy ${short(bin[1])}` : all;
      }],
    },
  }, [x, y], box));
}
