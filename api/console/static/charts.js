// Throughput and lag over the last hour from /console/samples: the whole ring once, then new samples.
"use strict";
(() => {
  const KEEP = 720;
  const CHARTS = {
    bytes: {
      binary: true,
      unit: (value) => `${bytes(value)}/s`,
      lines: [
        ["produced", "produced_bytes_per_s", "--text"],
        ["read from disk", "hot_fetched_bytes_per_s", "--hot"],
        ["read from the bucket", "cold_fetched_bytes_per_s", "--cold"],
      ],
    },
    records: { unit: (value) => `${short(value)}/s`, lines: [["produced", "produced_records_per_s", "--text"]] },
    lag: { binary: true, unit: bytes, lines: [["not yet in the bucket", "lag_bytes", "--hot"]] },
  };
  const TIMES = [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600];
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const LEAST_SPAN_S = 600;
  let running = null; // {root, plots, columns}

  function short(value) {
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (value >= size) return `${+(value / size).toPrecision(3)}${unit}`;
    }
    return `${+value.toPrecision(3)}`;
  }

  function bytes(value) {
    for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
      if (value >= 1024 ** power) return `${+(value / 1024 ** power).toPrecision(3)} ${unit}`;
    }
    return `${+value.toPrecision(3)} B`;
  }

  const clock = (s) => new Date(s * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function plot(box, chart, columns) {
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const made = new uPlot(
      {
        width: box.clientWidth,
        height: box.clientHeight,
        legend: { show: false },
        cursor: { y: false },
        scales: {
          x: { range: (_, min, max) => [Math.min(min, max - LEAST_SPAN_S), max] },
          y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] },
        },
        axes: [
          { ...axis, space: 60, size: 28, incrs: TIMES, values: (_, times) => times.map(clock) },
          { ...axis, size: 76, space: 32, ...(chart.binary ? { incrs: BINARY } : {}), values: (_, values) => values.map(chart.unit) },
        ],
        series: [{}, ...chart.lines.map(([label, , name]) => ({ label, stroke: colour(name), width: 1.5, points: { show: false } }))],
      },
      of(chart, columns),
      box,
    );
    return made;
  }

  const of = (chart, columns) => [columns.at_ms.map((ms) => ms / 1000), ...chart.lines.map(([, name]) => columns[name])];

  function draw() {
    const { root, columns } = running;
    for (const old of running.plots) old.destroy();
    running.plots = [];
    for (const box of root.querySelectorAll("[data-chart]")) {
      const chart = CHARTS[box.dataset.chart];
      box.replaceChildren();
      if (!columns.at_ms.length) {
        const empty = document.createElement("p");
        empty.className = "chart-empty";
        empty.textContent = "measuring";
        box.append(empty);
      } else if (box.clientWidth) {
        running.plots.push(plot(box, chart, columns));
      }
      const last = chart.lines.map(([label, name]) => {
        const value = columns[name].at(-1);
        return value === undefined ? "" : chart.lines.length > 1 ? `${label} ${chart.unit(value)}` : chart.unit(value);
      });
      root.querySelector(`[data-now="${box.dataset.chart}"]`).textContent = last.filter(Boolean)[0] || "";
      if (chart.lines.length > 1 && !box.parentElement.querySelector(".lines")) box.after(keyOf(chart));
    }
  }

  function keyOf(chart) {
    const key = document.createElement("div");
    key.className = "lines";
    chart.lines.forEach(([label, , name]) => {
      const item = document.createElement("span");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = `var(${name})`;
      item.append(swatch, label);
      key.append(item);
    });
    return key;
  }

  async function load() {
    const mine = running;
    const after = mine.columns.at_ms.at(-1) ?? 0;
    let answer;
    try {
      answer = await fetch(`/console/samples?after_ms=${after}`, { headers: window.tierlog.headers() });
    } catch {
      return; // already reported by the page
    }
    if (!answer.ok || running !== mine) return;
    const more = await answer.json();
    if (!more.at_ms.length && mine.plots.length) return;
    const older = more.at_ms[0] <= after ? {} : mine.columns; // all of it again: the clock was set back
    for (const name of Object.keys(more)) mine.columns[name] = [...(older[name] ?? []), ...more[name]].slice(-KEEP);
    draw();
  }

  document.addEventListener("htmx:load", (event) => {
    const root = event.detail.elt.matches?.("[data-charts]") ? event.detail.elt : event.detail.elt.querySelector?.("[data-charts]");
    if (!root || running?.root === root) return;
    running?.plots.forEach((old) => old.destroy());
    running = { root, plots: [], columns: { at_ms: [] } };
    for (const chart of Object.values(CHARTS)) for (const [, name] of chart.lines) running.columns[name] = [];
    load();
  });
  document.body.addEventListener("tick", () => {
    if (running && document.contains(running.root)) load();
  });
  let resizing;
  const again = () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => running && document.contains(running.root) && draw(), 100);
  };
  window.addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
})();
