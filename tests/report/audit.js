// What is wrong with the page as it is shown now: a line for each fault. Boxes and colours are the browser's own.
() => {
  const faults = new Set();
  const nameOf = element => element.tagName.toLowerCase() + (element.className && element.className.baseVal === undefined
    ? "." + element.className.trim().replace(/\s+/g, ".") : "");
  const quote = text => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 60));
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const isShown = element => element.checkVisibility({ visibilityProperty: true, opacityProperty: true, contentVisibilityAuto: true });
  // Kept for those who listen, and a point for those who look.
  const isHidden = element => {
    for (let at = element; at instanceof HTMLElement; at = at.parentElement) {
      const box = at.getBoundingClientRect();
      if (getComputedStyle(at).position === "absolute" && box.width <= 1 && box.height <= 1) return true;
    }
    return false;
  };

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, noscript, title") || !isShown(element) || isHidden(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width > 0.5);
    if (boxes.length) texts.push({ node, element, boxes });
  }

  // Contrast, as WCAG 2 has it.
  const read = text => {
    const numbers = (text.match(/[\d.]+(?:e-?\d+)?/g) || []).map(Number);
    if (text.startsWith("color(srgb")) return [...numbers.slice(0, 3).map(c => 255 * c), numbers[3] ?? 1];
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map(k => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const contrast = (ink, ground) => {
    const [high, low] = [light(over(ink, ground)), light(ground)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const groundOf = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = read(getComputedStyle(at).backgroundColor);
      if (colour[3]) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  // The shapes of a drawing that a text stands on, drawn before it.
  const groundOfLabel = (label, box) => {
    const svg = label.ownerSVGElement, x = box.left + box.width / 2, y = box.top + box.height / 2;
    let ground = groundOf(svg.parentElement);
    for (const shape of all("rect, circle, path", svg)) {
      if (!(shape.compareDocumentPosition(label) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
      const at = shape.getBoundingClientRect(), style = getComputedStyle(shape);
      if (style.fill === "none" || x < at.left || x > at.right || y < at.top || y > at.bottom) continue;
      const fill = read(style.fill);
      ground = over([...fill.slice(0, 3), fill[3] * style.fillOpacity * style.opacity], ground);
    }
    return ground;
  };
  const opacityOf = element => {
    let found = 1;
    for (let at = element; at; at = at.parentElement) found *= getComputedStyle(at).opacity;
    return found;
  };
  const leastFor = style => {
    const size = parseFloat(style.fontSize);
    return size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
  };
  for (const { node, element, boxes } of texts) {
    const style = getComputedStyle(element), isLabel = element instanceof SVGElement;
    const ink = read(isLabel ? style.fill : style.color);
    ink[3] *= opacityOf(element);
    const found = contrast(ink, isLabel ? groundOfLabel(element, boxes[0]) : groundOf(element));
    if (found < leastFor(style) - 0.005) faults.add(`contrast ${found.toFixed(2)}: ${quote(node.data)} in ${nameOf(element)}`);
  }
  for (const element of all("body *")) {
    const style = getComputedStyle(element, "::before"), words = style.content.split(" / ")[0];
    if (!/^".*\S.*"$/.test(words) || !isShown(element) || isHidden(element)) continue;
    const least = / \/ ""$/.test(style.content) ? 3 : leastFor(style);  // a mark beside the word is a graphic
    const found = contrast(read(style.color), groundOf(element));
    if (found < least) faults.add(`contrast ${found.toFixed(2)}: ${words} before ${nameOf(element)}`);
  }

  // Nothing is cut off, nothing lies over something else, and the page is as wide as the window.
  if (document.documentElement.scrollWidth > innerWidth) faults.add(`the page is ${document.documentElement.scrollWidth} px wide`);
  const scrolls = element => {
    for (let at = element; at; at = at.parentElement)
      if (/auto|scroll/.test(getComputedStyle(at).overflowX) && at.scrollWidth > at.clientWidth) return at;
    return null;
  };
  for (const { node, element, boxes } of texts) {
    const left = Math.min(...boxes.map(box => box.left)), right = Math.max(...boxes.map(box => box.right));
    if ((left < -0.5 || right > innerWidth + 0.5) && !scrolls(element)) faults.add(`outside of the window: ${quote(node.data)} in ${nameOf(element)}`);
    for (let at = element; at && at !== document.body; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (!/hidden|clip/.test(style.overflowX + style.overflowY) || at instanceof SVGElement) continue;
      const box = at.getBoundingClientRect();
      if (left < box.left - 1 || right > box.right + 1 || boxes.some(b => b.top < box.top - 2 || b.bottom > box.bottom + 2))
        faults.add(`cut off by ${nameOf(at)}: ${quote(node.data)}`);
    }
  }
  for (const svg of all("svg").filter(isShown)) {
    const frame = svg.getBoundingClientRect();
    const labels = all("text", svg).map(label => [label, label.getBoundingClientRect()]).filter(([, box]) => box.width);
    labels.forEach(([label, box], k) => {
      if (box.left < frame.left - 1.5 || box.right > frame.right + 1.5 || box.top < frame.top - 3 || box.bottom > frame.bottom + 3)
        faults.add(`label outside of its drawing: ${quote(label.textContent)}`);
      for (const [other, at] of labels.slice(k + 1)) {
        const wide = Math.min(box.right, at.right) - Math.max(box.left, at.left);
        const high = Math.min(box.bottom, at.bottom) - Math.max(box.top, at.top);
        if (wide > -3 && high > 4) faults.add(`labels over each other: ${quote(label.textContent)} and ${quote(other.textContent)}`);
      }
    });
    if (frame.height < 8) faults.add(`an empty drawing: ${nameOf(svg)}`);
  }
  // Words of prose break between them; a path or a long name may break where it has a sign.
  for (const { node, element } of texts) {
    if (element instanceof SVGElement || element.closest("pre, code")) continue;
    for (const match of node.data.matchAll(/\p{L}{4,20}/gu)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1)
        faults.add(`broken in a word: ${match[0]} of ${quote(node.data)} in ${nameOf(element)}`);
    }
  }

  // What a reader would laugh at.
  for (const { node, element } of texts) {
    if (!element.closest("pre") && /`|\bundefined\b|\[object|(?<![\w.])-0(?:\.0+)?(?![\d.])|\bnan\b|\bNone\b|[▀▄█▌░▒▓]/.test(node.data)) faults.add(`shown: ${quote(node.data)}`);
  }
  const said = new Map();
  for (const element of all("header p, header li, section p").filter(isShown)) {
    const scope = element.closest("section, header");
    for (const words of element.textContent.split(/(?<=[.!?]) /)) {
      if (words.length < 25) continue;
      if (said.get(words) === scope) faults.add(`said twice: ${quote(words)}`);
      said.set(words, scope);
    }
  }
  for (const element of all("h1, h2, h3, p, td:only-child, figcaption, caption"))
    if (isShown(element) && !element.textContent.trim()) faults.add(`empty: ${nameOf(element)}`);

  // For those who listen, and those without a pointer.
  const headings = all("h1, h2, h3, h4, h5, h6").map(heading => Number(heading.tagName[1]));
  if (headings.filter(level => level === 1).length !== 1) faults.add("not one h1");
  headings.forEach((level, k) => { if (k && level > headings[k - 1] + 1) faults.add(`h${level} follows h${headings[k - 1]}`); });
  if (all("main").length !== 1) faults.add("not one main");
  if (!document.documentElement.lang || !document.title.trim()) faults.add("no language or no title");
  for (const nav of all("nav")) if (!nav.getAttribute("aria-label")) faults.add("a nav without a name");
  const ids = all("[id]").map(element => element.id);
  ids.forEach((id, k) => { if (ids.indexOf(id) !== k) faults.add(`id ${id} twice`); });
  for (const table of all("table")) {
    if (!table.caption && !table.getAttribute("aria-label")) faults.add("a table without a name");
    if (all("thead th", table).some(cell => !cell.scope)) faults.add("a column without scope");
  }
  for (const svg of all("svg"))
    if (svg.getAttribute("aria-hidden") !== "true" && !svg.getAttribute("aria-label")) faults.add("a drawing without words");
  for (const image of all("img")) if (!image.hasAttribute("alt")) faults.add("a picture without words");
  for (const canvas of all("canvas")) if (!canvas.closest("[role=img][aria-label]")) faults.add("a chart without words");
  for (const element of all("a[href], button, summary, [role=button]"))
    if (!(element.getAttribute("aria-label") || element.textContent).trim()) faults.add(`${nameOf(element)} without a name`);
  for (const button of all("button").filter(isShown)) {
    const box = button.getBoundingClientRect();
    if (box.width < 24 || box.height < 24) faults.add(`a button of ${box.width.toFixed()} x ${box.height.toFixed()} px: ${quote(button.textContent)}`);
  }
  for (const element of all("pre, .wide").filter(isShown))
    if (element.scrollWidth > element.clientWidth + 1 && element.tabIndex < 0 && /auto|scroll/.test(getComputedStyle(element).overflowX))
      faults.add(`${nameOf(element)} scrolls for a pointer only`);
  return [...faults];
}
