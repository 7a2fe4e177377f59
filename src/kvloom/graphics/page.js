// Of all pages: elements, spelled numbers, and the map of pages, whose cells tell requests apart by color.
"use strict";
const at = id => document.getElementById(id);
const plain = number => number.toLocaleString("en");
const some = (number, noun) => `${plain(number)} ${noun}${number === 1 ? "" : "s"}`;
const hue = number => `--h${(number + 7) % 8}`;  // of the request with this number

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Page numbers as text: "0–3, 7".
function ranges(pages, most = Infinity) {
  const runs = [];
  for (const page of pages) {
    if (runs.length && runs.at(-1)[1] === page - 1) runs.at(-1)[1] = page;
    else runs.push([page, page]);
  }
  const more = runs.length > most ? ` and ${runs.length - most} more runs` : "";
  return runs.slice(0, most).map(([a, b]) => a === b ? a : `${a}–${b}`).join(", ") + more;
}

// Colors as the style of the page has them, which canvases do not read; read again when light becomes dark.
let palette = {};
function readPalette() {
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim();
  palette = { hues: [0, 1, 2, 3, 4, 5, 6, 7].map(i => color(`--h${i}`)) };
  for (const name of ["line", "card", "text", "idle", "focus"]) palette[name] = color(`--${name}`);
}
const colorOf = number => palette.hues[(number + 7) % 8];

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paint());  // each page has a paint

// The context of a canvas of this size in CSS pixels, empty, sharp on any screen.
function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.floor(width * ratio) || canvas.height !== Math.floor(height * ratio)) {
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
  }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.clearRect(0, 0, width, height);
  ink.font = "600 9px system-ui, sans-serif";
  ink.textAlign = "center";
  ink.textBaseline = "middle";
  return ink;
}

const isIdle = kind => kind === "kept" || kind === "evictable";  // what a page has that no request holds
const KINDS = ["free", "evictable", "active", "shared"];

// A cell of the map; returns its size without the gap. Each kind has a shape of its own: a border, a border with
// a small square (kept: a larger one), a square, a square in two colors with a hole.
function drawCell(ink, x, y, size, kind, color, other) {
  const s = size - (size > 6 ? 2 : size > 3 ? 1 : 0);
  if (kind === "free" || isIdle(kind)) {
    ink.strokeStyle = palette.line;
    ink.strokeRect(x + .5, y + .5, s - 1, s - 1);
  }
  if (kind === "free") return s;
  ink.fillStyle = color;
  if (isIdle(kind)) {
    const edge = kind === "kept" ? s / 6 : s / 3;
    ink.fillRect(x + edge, y + edge, Math.ceil(s - 2 * edge), Math.ceil(s - 2 * edge));
    return s;
  }
  ink.fillRect(x, y, s, s);
  if (kind === "shared") {
    ink.fillStyle = other;
    ink.beginPath();
    ink.moveTo(x + s, y);
    ink.lineTo(x + s, y + s);
    ink.lineTo(x, y + s);
    ink.fill();
    ink.fillStyle = palette.card;
    ink.fillRect(x + s * .36, y + s * .36, Math.max(1, s * .28), Math.max(1, s * .28));
  }
  return s;
}

// What each kind looks like, with room for its count: the element "count-KIND". Pages that no request holds are idle.
function drawLegend(idle, kinds = KINDS) {
  at("legend").replaceChildren(...kinds.map(kind => {
    const item = element("span"), canvas = element("canvas"), text = element("span", kind);
    text.id = `count-${kind}`;
    drawCell(prepared(canvas, 14, 14), 0, 0, 14, kind, isIdle(kind) ? idle : colorOf(1), colorOf(2));
    item.append(canvas, text);
    return item;
  }));
}

// The canvas of the map, and the page that is pointed at.
const map = at("map");
let grid = { size: 16, columns: 1 }, cursor = 0;

// The context of the map with room for so many pages, in rows of `grid.columns` cells of `grid.size`.
function preparedMap(count) {
  const width = map.clientWidth, total = Math.max(count, 1);
  const size = Math.max(3, Math.min(22, Math.floor(Math.sqrt(width * 340 / total))));
  grid = { size, columns: Math.max(1, Math.floor(width / size)) };
  return prepared(map, width, Math.ceil(total / grid.columns) * size);
}
const placeOf = page => [page % grid.columns * grid.size, Math.floor(page / grid.columns) * grid.size];

// Keys and the pointer move the cursor over the map; `choose`, `describe` and `draw` follow it.
function followCursor(count, choose, describe, draw) {
  map.addEventListener("keydown", event => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns, Home: -Infinity, End: Infinity };
    if (event.key in steps) cursor = Math.max(0, Math.min(count() - 1, cursor + steps[event.key]));
    else if (event.key === "Enter" || event.key === " ") choose();
    else return;
    event.preventDefault();
    draw();
  });
  const isOver = event => {
    const box = map.getBoundingClientRect(), column = Math.floor((event.clientX - box.left) / grid.size);
    const page = Math.floor((event.clientY - box.top) / grid.size) * grid.columns + column;
    if (column >= grid.columns || page < 0 || page >= count()) return false;
    cursor = page;
    return true;
  };
  map.addEventListener("click", event => isOver(event) && choose());
  map.addEventListener("mousemove", event => isOver(event) && describe());
  map.addEventListener("focus", draw);
  map.addEventListener("blur", draw);
}
