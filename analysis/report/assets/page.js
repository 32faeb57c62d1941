// What the page does beyond being read: sorting, the predictions at a token, one attention pattern enlarged.
// Everything shown comes from the page itself; text is only ever set as text.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const data = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };

  // ---- contents: mark the section being read
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const e of entries) e.isIntersecting ? seen.add(e.target.id) : seen.delete(e.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    for (const [id, a] of links) id === first ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current");
  }, { rootMargin: "-12% 0px -60% 0px" });
  for (const section of document.querySelectorAll("section[id]")) watcher.observe(section);

  // ---- tables: order the rows by a column; a second press turns the order round
  const cellValue = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);
  };
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
      const descending = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].map((row, place) => {
        row.dataset.place ??= place;
        const named = row.cells[head.cellIndex].tagName === "TH";
        return [named ? -Number(row.dataset.place) : cellValue(row, head.cellIndex), row];
      });
      const sign = descending ? -1 : 1;
      rows.sort(([a], [b]) => (Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : sign * (a - b)));
      body.append(...rows.map(([, row]) => row));
    });
  }

  // ---- prompt: the predictions that stood before a token
  const guesses = data("prompt-data");
  const panel = document.getElementById("guesses");
  if (guesses && panel) {
    const buttons = [...document.querySelectorAll(".prompt button")];
    const show = (index) => {
      buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(i === index)));
      const at = guesses[index];
      const line = make("p");
      if (index === 0) line.append("The first token is given: nothing comes before it.");
      else if (at.label === null) line.append("What the model expects after the prompt:");
      else line.append("Token ", make("b", String(index)), " is ", make("code", at.label), `: loss ${at.loss.toFixed(3)} nats (probability ${at.probability.toPrecision(3)}). Expected there:`);
      const list = make("div", undefined, "guesses plain");
      for (const [label, probability] of at.top) {
        const bar = make("span", undefined, "bar pos");
        bar.style.setProperty("--from", 0);
        bar.style.setProperty("--size", probability);
        list.append(make("span", label, label === at.label ? "token actual" : "token"), make("span", probability.toFixed(3), "num"), bar);
      }
      panel.replaceChildren(line, list);
    };
    buttons.forEach((button, index) => {
      button.addEventListener("click", () => show(index));
      button.addEventListener("focus", () => show(index));
      button.addEventListener("mouseenter", () => show(index));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) { buttons[index + step]?.focus(); event.preventDefault(); }
      });
    });
    show(buttons.length - 1);
  }

  // ---- attention: one head enlarged, with its weights to be read off
  const attention = data("attention-data");
  const canvas = document.getElementById("pattern");
  if (attention && canvas && "DecompressionStream" in window) enlarge();

  async function enlarge() {
    const { labels, names, packed } = attention, size = labels.length, per = (size * (size + 1)) / 2;
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const weights = new Uint8Array(await new Response(stream).arrayBuffer());
    const weight = (head, query, key) => (key > query ? 0 : weights[head * per + (query * (query + 1)) / 2 + key] / 255);
    const title = document.getElementById("pattern-title"), readout = document.getElementById("readout");
    const tiles = [...document.querySelectorAll(".tiles button")];
    let head = Number(canvas.dataset.head), cell = null, pinned = false;

    const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
    const layout = () => {
      const width = canvas.clientWidth, longest = Math.min(Math.max(...labels.map((l) => l.length)), 10);
      const font = 11, margin = Math.ceil(longest * font * 0.62) + 8, row = (width - margin - 2) / size;
      return { width, font, margin, row, every: Math.max(1, Math.ceil((font + 2) / row)) };
    };
    // Where not every label has room, every k-th stands; the chosen one drives its neighbours out.
    const labelled = (index, chosen, every) =>
      index === chosen || (index % every === 0 && !(chosen !== undefined && Math.abs(index - chosen) < every));
    const draw = () => {
      const ratio = window.devicePixelRatio || 1, { width, font, margin, row, every } = layout();
      canvas.width = canvas.height = Math.round(width * ratio);
      const g = canvas.getContext("2d");
      g.scale(ratio, ratio);
      g.fillStyle = style("--accent");
      for (let q = 0; q < size; q++) {
        for (let k = 0; k <= q; k++) {
          const value = weight(head, q, k);
          if (!value) continue;
          const x0 = Math.round((margin + k * row) * ratio) / ratio, x1 = Math.round((margin + (k + 1) * row) * ratio) / ratio;
          const y0 = Math.round((margin + q * row) * ratio) / ratio, y1 = Math.round((margin + (q + 1) * row) * ratio) / ratio;
          g.globalAlpha = value;
          g.fillRect(x0, y0, x1 - x0, y1 - y0);
        }
      }
      g.globalAlpha = 1;
      g.strokeStyle = style("--line");
      g.lineWidth = 1;
      g.strokeRect(margin - 0.5, margin - 0.5, row * size + 1, row * size + 1);
      if (cell) {
        g.strokeStyle = style("--ink");
        g.strokeRect(margin + cell.key * row, margin + cell.query * row, row, row);
        g.globalAlpha = 0.35;
        g.strokeRect(margin, margin + cell.query * row, row * size, row);
        g.strokeRect(margin + cell.key * row, margin, row, row * size);
        g.globalAlpha = 1;
      }
      g.font = `${font}px ${style("--mono")}`;
      g.textBaseline = "middle";
      g.textAlign = "right";
      labels.forEach((label, i) => {
        const short = label.length > 10 ? label.slice(0, 9) + "…" : label, at = margin + (i + 0.5) * row;
        if (labelled(i, cell?.query, every)) {
          g.fillStyle = style(cell?.query === i ? "--ink" : "--soft");
          g.fillText(short, margin - 5, at);
        }
        if (labelled(i, cell?.key, every)) {
          g.save();
          g.translate(at, margin - 5);
          g.rotate(Math.PI / 2);
          g.fillStyle = style(cell?.key === i ? "--ink" : "--soft");
          g.fillText(short, 0, 0);
          g.restore();
        }
      });
    };
    const read = () => {
      if (!cell) {
        const { every } = layout(), some = every > 1 ? ` One token in ${every} is labelled.` : "";
        readout.textContent = `Rows are queries, columns keys.${some} Point at a cell, or use the arrow keys, to read its weight; click to hold it, Esc to let go.`;
        return;
      }
      const { query, key } = cell;
      const what = key > query ? "masked: a query sees no later key" : `weight ${weight(head, query, key).toFixed(3)}`;
      const top = Array.from({ length: query + 1 }, (_, k) => k).sort((a, b) => weight(head, query, b) - weight(head, query, a)).slice(0, 3);
      readout.replaceChildren(
        "query ", make("b", `${query} `), make("code", labels[query]), ", key ", make("b", `${key} `), make("code", labels[key]), `: ${what}. `,
        "Most from this query: ", ...top.flatMap((k, i) => [i ? ", " : "", `${k} `, make("code", labels[k]), ` ${weight(head, query, k).toFixed(3)}`]), ".");
    };
    const select = (index) => {
      head = index;
      tiles.forEach((tile, i) => tile.setAttribute("aria-pressed", String(i === head)));
      title.textContent = names[head];
      canvas.setAttribute("aria-label", `Attention pattern of ${names[head]}; arrow keys move over its cells`);
      draw();
      read();
    };
    const point = (event) => {
      const { margin, row } = layout(), box = canvas.getBoundingClientRect();
      const key = Math.floor((event.clientX - box.left - margin) / row), query = Math.floor((event.clientY - box.top - margin) / row);
      const inside = key >= 0 && query >= 0 && key < size && query < size;
      return inside ? { query, key } : null;
    };
    const move = (next) => { cell = next; draw(); read(); };
    tiles.forEach((tile, index) => {
      tile.addEventListener("click", () => select(index));
      tile.addEventListener("keydown", (event) => {
        const across = Number(getComputedStyle(tile.parentElement).getPropertyValue("--across"));
        const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
        if (step && tiles[index + step]) { tiles[index + step].focus(); select(index + step); event.preventDefault(); }
      });
    });
    canvas.addEventListener("pointermove", (event) => { if (!pinned) move(point(event)); });
    canvas.addEventListener("pointerleave", () => { if (!pinned) move(null); });
    canvas.addEventListener("click", (event) => { pinned = !pinned; move(point(event)); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (event.key === "Escape") { pinned = false; move(null); }
      if (!step) return;
      const at = cell ?? { query: size - 1, key: 0 }, clamp = (v) => Math.min(Math.max(v, 0), size - 1);
      pinned = true;
      move({ query: clamp(at.query + step[0]), key: clamp(at.key + step[1]) });
      event.preventDefault();
    });
    window.addEventListener("resize", draw);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    document.getElementById("large").hidden = false;
    select(head);
  }
})();
