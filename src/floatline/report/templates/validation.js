"use strict";
(() => {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const charts = [];
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const showValue = value => value == null ? "—" : value.toPrecision(6);
  const showTick = value => String(Number(value.toPrecision(6)));
  const showStep = step => step.toLocaleString("en-US");
  const showExcess = (value, unit) => {
    if (value == null) return "—";
    const percent = 100 * value;  // the digits of Terms.show
    const places = percent === 0 || Math.abs(percent) >= 0.01 ? 2 : 4;
    const number = unit === "percent" ? percent.toFixed(places) + " %" : String(Number(value.toPrecision(3)));
    return (value < 0 ? "" : "+") + number;
  };
  const compact = step => step >= 1e6 ? step / 1e6 + "M" : step >= 1e4 ? step / 1e3 + "k" : showStep(step);

  // A line for the pointer, numbers beneath it, and arrow keys for those without one.
  function chart(place, title, label, data, series, options) {
    place.append(element("p", "chart-title", title));
    const holder = element("div", "chart");
    holder.tabIndex = 0;
    holder.setAttribute("role", "img");
    holder.setAttribute("aria-label", label + " Arrow keys read it step by step.");
    const readout = element("output", "readout");
    place.append(holder, readout);
    const last = data[0].length - 1;
    const read = at => { readout.textContent = "step " + showStep(data[0][at]) + ": " + options.read(at); };
    const axis = extra => ({
      stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif", ...extra,
    });
    const plot = new uPlot({
      width: Math.max(holder.clientWidth, 200), height: 230, legend: { show: false },
      cursor: {
        y: false, drag: { x: false, y: false, setScale: false }, sync: { key: options.key },
        points: { size: 7, fill: (u, at) => u.series[at]._stroke },
      },
      scales: { x: { time: false }, y: { range: options.range } },
      axes: [axis({ values: (u, ticks) => ticks.map(compact), space: 70 }),
        axis({ values: (u, ticks) => ticks.map(options.tick), size: 62 })],
      series: [{}, ...series], bands: options.bands || [],
      hooks: {
        draw: [u => (options.lines || []).forEach(line => rule(u, line))],
        setCursor: [u => read(u.cursor.idx == null ? last : u.cursor.idx)],
      },
    }, data, holder);
    let at = last;
    holder.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      at = Math.min(Math.max(at + move, 0), last);
      plot.setCursor({ left: plot.valToPos(data[0][at], "x"), top: 10 });
    });
    new ResizeObserver(() => {
      if (holder.clientWidth) plot.setSize({ width: holder.clientWidth, height: 230 });
    }).observe(holder);
    read(last);
    charts.push(plot);
    return plot;
  }

  function rule(u, line) {
    const y = Math.round(u.valToPos(line.value, "y", true));
    if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
    const context = u.ctx, scale = devicePixelRatio;
    context.save();
    context.strokeStyle = context.fillStyle = css(line.colour);
    context.lineWidth = scale;
    context.setLineDash(line.dashed ? [5 * scale, 4 * scale] : []);
    context.beginPath();
    context.moveTo(u.bbox.left, y);
    context.lineTo(u.bbox.left + u.bbox.width, y);
    context.stroke();
    context.font = 12 * scale + "px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "bottom";
    context.fillText(line.label, u.bbox.left + u.bbox.width - 4 * scale, y - 3 * scale);
    context.restore();
  }

  function curves(figure, number) {
    const data = JSON.parse(figure.querySelector("script.data").textContent);
    const colours = ["--reference", "--candidate"];
    const chips = element("div", "chips");
    chips.setAttribute("role", "group");
    chips.setAttribute("aria-label", "Which curves are drawn");
    figure.append(chips);
    const plots = [];
    const line = (colour, width, extra) => ({ stroke: () => css(colour), width, points: { show: false }, ...extra });
    const key = "study-" + number;

    // Columns: both means, then for each seed both arms.
    const columns = [data.steps, ...data.arms.map(arm => arm.mean)];
    const series = data.arms.map((arm, k) => line(colours[k], 2.25, k ? {} : { dash: [7, 4] }));
    const owners = data.arms.map((_, k) => "arm" + k);
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
        lines: [{ value: 0, label: "equal", colour: "--muted" },
          { value: excess.limit, label: "limit " + show(excess.limit), colour: "--bad", dashed: true }],
        read: at => show(excess.mean[at]) + (excess.high && excess.high[at] != null
          ? ", band [" + show(excess.low[at]) + ", " + show(excess.high[at]) + "]" : "") + ", limit " + show(excess.limit),
      }), owners]);
    }

    const toggle = (owner, text, className, pressed) => {
      const chip = element("button", "chip " + className, text);
      chip.type = "button";
      chip.dataset.owner = owner;
      chip.setAttribute("aria-pressed", String(pressed));
      chip.addEventListener("click", () => press(chip, chip.getAttribute("aria-pressed") !== "true"));
      chips.append(chip);
      return chip;
    };
    const press = (chip, shown) => {
      chip.setAttribute("aria-pressed", String(shown));
      for (const [plot, owners] of plots) plot.batch(() => owners.forEach((owner, k) => {
        if (owner === chip.dataset.owner) plot.setSeries(k + 1, { show: shown });
      }));
    };
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
  const redraw = () => charts.forEach(plot => plot.redraw(false, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(folded => { folded.open = true; }));
})();
