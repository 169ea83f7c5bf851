// Curves over an episode, and a histogram: drawn on canvases, with a cursor beside the drawing so that a frame costs nothing.

const LEFT = 58, RIGHT = 8, TOP = 6, BOTTOM = 20;

export function element(kind, options = {}, ...children) {
  // Texts of a dataset are set as text: nothing here makes HTML of a string.
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function colour(number, total) {
  const style = getComputedStyle(document.documentElement);
  if (total <= 10) return style.getPropertyValue(`--c${number}`).trim();
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${Math.round((330 * number) / total)} 70% ${dark ? 66 : 42}%)`;
}

export function shownNumber(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high + step * 1e-9; place++) found.push(Number((place * step).toPrecision(12)));
  return found;
}

function ends(values) {
  let low = Infinity, high = -Infinity;
  for (const column of values) for (const value of column) {
    if (value !== null && value < low) low = value;
    if (value !== null && value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

function prepared(canvas) {
  const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(box.width * scale));
  canvas.height = Math.max(1, Math.round(box.height * scale));
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  context.font = "11px system-ui, sans-serif";
  return { context, width: box.width, height: box.height, dim: style.getPropertyValue("--dim"), line: style.getPropertyValue("--line") };
}

// Vectors whose numbers have the same names are drawn to one scale: a state beside the action that asks for it.
export function sharedScales(curves) {
  // Bare positions are no names: they say nothing of what the numbers are.
  const key = (one) => (one.names.length > 1 && one.names.some((name) => !/^\d+$/.test(name)) ? one.names.join("\n") : one.feature);
  const scales = new Map();
  for (const one of curves) {
    const [low, high] = ends(one.values), known = scales.get(key(one)) ?? { low, high, features: [] };
    scales.set(key(one), { low: Math.min(known.low, low), high: Math.max(known.high, high), features: [...known.features, one.feature] });
  }
  return curves.map((one) => scales.get(key(one)));
}

export class Plot {
  constructor(curves, scale, episode, fps, onSeek) {
    Object.assign(this, { curves, scale, episode, fps, hidden: new Set() });
    this.canvas = element("canvas", { role: "img", "aria-label": `${curves.feature} over time` });
    this.cursor = element("div", { class: "cursor" });
    this.drawing = element("div", { class: "drawing" }, this.canvas, this.cursor);
    this.legend = element("div", { class: "legend" });
    this.values = curves.names.map(() => element("span", { class: "value" }));
    this.swatches = curves.names.map(() => element("i"));
    curves.names.forEach((name, number) => this.legend.append(this.entry(name, number)));
    const notes = [`${curves.names.length + curves.num_hidden} number${curves.names.length + curves.num_hidden === 1 ? "" : "s"}`];
    if (curves.num_hidden) notes.push(`${curves.num_hidden} not drawn`);
    const others = scale.features.filter((one) => one !== curves.feature);
    if (others.length) notes.push(`to the scale of ${others.join(", ")}`);
    if (episode.every > 1) notes.push(`one frame of ${episode.every} drawn`);
    const title = element("h2", { text: curves.feature }, element("span", { class: "dim", text: notes.join(", ") }));
    this.root = element("div", { class: "plot" }, title, this.drawing, this.legend);
    const seek = (event) => onSeek(this.frameAt(event));
    this.drawing.addEventListener("pointerdown", (event) => { this.drawing.setPointerCapture(event.pointerId); seek(event); });
    this.drawing.addEventListener("pointermove", (event) => { if (event.buttons & 1) seek(event); });
  }

  entry(name, number) {
    const button = element("button", { type: "button", "aria-pressed": "true", title: `${name}: click to hide or show` },
      this.swatches[number], element("span", { class: "name", text: name }), this.values[number]);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(number)) this.hidden.add(number);
      button.setAttribute("aria-pressed", String(!this.hidden.has(number)));
      this.draw();
    });
    return button;
  }

  frameAt(event) {
    const box = this.drawing.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return Math.round(Math.min(1, Math.max(0, share)) * (this.episode.length - 1));
  }

  draw() {
    const { context, width, height, dim, line } = prepared(this.canvas);
    const last = Math.max(1, this.episode.length - 1), every = this.episode.every;
    let { low, high } = this.scale;
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    low -= room; high += room;
    const x = (frame) => LEFT + (frame / last) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
    context.strokeStyle = line; context.fillStyle = dim; context.lineWidth = 1;
    context.textAlign = "right"; context.textBaseline = "middle";
    for (const value of ticks(low, high, 4)) {
      context.beginPath(); context.moveTo(LEFT, y(value)); context.lineTo(width - RIGHT, y(value)); context.stroke();
      context.fillText(shownNumber(value), LEFT - 6, y(value));
    }
    context.textBaseline = "top";
    const seconds = ticks(0, last / this.fps, Math.max(2, Math.floor(width / 110)));
    for (const second of seconds) {
      context.textAlign = second === 0 ? "left" : "center";
      if (x(second * this.fps) < width - 14) context.fillText(`${second} s`, x(second * this.fps), height - BOTTOM + 5);
    }
    context.setLineDash([4, 3]); context.strokeStyle = dim;
    for (const run of this.episode.tasks.slice(1)) {
      context.beginPath(); context.moveTo(x(run.start), TOP); context.lineTo(x(run.start), height - BOTTOM); context.stroke();
    }
    context.setLineDash([]); context.lineWidth = 1.4; context.lineJoin = "round";
    const total = this.curves.names.length;
    this.curves.values.forEach((column, number) => {
      const paint = colour(number, total);
      this.swatches[number].style.background = paint;
      if (this.hidden.has(number)) return;
      context.strokeStyle = context.fillStyle = paint;
      context.beginPath();
      let isBroken = true;
      column.forEach((value, place) => {
        if (value === null) { isBroken = true; return; }
        if (isBroken) context.moveTo(x(place * every), y(value)); else context.lineTo(x(place * every), y(value));
        isBroken = false;
      });
      context.stroke();
      if (column.length === 1 && column[0] !== null) context.fillRect(x(0) - 2, y(column[0]) - 2, 5, 5);
    });
  }

  show(frame) {
    const share = frame / Math.max(1, this.episode.length - 1);
    this.cursor.style.left = `calc(${LEFT}px + (100% - ${LEFT + RIGHT}px) * ${share})`;
    const place = Math.min(Math.round(frame / this.episode.every), this.curves.values[0].length - 1);
    this.values.forEach((output, number) => { output.textContent = shownNumber(this.curves.values[number][place]); });
  }
}

export function drawHistogram(canvas, lengths, fps) {
  const { context, width, height, dim, line } = prepared(canvas);
  if (!lengths.length) return;
  const seconds = lengths.map((one) => one / fps);
  const [least, most] = ends([seconds]), bins = Math.min(40, Math.max(1, new Set(lengths).size));
  const counts = new Array(bins).fill(0);
  for (const one of seconds) counts[Math.min(bins - 1, Math.floor(((one - least) / (most - least || 1)) * bins))]++;
  const top = Math.max(...counts), step = (width - LEFT - RIGHT) / bins;
  context.fillStyle = dim; context.strokeStyle = line; context.textAlign = "right"; context.textBaseline = "middle";
  for (const count of ticks(0, top, 3).filter(Number.isInteger)) {
    const y = height - BOTTOM - (count / top) * (height - TOP - BOTTOM);
    context.beginPath(); context.moveTo(LEFT, y); context.lineTo(width - RIGHT, y); context.stroke();
    context.fillText(count.toLocaleString("en"), LEFT - 6, y);
  }
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  counts.forEach((count, bin) => {
    const tall = (count / top) * (height - TOP - BOTTOM), wide = Math.min(60, step * 0.86);
    context.fillRect(LEFT + (bin + 0.5) * step - wide / 2, height - BOTTOM - tall, wide, tall);
  });
  context.fillStyle = dim; context.textBaseline = "top";
  context.textAlign = "left"; context.fillText(`${shownNumber(least)} s`, LEFT, height - BOTTOM + 5);
  context.textAlign = "right"; if (most > least) context.fillText(`${shownNumber(most)} s`, width - RIGHT, height - BOTTOM + 5);
}
