// Draws what ran in the last seconds: calls of the draft, messages with drafts, passes of the target.

import { svg } from "./shown.js";

const SHOWN_MS = 4000;
const LEFT = 48;
const LANES = [
  { name: "Draft", key: "drafts", fill: "fill-draft" },
  { name: "Sent", key: "posts", fill: "fill-sent" },
  { name: "Verify", key: "passes", fill: "fill-verify" },
];
const LANE = 28;

export class Timeline {
  constructor(picture) {
    this.picture = picture;
    this.clear();
  }

  clear() {
    this.now = 0;
    this.spans = { drafts: [], posts: [], passes: [] };
    this.draw();
  }

  /** Takes what ran since the last state. */
  take(state) {
    this.now = state.at_ms;
    for (const { key } of LANES) {
      this.spans[key] = [...this.spans[key], ...state[key]].filter(([, end]) => end > this.now - SHOWN_MS);
    }
    this.draw();
  }

  draw() {
    const width = this.picture.clientWidth;
    const scale = (width - LEFT) / SHOWN_MS;
    const start = this.now - SHOWN_MS;
    const at = (ms) => LEFT + Math.min(SHOWN_MS, Math.max(0, ms - start)) * scale;
    const bottom = LANES.length * LANE + 2;
    const lanes = [];
    const ticks = [];
    const bars = [];
    const bar = (name, y, x, long) => bars.push(svg("rect", { class: name, x: Math.min(x, width - 1.5), y, width: long, height: 16 }));
    LANES.forEach(({ name, key, fill }, index) => {
      const y = index * LANE + 2;
      lanes.push(svg("text", { x: 0, y: y + 16 }, name));
      lanes.push(svg("rect", { class: "lane", x: LEFT, y, width: Math.max(0, width - LEFT), height: 22, rx: 3 }));
      for (const [from, to] of merged(this.spans[key])) bar(fill, y + 3, at(from), Math.max(1.5, at(to) - at(from) - 0.5));
      if (key !== "posts") return;
      for (const [from] of this.spans.posts) if (from >= start) bar("begin", y + 3, at(from), 1.5);
    });
    for (let second = 0; second <= SHOWN_MS / 1000; second += 1) {
      const x = LEFT + second * 1000 * scale;
      const anchor = second === 0 ? "start" : second === SHOWN_MS / 1000 ? "end" : "middle";
      const text = second === SHOWN_MS / 1000 ? "now" : `−${SHOWN_MS / 1000 - second} s`;
      ticks.push(svg("line", { x1: x, x2: x, y1: 0, y2: bottom }));
      ticks.push(svg("text", { x, y: bottom + 15, "text-anchor": anchor }, text));
    }
    const parts = [...lanes, ...ticks, ...bars];
    this.picture.replaceChildren(...parts);
    this.picture.setAttribute("aria-label", this.describe());
  }

  describe() {
    const { drafts, posts, passes } = this.spans;
    return `In the last seconds: ${drafts.length} calls of the draft, ${posts.length} messages, ${passes.length} passes of the target`;
  }
}

/** Overlapping spans as one: messages are in flight together. */
function merged(spans) {
  const found = [];
  for (const [from, to] of [...spans].sort((one, other) => one[0] - other[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else found.push([from, to]);
  }
  return found;
}
