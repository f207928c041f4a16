"use strict";
(() => {
  const { chart, chipRow, css, decade, line, showStep, showTick, showValue } = floatlineCharts;
  const showPower = value => value >= 1 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
  const showShare = value => value == null ? "—" : String(Number((100 * value).toPrecision(3))) + " %";
  const shortPower = value => {
    const exponent = Math.log2(value);
    return Number.isInteger(exponent) ? "2" + String(exponent).replace(/./g, sign => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]) : "";
  };
  const decades = value => decade(value) ? String(Number(value.toPrecision(3))) : "";

  function curves(figure, number) {
    const data = JSON.parse(figure.querySelector("script.data").textContent);
    const runs = data.runs, alone = runs.length === 1, plots = [];
    const colour = k => "--p" + k % 8;
    const dash = k => k < 8 ? {} : { dash: [7, 4] };
    const label = figure.getAttribute("aria-label");
    const { toggle } = chipRow(figure, plots);
    const mean = data.perPoint > 1 ? ", mean of up to " + showStep(data.perPoint) + " steps" : "";

    // Where the steps of runs differ, a run has a value at its own; the last one before is what is read.
    const upTo = (column, at, sparse) => {
      for (; at >= 0; at--) if (column[at] !== undefined && !(sparse && column[at] === null)) return column[at];
      return null;
    };
    function add(name, title, options) {
      const having = runs.map((run, k) => [run, k]).filter(([run]) => run[name] && run[name].length);
      if (!having.length) return;
      const banded = alone && options.band && data.perPoint > 1;
      const tables = having.map(([run]) => banded ? [run.steps, run[name], run[name + "High"], run[name + "Low"]] : [run.steps, run[name]]);
      const columns = uPlot.join(tables);
      // The first run is the widest: where runs lie over each other, each can be seen.
      const series = having.map(([, k]) => line(colour(k), alone ? 1.75 : Math.max(1.5, 5 - 1.75 * k), { ...dash(k), ...options.series }));
      const owners = having.map(([, k]) => "run" + k);
      if (banded) {
        series.push(line(colour(0), 0), line(colour(0), 0));
        owners.push("run0", "run0");
      }
      const places = having.map(([run]) => new Map(run.steps.map((step, place) => [step, place])));
      const plot = chart(figure, title + (banded ? " and their lowest to highest" : ""), label, columns, series, {
        key: "run-" + number, zoom: true, tick: options.tick, log: options.log,
        bands: banded ? [{ series: [2, 3], fill: () => css("--band") }] : [],
        range: options.range || ((u, low, high) => uPlot.rangeNum(low, high, 0.08, true)),
        read: at => having.map(([run], place) => {
          const text = (alone ? "" : run.name + " ") + options.show(upTo(columns[place + 1], at, options.sparse));
          const last = run.steps[run.steps.length - 1];
          if (last < columns[0][at]) return text + " (ended at " + showStep(last) + ")";
          return text + (options.also ? options.also(run, places[place].get(columns[0][at])) : "");
        }).join(", "),
        draw: u => options.draw && options.draw(u, having),
      });
      plots.push([plot, owners]);
    }

    const skips = runs.map(run => new Map(run.skips.map(([place, , words]) => [place, words])));
    const lost = runs.map(run => new Map(run.nonfinite));
    const also = (run, place) => {
      if (place === undefined) return "";
      const k = runs.indexOf(run), words = skips[k].get(place), bad = lost[k].get(place);
      return (words ? ", skipped: " + words : "") + (bad ? ", " + bad + " NaN or infinite" : "");
    };
    const powers = (u, low, high) => low == null ? [1, 2] : [2 ** (Math.floor(Math.log2(low)) - 1), 2 ** (Math.ceil(Math.log2(high)) + 1)];
    const tens = (u, low, high) => low == null ? [0.1, 10] : [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high * 1.0001))];
    const ticks = runs.some(run => run.skips.length) ? " (ticks: skipped steps)" : "";
    add("loss", "Loss" + ticks + mean, {
      band: true, show: showValue, also, draw: marks,
      ...(data.logLoss ? { log: 10, tick: decades, range: tens } : { tick: showTick }),
    });
    add("norm", "Gradient norm, before clipping" + mean, { log: 10, tick: decades, range: tens, show: showValue });
    add("scale", "Loss scale", {
      log: 2, tick: shortPower, range: powers, show: value => value == null ? "—" : showPower(value),
      series: { paths: uPlot.paths.stepped({ align: 1 }) },
    });
    const shares = (u, low, high) => [0, Math.min(1, high > 0 ? 1.1 * high : 0.01)];
    add("lost", "Gradient elements that rounded to zero", { sparse: true, range: shares, tick: showShare, show: showShare, series: { spanGaps: true, points: { show: true, size: 5 } } });
    add("lr", "Learning rate", { tick: value => String(Number(value.toPrecision(3))), show: value => value == null ? "—" : value.toPrecision(4) });

    // Skipped steps as ticks on the axis, and what the guard did as lines.
    function marks(u, having) {
      const context = u.ctx, pixel = devicePixelRatio, bottom = u.bbox.top + u.bbox.height;
      const inside = x => x >= u.bbox.left && x <= u.bbox.left + u.bbox.width;
      context.save();
      having.forEach(([run, k], place) => {
        if (!u.series[place + 1].show) return;
        context.strokeStyle = css(alone ? "--bad" : colour(k));
        context.lineWidth = 1.5 * pixel;
        context.beginPath();
        for (const [at] of run.skips) {
          const x = Math.round(u.valToPos(run.steps[at], "x", true));
          if (!inside(x)) continue;
          context.moveTo(x, bottom);
          context.lineTo(x, bottom - 9 * pixel);
        }
        context.stroke();
        if (!alone) return;
        context.strokeStyle = context.fillStyle = css("--muted");
        context.lineWidth = pixel;
        context.setLineDash([4 * pixel, 4 * pixel]);
        context.font = 11 * pixel + "px system-ui, sans-serif";
        context.textAlign = "left";
        context.textBaseline = "top";
        let free = -Infinity;
        for (const [step, what] of run.marks) {
          const x = Math.round(u.valToPos(step, "x", true)), wide = context.measureText(what).width;
          if (!inside(x)) continue;
          context.beginPath();
          context.moveTo(x, u.bbox.top);
          context.lineTo(x, bottom);
          context.stroke();
          const start = x + wide + 8 * pixel > u.bbox.left + u.bbox.width ? x - wide - 4 * pixel : x + 4 * pixel;
          if (start < free) continue;
          context.fillText(what, start, u.bbox.top + 2 * pixel);
          free = start + wide + 6 * pixel;
        }
      });
      context.restore();
    }

    if (!alone) runs.forEach((run, k) => toggle("run" + k, run.name, "p" + k % 8, true));
    figure.plots = plots.map(([plot]) => plot);
  }

  document.querySelectorAll("figure.curves").forEach(curves);
})();
