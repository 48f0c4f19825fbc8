// Returns everything on a page that is cut off, lies over something else, or cannot be read.
(() => {
  const problems = [];
  const seen = (each) => { const box = each.getBoundingClientRect(); return box.width > 0 && box.height > 0 ? box : null; };
  const name = (each) => `${each.tagName}.${each.className.baseVal ?? each.className} ${(each.textContent || "").slice(0, 50)}`;
  const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1) problems.push(`the page is ${document.documentElement.scrollWidth} wide`);

  // Boxes that stand beside each other.
  for (const kind of [".tile", "figure", ".controls > *", ".choice > *", "nav > *", "header > *", ".names > *", "section, details, footer"]) {
    const boxes = [...document.querySelectorAll(kind)].filter(seen);
    for (const each of boxes) {
      const box = seen(each);
      if (box.left < -1 || box.right > width + 1) problems.push(`${name(each)} ends at ${box.right} of ${width}`);
    }
    boxes.forEach((a, index) => boxes.slice(index + 1).forEach((b) => {
      if (!a.contains(b) && !b.contains(a) && !apart(seen(a), seen(b))) problems.push(`${name(a)} lies over ${name(b)}`);
    }));
  }

  // Texts stay inside of their cells, tiles and buttons, unless they are cut off with an ellipsis on purpose.
  for (const each of document.querySelectorAll("td, th, .tile, .tile > *, figcaption, button, summary, h1, .state, a, .empty")) {
    if (!seen(each) || getComputedStyle(each).overflow === "hidden") continue;
    if (each.scrollWidth > each.clientWidth + 1 && each.clientWidth) problems.push(`${name(each)} has ${each.scrollWidth} in ${each.clientWidth}`);
  }
  for (const row of document.querySelectorAll("tr")) {
    const cells = [...row.children].filter(seen).map((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      // A text that its element cuts off with an ellipsis ends where the element ends.
      const only = cell.childNodes.length === 1 && cell.children.length === 1 ? cell.firstChild : range;
      return [cell, only.getBoundingClientRect()];
    });
    cells.forEach(([a, left], index) => cells.slice(index + 1).forEach(([b, right]) => {
      if (left.width && right.width && !apart(left, right)) problems.push(`${name(a)} lies over ${name(b)}`);
    }));
  }

  // Charts.
  for (const plot of document.querySelectorAll(".plot")) {
    const box = seen(plot);
    if (!box) continue;
    const title = plot.closest("figure").querySelector("figcaption").textContent;
    for (const svg of plot.querySelectorAll(".main-svg")) {
      const drawn = seen(svg);
      if (drawn && (Math.abs(drawn.left - box.left) > 1 || Math.abs(drawn.width - box.width) > 1)) problems.push(`${title}: drawn ${drawn.width} wide in ${box.width}`);
    }
    for (const bar of plot.querySelectorAll(".modebar-container")) {
      if (getComputedStyle(bar).opacity !== "0") problems.push(`${title}: the toolbar is shown`);
    }
    for (const kind of [".xtick text", ".ytick text"]) {
      const texts = [...plot.querySelectorAll(kind)].filter(seen);
      const boxes = texts.map(seen);
      boxes.forEach((a, index) => {
        if (a.left < box.left - 1 || a.right > box.right + 1) problems.push(`${title}: tick ${texts[index].textContent} is cut off`);
        if (boxes.slice(index + 1).some((b) => !apart(a, b))) problems.push(`${title}: tick ${texts[index].textContent} lies over another`);
      });
      if (texts.length < 2 && !/Attempts|time went|Parallel/.test(title)) problems.push(`${title}: ${texts.length} ticks of ${kind}`);
    }
    for (const label of plot.querySelectorAll(".xtitle, .legend text")) {
      const text = seen(label);
      if (text && (text.left < box.left - 1 || text.right > box.right + 1)) problems.push(`${title}: ${label.textContent} is cut off`);
    }
  }

  // Words instead of keys.
  const words = [...document.querySelectorAll("figcaption, .chip, .tile, th, .xtitle, .legend text")].map((each) => each.textContent);
  for (const text of words) if (/\b(train|val|perf|data)\/\w|_seconds|_per_/.test(text)) problems.push(`a raw key: ${text.slice(0, 80)}`);
  return problems;
})()
