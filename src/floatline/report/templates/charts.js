"use strict";
// Charts of one column of steps, shared by the pages: a pointer or arrow keys read them, a click on a chip hides a curve.
const floatlineCharts = (() => {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HEIGHT = 220, charts = [];
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const showValue = value => value == null ? "—" : value.toPrecision(6);
  const showTick = value => String(Number(value.toPrecision(6)));
  const showStep = step => step.toLocaleString("en-US");
  const compact = step => step >= 1e6 ? step / 1e6 + "M" : step >= 1e4 ? step / 1e3 + "k" : showStep(step);
  const decade = value => Number.isInteger(Math.round(Math.log10(value) * 1e9) / 1e9);
  const decades = { filter: (u, splits) => splits.map(value => value != null && decade(value) ? value : null) };
  const line = (colour, width, extra) => ({ stroke: () => css(colour), width, points: { show: false }, ...extra });

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
    const axis = (extra, lines = {}) => ({
      stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1, ...lines },
      ticks: { stroke: () => css("--line"), width: 1, size: 5, ...lines }, font: "12px system-ui, sans-serif", ...extra,
    });
    const plot = new uPlot({
      width: Math.max(holder.clientWidth, 200), height: HEIGHT, legend: { show: false },
      cursor: {
        y: false, drag: { x: Boolean(options.zoom), y: false, setScale: Boolean(options.zoom) },
        sync: { key: options.key, scales: options.zoom ? ["x", null] : [null, null] },
        points: { size: 7, fill: (u, at) => u.series[at]._stroke },
      },
      scales: { x: { time: false }, y: options.log ? { distr: 3, log: options.log, range: options.range } : { range: options.range } },
      axes: [axis({ values: (u, ticks) => ticks.map(compact), space: 70, size: 32 }),
        // As wide as its longest label: a sign must not be cut off.
        axis({ values: (u, ticks) => ticks.map(options.tick), size: (u, ticks) => 20 + 7 * Math.max(4, ...(ticks || []).map(tick => tick.length)) },
          options.log === 10 ? decades : {})],
      series: [{}, ...series], bands: options.bands || [],
      hooks: {
        draw: [u => (options.lines || []).forEach(line => rule(u, line)), u => options.draw && options.draw(u)],
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
      if (holder.clientWidth) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
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

  // Buttons that show and hide what belongs to an owner; plots is a list of [plot, owner of each series].
  function chipRow(place, plots) {
    const chips = element("div", "chips");
    chips.setAttribute("role", "group");
    chips.setAttribute("aria-label", "Which curves are drawn");
    place.append(chips);
    const press = (chip, shown) => {
      chip.setAttribute("aria-pressed", String(shown));
      for (const [plot, owners] of plots) plot.batch(() => owners.forEach((owner, k) => {
        if (owner === chip.dataset.owner) plot.setSeries(k + 1, { show: shown });
      }));
    };
    const toggle = (owner, text, className, pressed) => {
      const chip = element("button", "chip " + className, text);
      chip.type = "button";
      chip.dataset.owner = owner;
      chip.setAttribute("aria-pressed", String(pressed));
      chip.addEventListener("click", () => press(chip, chip.getAttribute("aria-pressed") !== "true"));
      chips.append(chip);
      return chip;
    };
    return { chips, press, toggle };
  }

  // What can be scrolled sideways can be scrolled with the keys.
  const tables = document.querySelectorAll(".wide"), watcher = new ResizeObserver(() => tables.forEach(holder => {
    if (holder.scrollWidth > holder.clientWidth + 1) holder.tabIndex = 0;
    else holder.removeAttribute("tabindex");
  }));
  tables.forEach(holder => watcher.observe(holder));

  // A button on every block that is there to be copied.
  document.querySelectorAll("pre[data-copy]").forEach(block => {
    const holder = element("div", "block"), button = element("button", "copy", "copy");
    button.type = "button";
    button.setAttribute("aria-label", "Copy " + block.getAttribute("aria-label"));
    block.before(holder);
    holder.append(block, button);
    button.addEventListener("click", async () => {
      const chosen = getSelection();
      chosen.selectAllChildren(block);
      try {
        await navigator.clipboard.writeText(block.textContent);
      } catch {
        document.execCommand("copy");  // a page from the disk may not be given the clipboard
      }
      chosen.removeAllRanges();
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
  });

  const redraw = () => charts.forEach(plot => plot.redraw(false, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(folded => { folded.open = true; }));
  return { chart, chipRow, css, decade, element, line, showStep, showTick, showValue };
})();
