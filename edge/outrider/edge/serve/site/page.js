// The page of the local endpoint: takes a request, shows the text as it comes and how it was drafted.

import { Refused, generate, info, useKey, verify } from "./server.js";
import { counted, duration, number, svg, visible } from "./shown.js";
import { Timeline } from "./timeline.js";
import { advance, drawTree } from "./tree.js";

const at = (id) => document.getElementById(id);
const RETRY_MS = 5000;
const STOP_MS = 500;
const timeline = new Timeline(at("timeline"));
let conversation = [];
const unchecked = new WeakSet(); // its messages with text of the draft alone
let numDropped = 0; // of its first messages, which the model no longer sees
let contextTokens = 0; // that the model takes at most
let running = null;
let tree = [];
let unverified = null; // the answer that the target may check
let retry = 0; // the timer of the next look
let endedMs = -Infinity; // when the last text ended
let otherMode = ""; // what is written for the mode that is not chosen

/** One text as it is shown; `into` is emptied by the caller. */
class Shown {
  constructor(into) {
    this.into = into;
    this.text = "";
    this.counts = { draft: 0, alternative: 0, lookup: 0, target: 0, unverified: 0 };
    this.accepted = this.passes = this.numTokens = this.numLater = this.late = 0;
    this.firstMs = this.lastMs = null;
    this.caret = document.createElement("span");
    this.caret.className = "caret";
    into.append(this.caret);
    this.showFigures({});
  }

  take(event) {
    if (event.type === "commit") this.takeCommit(event);
    else if (event.type === "state") this.takeState(event);
    else if (event.type === "end") this.takeEnd(event);
  }

  takeCommit(commit) {
    if (commit.tokens[0]?.origin !== "unverified") this.passes += 1;
    this.accepted += commit.accepted;
    if (this.firstMs === null) this.firstMs = commit.at_ms;
    else this.numLater += commit.tokens.length;
    this.lastMs = commit.at_ms;
    for (const token of commit.tokens) {
      this.numTokens += 1;
      this.counts[token.origin] += 1;
      if (token.origin === "target" && token.rank !== undefined) this.late += 1;
      this.add(token.text, `origin-${token.origin}`);
    }
    follow();
    this.showCounts();
    showTree(advance(tree, commit.tokens.map((token) => token.id)));
  }

  /** Neighbours of one class share an element. */
  add(text, name) {
    if (!text) return;
    this.text += text;
    const last = this.caret.previousSibling;
    if (last && last.className === name) last.firstChild.appendData(visible(text));
    else {
      const span = document.createElement("span");
      span.className = name;
      span.textContent = visible(text);
      this.caret.before(span);
    }
  }

  takeState(state) {
    showTree(state.tree);
    timeline.take(state);
    this.showFigures(state);
  }

  takeEnd(end) {
    this.add(end.text, this.counts.unverified ? "origin-unverified" : "origin-target");
    showTree([]);
    if (end.tokens_per_s !== undefined) at("f-rate").textContent = number(end.tokens_per_s, 1);
  }

  close() {
    this.caret.remove();
  }

  showCounts() {
    for (const [origin, count] of Object.entries(this.counts)) {
      document.querySelector(`[data-count="${origin}"]`).textContent = count;
    }
    showExact();
  }

  showFigures(state) {
    this.showCounts();
    const rate = this.lastMs > this.firstMs ? this.numLater / ((this.lastMs - this.firstMs) / 1000) : null;
    at("f-rate").textContent = number(rate, 1);
    at("f-accepted").textContent = number(this.numTokens ? (100 * this.accepted) / this.numTokens : null, 0, " %");
    at("f-pass").textContent = number(this.passes ? (this.numTokens - this.counts.unverified) / this.passes : null, 2);
    at("f-rtt").textContent = duration(state.round_trip_ms);
    at("f-step").textContent = duration(state.step_ms);
    at("f-call").textContent = duration(state.draft_ms);
  }
}

/** Says whose the text is, by what is in view. */
function showExact() {
  const isVerified = !at("text").querySelector(".origin-unverified");
  at("legend-unverified").hidden = isVerified;
  at("exact").hidden = !isVerified;
}

function showTree(guesses) {
  tree = guesses;
  drawTree(at("tree"), tree);
}

/** Keeps the end of the text in view, unless the reader has scrolled up. */
function follow() {
  const box = at("text");
  if (box.dataset.left !== "yes") box.scrollTop = box.scrollHeight;
}

function isChat() {
  return at("chat").checked;
}

function status(words) {
  at("status").textContent = words;
}

function complain(words) {
  if (at("error").textContent === visible(words)) return; // said already
  at("error").textContent = visible(words);
  at("error").hidden = !words;
  if (words) at("error").scrollIntoView({ block: "nearest" });
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/** The fields of a request but its prompt. The seed is shown, so that the same text can be had again. */
function options() {
  const seed = at("seed").value === "" ? randomSeed() : at("seed").valueAsNumber;
  return {
    max_tokens: at("max-tokens").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    seed,
    round_trip_ms: at("delay").valueAsNumber,
  };
}

function turn(who, text, name) {
  const box = document.createElement("div");
  box.className = "turn";
  const speaker = document.createElement("div");
  speaker.className = "who";
  speaker.textContent = who;
  const words = document.createElement("div");
  const span = document.createElement("span");
  span.className = name;
  span.textContent = visible(text);
  words.append(span);
  box.append(speaker, words);
  return [box, words];
}

/** Says, below the turns that the model no longer sees, that they were dropped. */
function showDropped() {
  const box = at("text");
  box.querySelector(".dropped")?.remove();
  if (!numDropped) return;
  const count = conversation.slice(0, numDropped).filter((message) => message.role === "user").length;
  const what = count === 1 ? "oldest turn was dropped" : `${count} oldest turns were dropped`;
  const note = document.createElement("p");
  note.className = "dropped";
  note.setAttribute("role", "note");
  note.textContent = `The context of ${contextTokens} tokens is full: the ${what}. The model no longer sees what stands above.`;
  box.insertBefore(note, box.children[numDropped]);
}

/** Shows the prompt or the conversation, and returns where its text goes. before: messages that are not sent. */
function stage(prompt, messages, before) {
  const box = at("text");
  box.dataset.left = "no";
  if (!messages) {
    const words = visible(prompt);
    const cut = words.lastIndexOf("\n") + 1;
    const part = (name, text) => {
      const element = document.createElement(name);
      element.className = "prompt";
      element.textContent = text;
      return element;
    };
    box.replaceChildren(...(cut ? [part("div", words.slice(0, cut))] : []), part("span", words.slice(cut)));
    return box;
  }
  const turns = [...before, ...messages].map((message) => turn(message.role === "user" ? "You" : "Model", message.content, message.role === "user" ? "prompt" : unchecked.has(message) ? "origin-unverified" : "origin-target")[0]);
  const [last, words] = turn("Model", "", "origin-target");
  words.replaceChildren();
  box.replaceChildren(...turns, last);
  showDropped();
  return words;
}

function lines({ first_line: first, last_line: last }) {
  return first === last ? `line ${first}` : `lines ${first} to ${last}`;
}

/** Says which passages of the server's documents stand before the prompt. */
function showPassages(passages) {
  const found = passages.map((each) => `${visible(each.document)}, ${lines(each)}`);
  at("passages").textContent = found.length ? `With passages from ${found.join("; ")}.` : "";
  at("passages").hidden = !found.length;
}

/** Generates one text into the stage. */
async function one(request, signal, before = []) {
  const into = stage(request.prompt, request.messages, before);
  showPassages([]);
  timeline.clear();
  const shown = new Shown(into);
  follow();
  try {
    const end = await generate(request, signal, (event) => {
      if (event.type === "dropped") {
        numDropped = before.length + event.num_messages;
        contextTokens = event.max_positions;
        showDropped();
      } else if (event.type === "passages") showPassages(event.passages);
      else shown.take(event);
    });
    return { shown, end: { ...end, request, before } };
  } catch (error) {
    error.shown = shown;
    error.seed = request.seed;
    throw error;
  } finally {
    shown.close();
  }
}

function summary(shown, end, seed) {
  const reasons = { stop: "the model ended it", length: "the limit was reached", context: "the context is full" };
  const rate = end.tokens_per_s === undefined ? "" : `, ${number(end.tokens_per_s, 1)} tokens/s`;
  return [
    `${counted(end.num_tokens, "token")} in ${number(end.at_ms / 1000, 1)} s${rate}; ${reasons[end.finish_reason] || "it has ended"}.`,
    shown.late ? `Guessed here too, but not verified in time: ${shown.late} of the target’s own.` : "",
    end.num_unverified ? `Unverified: ${counted(end.num_unverified, "token")}.` : "",
    end.eased_by ? `Drafted with half the work: ${visible(end.eased_by)}.` : "",
    end.failed_drafts?.length ? `Left out for now, after a failure: ${visible(end.failed_drafts.join(", "))}.` : "",
    end.draft_error ? `Drafting ended early: ${visible(end.draft_error)}.` : "",
    `Seed ${seed}.`,
  ].filter(Boolean).join(" ");
}

/** Runs `work` unless something runs; buttons, errors and the end are handled here. */
async function run(work) {
  if (running) return;
  running = new AbortController();
  at("go").textContent = "Stop";
  at("compare").setAttribute("aria-disabled", "true");
  at("new").setAttribute("aria-disabled", "true");
  complain("");
  offerCheck(null);
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name === "AbortError") status(error.seed === undefined ? "Stopped." : `Stopped. Seed ${error.seed}.`);
    else if (error instanceof Refused) {
      status("");
      complain(error.message);
      if (error.status === 401) askForKey();
    } else {
      status("");
      complain("The page failed. Reload it.");
      console.error(error);
    }
  } finally {
    running = null;
    endedMs = performance.now();
    at("go").textContent = "Generate";
    at("compare").removeAttribute("aria-disabled");
    at("new").removeAttribute("aria-disabled");
    document.body.dataset.runs = String(Number(document.body.dataset.runs || 0) + 1);
    showFacts().catch(() => {}); // what is wrong has been said
  }
}

function generateNow() {
  if (running || !at("form").reportValidity()) return;
  at("comparison").hidden = true;
  const text = at("prompt").value;
  const chosen = options();
  run(async (signal) => {
    status("Generating…");
    if (!isChat()) {
      const { shown, end } = await one({ ...chosen, prompt: text }, signal);
      status(summary(shown, end, chosen.seed));
      offerCheck(end);
      return;
    }
    const all = [...conversation, { role: "user", content: text }];
    const before = all.slice(0, numDropped);
    at("prompt").value = "";
    try {
      const { shown, end } = await one({ ...chosen, messages: all.slice(before.length) }, signal, before);
      conversation = [...all, answer(shown)];
      status(summary(shown, end, chosen.seed));
      offerCheck(end);
    } catch (error) {
      if (error.name === "AbortError" && error.shown.text) {
        conversation = [...all, answer(error.shown)];
      } else giveBack(text);
      throw error;
    }
  });
}

function answer(shown) {
  const message = { role: "assistant", content: shown.text };
  if (shown.counts.unverified) unchecked.add(message);
  return message;
}

/** Puts a message that got no answer back into the chat's box, before what was typed since. */
function giveBack(text) {
  const joined = (since) => (since ? `${text}\n${since}` : text);
  if (isChat()) at("prompt").value = joined(at("prompt").value);
  else otherMode = joined(otherMode);
}

/** Offers to have unverified text checked; null: there is none. */
function offerCheck(end) {
  unverified = end?.num_unverified ? { id: end.id, request: end.request, before: end.before } : null;
  at("unverified").hidden = !unverified;
}

/** Shows the target's text in place of the draft's. */
function checkNow() {
  if (running || !unverified) return;
  const { id, request, before } = unverified;
  run(async (signal) => {
    at("text").focus(); // the button that had it is gone
    status("The target checks it…");
    let choice;
    try {
      [choice] = (await verify(id, signal)).choices;
    } catch (error) {
      if (error.status !== 404) offerCheck({ num_unverified: 1, id, request, before });
      throw error;
    }
    const shown = new Shown(stage(request.prompt, request.messages, before));
    shown.add(choice.text, "origin-target");
    shown.close();
    if (request.messages) conversation = [...before, ...request.messages, { role: "assistant", content: choice.text }];
    const replaced = `Unverified tokens: ${choice.replaced_tokens} replaced, ${choice.confirmed_tokens} confirmed.`;
    status(choice.is_same ? "The target’s text is the same." : replaced);
  });
}

function compareNow() {
  if (running || !at("form").reportValidity()) return;
  const text = at("prompt").value;
  const before = conversation.slice(0, isChat() ? numDropped : 0);
  const content = isChat() ? { messages: [...conversation.slice(numDropped), { role: "user", content: text }] } : { prompt: text };
  const request = { ...options(), ...content };
  showComparison({});
  run(async (signal) => {
    // Both then find the prompt in the cloud's cache.
    status("Comparing: the cloud reads the prompt…");
    await generate({ ...request, max_tokens: 1, is_drafted: false, round_trip_ms: 0 }, signal, () => {});
    status("Comparing: the cloud alone…");
    const cloud = await one({ ...request, is_drafted: false }, signal, before);
    showComparison({ cloud });
    status("Comparing: drafted here…");
    const drafted = await one({ ...request, is_drafted: true }, signal, before);
    showComparison({ cloud, drafted });
    status(summary(drafted.shown, drafted.end, request.seed));
  });
}

function showComparison({ cloud, drafted }) {
  at("comparison").hidden = false;
  for (const [id, found] of [["run-cloud", cloud], ["run-draft", drafted]]) {
    const [time, first, rate] = at(id).querySelectorAll("td");
    time.textContent = found ? number(found.end.at_ms / 1000, 2, " s") : "–";
    first.textContent = found ? number(found.end.ttft_ms, 0, " ms") : "–";
    rate.textContent = found ? number(found.end.tokens_per_s, 1) : "–";
  }
  drawBars(cloud, drafted);
  at("verdict").textContent = cloud && drafted ? verdict(cloud, drafted) : "";
}

function verdict(cloud, drafted) {
  const factor = cloud.end.at_ms / drafted.end.at_ms;
  const length = Array.from(cloud.shown.text).length;
  const same = cloud.shown.text === drafted.shown.text ? `The texts are equal: ${length} characters.` : "The texts differ.";
  return `${same} Drafted, the text took ${(drafted.end.at_ms / 1000).toFixed(1)} s in place of ${(cloud.end.at_ms / 1000).toFixed(1)} s: ${factor.toFixed(2)}× the speed.`;
}

function drawBars(cloud, drafted) {
  const picture = at("bars");
  const longest = Math.max(cloud?.end.at_ms || 0, drafted?.end.at_ms || 0) || 1;
  const bar = (name, y, found) =>
    svg("rect", { class: name, x: 0, y, height: 14, rx: 2, width: found ? `${(100 * found.end.at_ms) / longest}%` : 0 });
  picture.replaceChildren(bar("cloud", 0, cloud), bar("drafted", 19, drafted));
}

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

async function showFacts() {
  const facts = await info();
  at("model").textContent = facts.is_up ? visible(facts.model) : `${visible(facts.model)}, no cloud`;
  at("draft").textContent = visible(facts.draft);
  at("max-tokens").max = Math.min(facts.max_tokens, facts.max_positions);
  at("delay").max = facts.max_round_trip_ms;
  at("chat").disabled = !facts.has_chat_template;
  at("no-chat").hidden = facts.has_chat_template;
  if (facts.has_chat_template) at("chat").removeAttribute("aria-describedby");
  else at("chat").setAttribute("aria-describedby", "no-chat");
}

/** For a verifier that may be starting: once nothing runs. */
function lookAgain() {
  clearTimeout(retry);
  retry = setTimeout(() => (running ? lookAgain() : look()), RETRY_MS);
}

/** Asks what runs here. given: a key to ask with from now on. */
async function look(given) {
  try {
    if (given !== undefined) useKey(given);
    await showFacts();
    complain("");
    at("key-form").hidden = true;
    at("key").value = "";
  } catch (error) {
    if (error.status === 401) askForKey();
    if (error.status !== 401 || at("key").value) complain(error.message);
    if (error.status === 503) lookAgain();
  }
  document.body.dataset.looked = "yes";
}

function showMode() {
  const chat = isChat();
  at("prompt-label").textContent = chat ? "Message" : "Prompt";
  at("new").hidden = !chat;
  if (chat && !running && conversation.length) {
    stage("", conversation, []);
    at("text").lastChild.remove();
    offerCheck(null);
    showExact();
  }
  [at("prompt").value, otherMode] = [otherMode, at("prompt").value];
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else generateNow();
});
at("go").addEventListener("click", (event) => {
  // Neither the second click of two, nor one for Stop that comes as the text ends, does the opposite of what was meant.
  if (event.detail > 1 || (event.detail && performance.now() - endedMs < STOP_MS)) event.preventDefault();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  look(at("key").value.trim());
});
at("verify").addEventListener("click", checkNow);
at("compare").addEventListener("click", compareNow);
at("new").addEventListener("click", () => {
  if (running) return;
  conversation = [];
  numDropped = 0;
  offerCheck(null);
  at("text").replaceChildren();
  showPassages([]);
  timeline.clear();
  showTree([]);
  new Shown(at("text")).close();
  status("A new conversation.");
  at("prompt").focus();
});
for (const radio of document.querySelectorAll('[name="mode"]')) radio.addEventListener("change", showMode);
at("delay").addEventListener("input", () => {
  const shown = `+ ${at("delay").value} ms`;
  at("delay-shown").textContent = shown;
  at("delay").setAttribute("aria-valuetext", shown);
});
at("text").addEventListener("scroll", () => {
  const box = at("text");
  box.dataset.left = box.scrollHeight - box.scrollTop - box.clientHeight > 40 ? "yes" : "no";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.isComposing) running.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === at("prompt")) {
    event.preventDefault();
    generateNow();
  }
});
new ResizeObserver(() => {
  timeline.draw();
  showTree(tree);
}).observe(at("timeline"));

look();
