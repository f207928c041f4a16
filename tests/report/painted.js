// Notes every text that a canvas shows, from before the page begins: what is drawn is in no element.
(() => {
  const canvases = new Map();
  const proto = CanvasRenderingContext2D.prototype;
  const wrap = (name, note) => {
    const own = proto[name];
    proto[name] = function (...args) {
      note(this, ...args);
      return own.apply(this, args);
    };
  };
  wrap("clearRect", context => canvases.delete(context.canvas));
  wrap("fillText", (context, text, x, y) => {
    const measured = context.measureText(text), at = context.getTransform();
    const corners = [[-measured.actualBoundingBoxLeft, -measured.actualBoundingBoxAscent],
      [measured.actualBoundingBoxRight, measured.actualBoundingBoxDescent]].map(([dx, dy]) => at.transformPoint({ x: x + dx, y: y + dy }));
    const xs = corners.map(corner => corner.x), ys = corners.map(corner => corner.y);
    if (!canvases.has(context.canvas)) canvases.set(context.canvas, []);
    canvases.get(context.canvas).push({
      text, ink: context.fillStyle, left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys),
    });
  });
  window.findPaintedFaults = () => {
    const faults = new Set();
    const read = text => text.startsWith("#") ? [1, 3, 5].map(k => parseInt(text.slice(k, k + 2), 16)) : text.match(/[\d.]+/g).map(Number);
    const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
    const ground = light(read(getComputedStyle(document.body).backgroundColor));
    for (const [canvas, labels] of canvases) {
      if (!canvas.isConnected) continue;
      labels.forEach((label, k) => {
        if (label.left < -1 || label.right > canvas.width + 1 || label.top < -2 || label.bottom > canvas.height + 2)
          faults.add(`cut off in a chart: ${label.text}`);
        const [high, low] = [light(read(label.ink)), ground].sort((x, y) => y - x);
        if ((high + 0.05) / (low + 0.05) < 4.5) faults.add(`contrast ${((high + 0.05) / (low + 0.05)).toFixed(2)} in a chart: ${label.text}`);
        for (const other of labels.slice(k + 1)) {
          const wide = Math.min(label.right, other.right) - Math.max(label.left, other.left);
          const tall = Math.min(label.bottom, other.bottom) - Math.max(label.top, other.top);
          if (wide > 2 && tall > 2) faults.add(`over each other in a chart: ${label.text} and ${other.text}`);
        }
        if (/-0\.0+ ?%|NaN|undefined/.test(label.text)) faults.add(`shown in a chart: ${label.text}`);
      });
    }
    return [...faults];
  };
})();
