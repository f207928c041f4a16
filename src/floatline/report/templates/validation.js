"use strict";
(() => {
  const { chart, chipRow, css, element, line, showTick, showValue } = floatlineCharts;
  const showExcess = (value, unit) => {
    if (value == null) return "—";
    const percent = 100 * value;  // the digits of Terms.show
    const places = percent === 0 || Math.abs(percent) >= 0.01 ? 2 : 4;
    const number = unit === "percent" ? percent.toFixed(places) + " %" : String(Number(value.toPrecision(3)));
    if (Number.parseFloat(number) === 0) return unit === "percent" ? "0.00 %" : "0";  // no sign before nothing
    return (value < 0 ? "" : "+") + number;
  };

  function curves(figure, number) {
    const data = JSON.parse(figure.querySelector("script.data").textContent);
    const colours = ["--reference", "--candidate"];
    const plots = [];
    const { chips, press, toggle } = chipRow(figure, plots);
    const key = "study-" + number;

    // Columns: both means, the reference last, so that it is drawn over the candidate; then for each seed both arms.
    const order = [1, 0].filter(k => data.arms[k]);
    const columns = [data.steps, ...order.map(k => data.arms[k].mean)];
    const series = order.map(k => line(colours[k], k ? 4 : 1.5, k ? {} : { dash: [6, 5] }));
    const owners = order.map(k => "arm" + k);
    data.seeds.forEach((seed, place) => data.arms.forEach((arm, k) => {
      if (!arm.seeds[place]) return;
      columns.push(arm.seeds[place]);
      series.push(line(colours[k], 1, { show: false, alpha: 0.6, ...(k ? {} : { dash: [7, 4] }) }));
      owners.push("seed" + place);
    }));
    const names = data.arms.map(arm => arm.name);
    plots.push([chart(figure, data.of + ", mean over the seeds", figure.getAttribute("aria-label"), columns, series, {
      key, tick: showTick, range: (u, low, high) => uPlot.rangeNum(low, high, 0.08, true),
      read: at => data.arms.map(arm => arm.name + " " + showValue(arm.mean[at])).join(", "),
    }), owners]);

    if (data.excess) {
      const excess = data.excess, unit = excess.unit, show = value => showExcess(value, unit);
      const columns = [data.steps, excess.mean], owners = ["mean"], bands = [];
      const series = [line("--candidate", 2.25)];
      if (excess.high) {
        columns.push(excess.high, excess.low);
        series.push(line("--candidate", 1, { spanGaps: true }), line("--candidate", 1, { spanGaps: true }));
        owners.push("band", "band");
        bands.push({ series: [2, 3], fill: () => css("--band") });
      }
      excess.seeds.forEach((values, place) => {
        if (!values) return;
        columns.push(values);
        series.push(line("--reference", 1, { show: false, alpha: 0.8 }));
        owners.push("seed" + place);
      });
      const label = "Difference of " + names[1] + " from " + names[0] + ", positive is worse; the limit is " +
        show(excess.limit) + ".";
      plots.push([chart(figure, "Difference from " + names[0] + " (above 0 is worse), with its band", label, columns, series, {
        key, bands, tick: show,
        // What is far beyond the limit early in training must not hide how near the rest is to it.
        range: (u, low, high) => {
          const limit = excess.limit, bottom = low == null ? 0 : low, top = high == null ? 0 : high;
          return [Math.min(-0.25 * limit, Math.max(1.1 * bottom, -2 * limit)), Math.max(1.2 * limit, Math.min(1.1 * top, 3 * limit))];
        },
        lines: [{ value: 0, label: "", colour: "--muted" },
          { value: excess.limit, label: "limit " + show(excess.limit), colour: "--bad", dashed: true }],
        read: at => show(excess.mean[at]) + (excess.high && excess.high[at] != null
          ? ", band [" + show(excess.low[at]) + ", " + show(excess.high[at]) + "]" : "") + ", limit " + show(excess.limit),
      }), owners]);
    }

    names.forEach((name, k) => toggle("arm" + k, name, k ? "candidate" : "reference", true));
    if (data.excess && data.excess.high) toggle("band", "band", "candidate", true);
    const seeds = data.seeds.map((seed, place) => toggle("seed" + place, "seed " + seed, "", false));
    if (seeds.length > 1) {
      const all = element("button", "chip", "all seeds");
      all.type = "button";
      all.setAttribute("aria-pressed", "false");
      all.addEventListener("click", () => {
        const shown = all.getAttribute("aria-pressed") !== "true";
        all.setAttribute("aria-pressed", String(shown));
        seeds.forEach(chip => press(chip, shown));
      });
      chips.append(all);
    }
    figure.plots = plots.map(([plot]) => plot);
  }

  document.querySelectorAll("figure.curves").forEach((figure, number) => {
    const folded = figure.closest("details.chapter");
    if (!folded || folded.open) return curves(figure, number);
    folded.addEventListener("toggle", () => curves(figure, number), { once: true });
  });
})();
