// A conversation with a served agent. Whatever models, tools and callers say is text, and never markup.
"use strict";
const at = (id) => document.getElementById(id);
const log = at("log"), form = at("say"), text = at("text"), agent = at("agent"), key = at("key");
let history = [];   // what was said, as it is sent again with each message
let call = null;    // the request under way
let kept = [];      // the pictures that go with the next message: their data URIs, and where the page has them

// -- pictures ----------------------------------------------------------------------------------------------------

const sees = () => agent.selectedOptions[0]?.dataset.sees === "true";

function thumbnail(url, parent, words = "") {
  const button = made("button", "picture", parent), image = made("img", "", button);
  button.type = "button";
  image.alt = "picture";
  image.src = url;
  made("small", "", button, words);
  button.addEventListener("click", () => {
    const [large, caption] = at("enlarged").children;
    large.src = url;
    caption.textContent = button.textContent;
    at("enlarged").showModal();
  });
  return button;
}

const uriOf = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

async function keep(files) {
  for (const file of files) kept.push({ uri: await uriOf(file), url: URL.createObjectURL(file) });
  shown();
}

const picturesIn = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

function showKept() {
  const row = at("pictures");
  row.replaceChildren();
  row.hidden = !kept.length || !sees();
  for (const picture of kept) {
    const place = made("span", "kept", row);
    thumbnail(picture.url, place);
    const drop = made("button", "", place, "×");
    drop.type = "button";
    drop.setAttribute("aria-label", "Leave this picture out");
    drop.addEventListener("click", () => {
      kept = kept.filter((other) => other !== picture);
      shown();
    });
  }
}

// -- what is said ------------------------------------------------------------------------------------------------

function made(tag, kind, parent, words = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = words;
  parent.append(element);
  return element;
}

function scrolled(change) {
  const below = log.scrollHeight - log.scrollTop - log.clientHeight;
  change();
  if (below < 80) log.scrollTop = log.scrollHeight;
}

const headers = () => ({ "Content-Type": "application/json", ...(key.value && { Authorization: `Bearer ${key.value}` }) });

// An answer on the page: the states it goes through, its tool calls and its text, in the order in which they come.
class Answer {
  constructor(pictures) {
    this.pictures = pictures;   // the thumbnails of what it answers, of which it is not known how many tokens they are
    this.article = made("article", "agent busy", log);
    this.foot = made("p", "foot", this.article);
    this.said = "";
    this.calls = new Map();
  }
  last(tag, kind) {   // the part of that kind that stands last, or a new one
    const last = this.foot.previousElementSibling;
    if (last?.className === kind) return last;
    const part = made(tag, kind, this.article);
    this.foot.before(part);
    return part;
  }
  say(words) {
    this.said += words;
    const part = words && this.last("p", "text");
    if (part) part.textContent = (part.textContent + words).trimStart();
  }
  note(note) {
    if (note.trajectory) this.foot.textContent = note.trajectory;
    if (note.kind === "state") {
      this.article.querySelector(".now")?.classList.remove("now");
      const chip = made("span", "chip now", this.last("div", "path"), note.state);
      for (const role of ["line", "fill", "ink"]) chip.style.setProperty(`--${role}`, `var(--state-${note.state}-${role})`);
    } else if (note.kind === "call") {
      const card = made("details", "", this.last("div", "path")), line = made("summary", "", card);
      const words = typeof note.arguments === "string" ? note.arguments : JSON.stringify(note.arguments);
      made("code", "", line, note.name ? `${note.name} ${words}` : words);
      made("pre", "", card, typeof note.arguments === "string" ? words : JSON.stringify(note.arguments, null, 2));
      this.calls.set(note.id, { card, took: made("small", "", line, "…"), result: made("pre", "", card) });
    } else if (note.kind === "result") {
      const { card, took, result } = this.calls.get(note.id);
      const short = note.text.length > 40 ? `${note.text.slice(0, 40)}…` : note.text;
      took.textContent = note.failure ? `failed: ${note.failure}` : `${short} · ${note.seconds.toFixed(2)} s`;
      result.textContent = note.text;
      if (note.pictures.length) {
        const row = made("div", "pictures", card);
        note.pictures.forEach((url) => thumbnail(url, row));
        card.open = true;
      }
      card.classList.toggle("failed", Boolean(note.failure));
    } else if (note.kind === "pictures" && note.pictures.length >= this.pictures.length) {
      const last = note.pictures.slice(note.pictures.length - this.pictures.length);
      this.pictures.forEach((button, place) => {
        button.lastElementChild.textContent = `${last[place].width.toLocaleString("en")}×${last[place].height.toLocaleString("en")}, ${last[place].tokens} tokens`;
      });
      this.pictures = [];
    } else if (note.kind === "waits") this.foot.textContent += " · waits for you";
    else if (note.kind === "end") this.foot.textContent += ` · ended: ${note.stop_reason}`;
  }
  fail(words) { this.foot.before(made("p", "error", this.article, words)); }
  end() {
    this.article.classList.remove("busy");
    for (const { took } of this.calls.values()) if (took.textContent === "…") took.textContent = "not answered";
  }
}

// The data of server-sent events, one after the other.
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) if (piece.startsWith("data: ") && piece !== "data: [DONE]") yield JSON.parse(piece.slice(6));
  }
}

async function ask(words, pictures) {
  log.querySelector(".empty")?.remove();
  const own = made("article", "user", log);
  const row = pictures.length ? made("div", "pictures", own) : null;
  const thumbnails = pictures.map(({ url }) => thumbnail(url, row));
  if (words) made("p", "text", own, words);
  const parts = pictures.map(({ uri }) => ({ type: "image_url", image_url: { url: uri } }));
  const content = parts.length ? [...parts, ...(words ? [{ type: "text", text: words }] : [])] : words;
  const answer = new Answer(thumbnails), messages = [...history, { role: "user", content }];
  log.scrollTop = log.scrollHeight;
  call = new AbortController();
  shown();
  try {
    const body = JSON.stringify({ model: agent.value, messages, stream: true, notes: true });
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: call.signal });
    if (!response.ok) {
      at("keyed").hidden &&= response.status !== 401;
      throw new Error((await response.json()).error.message);
    }
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      scrolled(() => {
        if (event.note) answer.note(event.note);
        for (const choice of event.choices) {
          answer.say(choice.delta.content ?? "");
          if (choice.finish_reason === "length") answer.fail("The answer was cut at its limit.");
        }
      });
    }
    history = [...messages, { role: "assistant", content: answer.said }];
  } catch (error) {
    scrolled(() => answer.fail(error.name === "AbortError" ? "Stopped." : `${error.message}`));
    if (!text.value) text.value = words;   // to be sent again, or changed
    if (!kept.length) kept = pictures;
  }
  answer.end();
  call = null;
  shown();
}

function shown() {
  at("send").hidden = call !== null;
  at("stop").hidden = call === null;
  agent.disabled = history.length > 0 || call !== null;
  at("pick").hidden = !sees();
  showKept();
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
  text.focus();
}

async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  at("keyed").hidden &&= response.status !== 401;
  if (!response.ok) return;
  agent.replaceChildren(...(await response.json()).data.map((model) => {
    const option = new Option(model.id, model.id);
    option.dataset.sees = model.architecture.input_modalities.includes("image");
    return option;
  }));
  shown();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const words = text.value.trim(), pictures = sees() ? kept : [];
  if (!(words || pictures.length) || call) return;
  text.value = "";
  kept = [];
  ask(words, pictures);
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
text.addEventListener("input", shown);
agent.addEventListener("change", shown);
at("pick").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => {
  await keep(picturesIn(at("files")));
  at("files").value = "";
});
text.addEventListener("paste", (event) => {
  const pictures = picturesIn(event.clipboardData);
  if (!sees() || !pictures.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  keep(pictures);
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  if (sees()) keep(picturesIn(event.dataTransfer));
});
at("enlarged").addEventListener("click", () => at("enlarged").close());
key.addEventListener("change", models);
at("keyed").addEventListener("submit", (event) => event.preventDefault());
at("stop").addEventListener("click", () => call?.abort());
at("new").addEventListener("click", () => {
  call?.abort();
  history = [];
  log.replaceChildren();
  made("p", "empty", log, "A new conversation.");
  shown();
});
models().then(() => {
  shown();
  document.documentElement.dataset.ready = "1";
});
