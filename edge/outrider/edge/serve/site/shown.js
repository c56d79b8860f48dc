// Makes text from elsewhere safe to show: control and bidirectional characters as escapes, never as markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** The text with an escape such as \x1b for each control character but newline and tab. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    return code < 0x20 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** A token on one short line: white space shown, the rest as `visible` does. */
export function label(text, most) {
  const characters = Array.from(visible(text).replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥"));
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : characters.join("") || "∅";
}

/** An element of an SVG picture. */
export function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** A number with so many decimals, or a dash. */
export function number(value, decimals = 0, unit = "") {
  return value === undefined || value === null || !Number.isFinite(value) ? "–" : value.toFixed(decimals) + unit;
}

/** "1 token", "2 tokens". */
export function counted(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Milliseconds. */
export function duration(ms) {
  return number(ms, ms < 10 ? 1 : 0, " ms");
}
