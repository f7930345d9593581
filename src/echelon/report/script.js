// Draws the charts of the page from the trees in #report-data (see charts/interactive.py) and wires the
// controls. Nodes {"$": role} become colours of the palette, {"#": name} arrays of the tree.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const options = {
    responsive: true, displaylogo: false, displayModeBar: "hover", scrollZoom: false,
    showSendToCloud: false, // plotly.js would offer to upload the chart
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "png", scale: 2, filename: "echelon" },
  };
  const dates = [
    { dtickrange: [null, 43200000], value: "%m-%d %H:%M" },
    { dtickrange: [86400000, 2592000000], value: "%Y-%m-%d" },
    { dtickrange: ["M1", "M6"], value: "%Y-%m" },
    { dtickrange: ["M12", null], value: "%Y" },
  ];
  const state = {}; // chart → { variant, scale, months }
  let paper = false;

  const all = (selector) => [...document.querySelectorAll(selector)];
  const element = (key) => document.querySelector(`[data-chart="${key}"]`);
  const of = (key) => (state[key] ??= { scale: "linear", months: 0 });

  function resolve(node, palette, arrays) {
    if (Array.isArray(node)) return node.map((one) => resolve(one, palette, arrays));
    if (node === null || typeof node !== "object") return node;
    if ("$" in node) return palette[node.$];
    if ("#" in node) return arrays[node["#"]];
    return Object.fromEntries(
      Object.entries(node).map(([name, one]) => [name, resolve(one, palette, arrays)]));
  }

  function tree(key) {
    const chart = report.charts[key];
    if (!chart.variants) return chart;
    return chart.variants[of(key).variant ?? Object.keys(chart.variants)[0]];
  }

  // What all charts share.
  function template(palette) {
    const clear = "rgba(0,0,0,0)", faint = { size: 11, color: palette.faint };
    const axis = {
      gridcolor: palette.line, linecolor: palette.line, zerolinecolor: palette.line,
      zerolinewidth: 1, tickfont: faint, title: { font: faint, standoff: 8 },
      exponentformat: "power",
    };
    return { layout: {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: palette.soft },
      paper_bgcolor: clear, plot_bgcolor: clear, dragmode: "zoom", bargap: 0.12,
      hoverlabel: {
        bgcolor: palette.card, bordercolor: palette.line, font: { color: palette.ink } },
      modebar: { bgcolor: clear, color: palette.faint, activecolor: palette.accent },
      legend: { font: { size: 12, color: palette.soft } },
      annotationdefaults: {
        xanchor: "left", yanchor: "bottom", showarrow: false,
        font: { size: 13, color: palette.ink } },
      xaxis: axis, yaxis: axis,
    } };
  }

  function draw(key) {
    const at = element(key);
    const palette = report.palette[dark.matches && !paper ? "dark" : "light"];
    const { arrays, ...chart } = tree(key);
    const figure = resolve(chart, palette, arrays);
    figure.layout.uirevision = "kept";
    figure.layout.template = template(palette);
    for (const axis of Object.values(figure.layout))
      if (axis?.type === "date") axis.tickformatstops = dates;
    if (of(key).scale === "log") figure.layout.yaxis.type = "log";
    const shown = at.data?.map((trace) => trace.visible);
    if (shown?.length === figure.data.length)
      figure.data.forEach((trace, n) => { if (shown[n] !== undefined) trace.visible = shown[n]; });
    Plotly.react(at, figure.data, figure.layout, options);
    if (of(key).months) zoom(key);
  }

  // Shows the last months, and fits both vertical axes to what is then seen.
  function zoom(key) {
    const at = element(key), { months, scale } = of(key);
    if (!months)
      return Plotly.relayout(at, {
        "xaxis.autorange": true, "yaxis.autorange": true, "yaxis2.autorange": true });
    const times = at.data[0].x, last = times[times.length - 1];
    const day = new Date(last.slice(0, 10) + "T00:00:00Z");
    day.setUTCMonth(day.getUTCMonth() - months);
    const first = day.toISOString().slice(0, 10);
    const change = { "xaxis.range": [first, last] };
    for (const axis of ["y", "y2"]) {
      let low = Infinity, high = -Infinity;
      for (const trace of at.data) {
        if ((trace.yaxis ?? "y") !== axis || trace.visible === "legendonly") continue;
        trace.y.forEach((value, n) => {
          if (value === null || times[n] < first) return;
          low = Math.min(low, value); high = Math.max(high, value);
        });
      }
      if (low > high) continue;
      const log = axis === "y" && scale === "log" && low > 0;
      if (log) { low = Math.log10(low); high = Math.log10(high); }
      const room = 0.05 * (high - low) || 0.01;
      change[axis === "y" ? "yaxis.range" : "yaxis2.range"] = [low - room, high + room];
    }
    return Plotly.relayout(at, change);
  }

  function press(button, group) {
    for (const other of all(`[data-${group}][data-for="${button.dataset.for}"]`))
      other.setAttribute("aria-pressed", String(other === button));
  }

  function visible() {
    return all("[data-chart]").filter((at) => at.offsetParent !== null)
      .map((at) => at.dataset.chart);
  }

  function open(id) {
    for (const section of all(".split")) section.classList.toggle("on", section.id === id);
    for (const tab of all("[data-tab]"))
      tab.setAttribute("aria-selected", String(tab.dataset.tab === id));
    visible().forEach(draw);
  }

  for (const tab of all("[data-tab]")) tab.addEventListener("click", () => open(tab.dataset.tab));
  for (const button of all("[data-scale]"))
    button.addEventListener("click", () => {
      const key = button.dataset.for;
      of(key).scale = button.dataset.scale;
      press(button, "scale");
      Plotly.relayout(element(key), { "yaxis.type": button.dataset.scale, "yaxis.autorange": true })
        .then(() => of(key).months && zoom(key));
    });
  for (const button of all("[data-range]"))
    button.addEventListener("click", () => {
      of(button.dataset.for).months = Number(button.dataset.range);
      press(button, "range");
      zoom(button.dataset.for);
    });
  for (const select of all("[data-choose]"))
    select.addEventListener("change", () => {
      const key = select.dataset.choose;
      for (const pane of all(`[data-pane="${key}"]`)) pane.hidden = pane.dataset.key !== select.value;
      for (const at of all(`[data-pane="${key}"]:not([hidden]) [data-chart]`)) draw(at.dataset.chart);
      if (!report.charts[key]) return;
      of(key).variant = select.value;
      draw(key);
    });

  const redraw = () => visible().forEach(draw);
  dark.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => { paper = true; redraw(); });
  window.addEventListener("afterprint", () => { paper = false; redraw(); });

  document.body.classList.add("tabbed");
  open(document.querySelector(".split")?.id); // a page without splits has its charts all the same
  document.body.dataset.drawn = "true";
})();
