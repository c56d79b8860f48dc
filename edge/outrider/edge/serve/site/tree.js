// Draws the guesses after the cursor: the likeliest that fit, left to right.

import { label, svg } from "./shown.js";

const ROW = 28;
const COLUMN = 112;
const LEFT = 14;
const MOST_ROWS = 7;
const LEAST = 0.01; // less is noise

/** guesses: as the server lists them, the likeliest first, parents before their children. */
export function drawTree(picture, guesses) {
  const columns = Math.max(1, Math.floor((picture.clientWidth - LEFT) / COLUMN));
  const nodes = choose(guesses, columns);
  place(nodes);
  const width = (picture.clientWidth - LEFT) / columns;
  const parts = [];
  for (const node of nodes) parts.push(edge(node, width));
  parts.push(svg("rect", { class: "cursor", x: 0, y: 4, width: 3, height: 20, rx: 1 }));
  for (const node of nodes) parts.push(...box(node, width));
  if (!nodes.length) parts.push(svg("text", { x: LEFT, y: 19 }, "None now."));
  picture.replaceChildren(...parts);
  picture.setAttribute("aria-label", describe(nodes));
}

/** The guesses that are left once the tokens with these ids are committed: a state is older than the newest commit. */
export function advance(guesses, ids) {
  let left = guesses;
  for (const id of ids) {
    const root = left.findIndex((guess) => guess.parent < 0 && guess.id === id);
    if (root < 0) return [];
    const places = new Map([[root, -1]]);
    const below = [];
    left.forEach((guess, index) => {
      if (guess.parent < 0 || !places.has(guess.parent)) return;
      places.set(index, below.length);
      below.push({ ...guess, parent: places.get(guess.parent), reach: Math.min(1, guess.reach / left[root].reach) });
    });
    left = below;
  }
  return left;
}

/** Kind of a guess, as of the token that it would become. */
function kind(rank) {
  return rank === 0 ? "draft" : rank < 8 ? "alternative" : "lookup";
}

/** The likeliest guesses that fit into the columns and rows. */
function choose(guesses, columns) {
  const chosen = new Map();
  let rows = 0;
  guesses.forEach((guess, index) => {
    const parent = guess.parent < 0 ? null : chosen.get(guess.parent);
    if (guess.reach < LEAST) return;
    if (parent === undefined || (parent ? parent.depth + 1 : 0) >= columns) return;
    const isNewRow = parent ? parent.children.length > 0 : true;
    if (isNewRow && rows === MOST_ROWS) return;
    if (isNewRow) rows += 1;
    const node = { ...guess, parentNode: parent, depth: parent ? parent.depth + 1 : 0, children: [], row: 0 };
    if (parent) parent.children.push(node);
    chosen.set(index, node);
  });
  return [...chosen.values()];
}

/** Rows: a node stands beside its likeliest child. */
function place(nodes) {
  let row = 0;
  const settle = (node) => {
    node.row = row;
    node.children.forEach((child, index) => {
      if (index) row += 1;
      settle(child);
    });
  };
  nodes.filter((node) => node.depth === 0).forEach((node, index) => {
    if (index) row += 1;
    settle(node);
  });
}

function edge(node, width) {
  const from = node.parentNode;
  const x1 = from ? LEFT + (from.depth + 1) * width - 10 : 3;
  const y1 = (from ? from.row : 0) * ROW + 14;
  const x2 = LEFT + node.depth * width;
  const y2 = node.row * ROW + 14;
  const bend = x1 + (x2 - x1) / 2;
  return svg("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}` });
}

function box(node, width) {
  const x = LEFT + node.depth * width;
  const y = node.row * ROW + 3;
  const inner = width - 10;
  const share = `${Math.round(node.reach * 100)}%`;
  const most = Math.floor((inner - 16 - share.length * 7) / 7.6);
  const stroke = `stroke-${kind(node.rank)}${node.is_sent ? "" : " unsent"}`;
  return [
    svg("rect", { class: stroke, x, y, width: inner, height: 22, rx: 5 }),
    svg("text", { class: "token", x: x + 6, y: y + 15 }, label(node.text, Math.max(2, most))),
    svg("text", { class: "chance", x: x + inner - 6, y: y + 15, "text-anchor": "end" }, share),
  ];
}

function describe(nodes) {
  const first = nodes.filter((node) => node.depth === 0);
  if (!first.length) return "No guesses now";
  const shown = first.map((node) => `${label(node.text, 20)} ${Math.round(node.reach * 100)} percent`);
  return `Guesses of the next token: ${shown.join(", ")}`;
}
