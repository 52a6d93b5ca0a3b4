// Throughput, lag and size over the last hour, of the broker or of a topic: the whole ring once, then new samples.
"use strict";
(() => {
  const { bytes, short, duration, moment, zone } = window.tierlog;
  const KEEP = 720;
  // Of each line: the column of samples, and the colour; of each value beside them: the column, and its unit.
  // The template has a key for each, in this order.
  const CHARTS = {
    bytes: {
      binary: true,
      unit: (value) => `${bytes(value)}/s`,
      lines: [
        ["produced_bytes_per_s", "--text"],
        ["hot_fetched_bytes_per_s", "--hot"],
        ["cold_fetched_bytes_per_s", "--cold"],
      ],
    },
    records: { unit: (value) => `${short(value)}/s`, lines: [["produced_records_per_s", "--text"]] },
    topic_records: { unit: (value) => `${short(value)}/s`, lines: [["produced_records_per_s", "--text"], ["read_records_per_s", "--read"]] },
    topic_bytes: { binary: true, unit: (value) => `${bytes(value)}/s`, lines: [["produced_bytes_per_s", "--text"], ["read_bytes_per_s", "--read"]] },
    topic_lag: { unit: short, lines: [["lag", "--text"]] },
    topic_size: { binary: true, unit: bytes, lines: [["hot_bytes", "--hot"], ["cold_bytes", "--cold"]] },
    lag: { binary: true, unit: bytes, lines: [["lag_bytes", "--hot"]], beside: [["lag_ms", duration]] },
  };
  const TIMES = [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600];
  const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const LEAST_SPAN_S = 600, MOST_SPAN_S = 3600;
  let running = null; // {root, url of the samples, plots by name, columns of samples}

  const clock = (s) => moment(s * 1000).slice(11, 19);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const of = (chart, columns) => [columns.at_ms.map((ms) => ms / 1000), ...chart.lines.map(([name]) => columns[name])];

  function plot(box, chart) {
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: box.clientWidth,
      height: box.clientHeight,
      legend: { show: false },
      cursor: { y: false },
      hooks: { setCursor: [(drawn) => showValues(box.parentElement, chart, drawn.cursor.idx)] },
      scales: {
        // At most the last hour, also if samples are rare, or the machine was asleep between two.
        x: { range: (_, min, max) => [Math.max(Math.min(min, max - LEAST_SPAN_S), max - MOST_SPAN_S), max] },
        y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] },
      },
      axes: [
        { ...axis, space: 60, size: 28, incrs: TIMES, values: (_, times) => times.map((s) => clock(s).slice(0, 5)) },
        { ...axis, size: 76, space: 32, ...(chart.binary ? { incrs: BINARY } : {}), values: (_, values) => values.map(chart.unit) },
      ],
      series: [{}, ...chart.lines.map(([, name]) => ({ stroke: colour(name), width: 1.5, points: { show: false } }))],
    };
    box.replaceChildren();
    return new uPlot(options, of(chart, running.columns), box);
  }

  // Write the values under the pointer, or else the newest, beside the lines' names.
  function showValues(figure, chart, at) {
    const { columns } = running;
    figure.querySelector("[data-at]").textContent = at == null ? zone() : `${clock(columns.at_ms[at] / 1000)} ${zone()}`;
    const shown = [...chart.lines.map(([name]) => [name, chart.unit]), ...(chart.beside ?? [])];
    figure.querySelectorAll("[data-value]").forEach((place, index) => {
      const [name, unit] = shown[index];
      place.textContent = unit(columns[name].at(at ?? -1));
    });
  }

  function draw({ anew = false } = {}) {
    const { root, plots, columns } = running;
    if (columns.at_ms.length < 2) return; // not a line yet
    for (const box of root.querySelectorAll("[data-chart]")) {
      const name = box.dataset.chart, chart = CHARTS[name];
      if (anew) plots[name]?.destroy();
      if (anew || !plots[name]) plots[name] = plot(box, chart);
      else plots[name].setData(of(chart, columns));
      showValues(box.parentElement, chart, plots[name].cursor.idx);
    }
  }

  async function load() {
    const mine = running;
    const newest = () => mine.columns.at_ms.at(-1) ?? 0;
    const after = newest();
    let response;
    try {
      response = await fetch(`${mine.url}?after_ms=${after}`, { headers: window.tierlog.headers() });
    } catch {
      return; // already reported by the page
    }
    if (!response.ok || running !== mine) return;
    const more = await response.json();
    if (!more.at_ms.length || newest() !== after) return; // nothing new, or a later request was faster
    const older = more.at_ms[0] <= after ? {} : mine.columns; // all of it again: the clock was set back
    for (const name of Object.keys(more)) mine.columns[name] = [...(older[name] ?? []), ...more[name]].slice(-KEEP);
    draw();
  }

  document.addEventListener("htmx:load", (event) => {
    const root = event.detail.elt.matches?.("[data-charts]") ? event.detail.elt : event.detail.elt.querySelector?.("[data-charts]");
    if (!root || running?.root === root) return;
    for (const old of Object.values(running?.plots ?? {})) old.destroy();
    const url = root.dataset.charts;
    running = { root, url, plots: {}, columns: running?.url === url ? running.columns : { at_ms: [] } };
    draw();
    load();
  });
  document.body.addEventListener("tick", () => {
    if (running && document.contains(running.root)) load();
  });
  let resizing;
  const again = () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => running && document.contains(running.root) && draw({ anew: true }), 100);
  };
  window.addEventListener("resize", again);
  document.body.addEventListener("chosen", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
})();
