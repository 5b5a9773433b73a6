"use strict";
/* Draws tokens, pictures and tables from the page's own data. It reads that data as text, never as markup or code. */
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  /* -- hover ------------------------------------------------------------------------------------------------- */
  const showTip = (text, x, y) => {
    tip.hidden = false;
    tip.textContent = text;
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
  };
  document.addEventListener("pointermove", (event) => {
    const at = event.target;
    if (at.dataset && at.dataset.k !== undefined) showTip(aboutToken(+at.dataset.s, +at.dataset.k), event.clientX, event.clientY);
    else if (at.dataset && at.dataset.tip) showTip(at.dataset.tip, event.clientX, event.clientY);
    else if (at.tagName !== "CANVAS") tip.hidden = true;
  });
  /* What is on the page from its beginning, or came to it later. */
  const begun = new WeakSet();
  const fresh = (css) => [...document.querySelectorAll(css)].filter((element) => !begun.has(element) && begun.add(element));
  const foldLong = () => {
    for (const block of fresh("pre.fold")) {
      if (block.scrollHeight > 170) {
        block.classList.add("long");
        block.title = "click to unfold";
        block.addEventListener("click", () => block.classList.toggle("long"));
      }
    }
  };
  foldLong();

  /* -- pictures: the bytes of each once, in the data, however often it is shown ---------------------------------- */
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;
  const urls = new Map();
  const urlOf = (hash) => {
    const picture = (data.pictures || {})[hash];
    if (picture && !urls.has(hash)) urls.set(hash, URL.createObjectURL(new Blob([bytes(picture.data)], { type: picture.mime })));
    return urls.get(hash);
  };
  const hang = (button) => {
    const url = urlOf(button.dataset.picture);
    if (url) button.querySelector("img").src = url;
    else button.classList.add("absent");
  };
  const hangPictures = () => fresh("button.picture").forEach(hang);
  hangPictures();
  const enlarge = (button) => {
    let dialog = document.getElementById("enlarged");
    if (!dialog) {
      dialog = make("dialog");
      dialog.id = "enlarged";
      dialog.append(make("img"), make("p"));
      dialog.addEventListener("click", () => dialog.close());
      document.body.append(dialog);
    }
    const [large, caption] = dialog.children, small = button.querySelector("img");
    const times = Math.max(1, Math.floor(400 / Math.max(small.naturalWidth, small.naturalHeight, 1)));
    large.src = small.src;
    large.alt = dialog.ariaLabel = `picture ${button.textContent}`;
    large.style.width = small.naturalWidth * times + "px";
    large.style.imageRendering = times > 1 ? "pixelated" : "";  // each of its pixels can be seen
    caption.textContent = `${button.textContent} · sha256 ${button.dataset.picture.slice(0, 12)}${times > 1 ? ` · ${times} times as large` : ""}`;
    tip.hidden = true;
    dialog.showModal();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.picture:not(.absent)");
    if (button) enlarge(button);
  });

  /* -- tokens ------------------------------------------------------------------------------------------------ */
  const decoded = () => (data.streams || []).map((stream) => ({
    ...stream,
    ids: new Int32Array(bytes(stream.ids)),
    logprobs: new Float32Array(bytes(stream.logprobs)),
    vocabulary: data.vocabularies[stream.engine],
    markers: new Set(data.markers[stream.engine] || []),
    guarded: new Set(stream.guarded),
  }));
  let streams = decoded();
  const PROMPT = 190;  // pixels of a long prompt: its end, which is what was asked
  const HEAT = [0.05, 0.2, 0.5, 1, 1.7, 2.6, 4, 6];
  const BLOCK = 500, HEAD = 400, TAIL = 100;

  const spanAt = (stream, at) => {
    let low = 0, high = stream.spans.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (stream.spans[middle][1] <= at) low = middle + 1; else high = middle;
    }
    return stream.spans[low];
  };
  /* Where a picture's tokens are, one thumbnail stands. It counts as one token where much is folded, and is never cut. */
  const after = (stream, at, count) => {
    for (const [start, length] of stream.media) {
      if (start < at) continue;
      if (start - at >= count) break;
      count -= start - at + 1;
      at = start + length;
    }
    return at + count;
  };
  const shownIn = (stream, start, end) =>
    stream.media.reduce((count, [at, length]) => count - (at >= start && at < end ? length - 1 : 0), end - start);
  const mediaAt = (stream, at) => stream.media.find(([start, length]) => at >= start && at < start + length);
  const isTrained = (stream, span) => stream.trained && span[2] === "model";
  const textOf = (stream, at) => {
    if (!stream.vocabulary) return String(stream.ids[at]);
    const spread = stream.spread[at];
    return spread !== undefined ? spread : stream.vocabulary[stream.ids[at]];
  };
  const aboutToken = (number, at) => {
    const stream = streams[number], [, , owner, state, turn, version] = spanAt(stream, at);
    const logprob = stream.logprobs[at], seen = mediaAt(stream, at);
    const lines = [seen
      ? `picture ${seen[3]}   positions ${seen[0]} to ${seen[0] + seen[1] - 1}`
      : `${JSON.stringify(textOf(stream, at))}   id ${stream.ids[at]}, position ${at}`];
    if (owner === "model") lines.push(`log p ${logprob.toPrecision(4)}, p ${Math.exp(logprob).toPrecision(3)}, weights ${version}`);
    lines.push(`${state}, generation ${turn}, ${isTrained(stream, spanAt(stream, at)) ? "trained" : owner === "model" ? "sampled, not trained" : owner + ", not trained"}`);
    if (stream.guarded.has(at)) lines.push("spells a control marker, and was kept from being one");
    return lines.join("\n");
  };
  const token = (number, at, span) => {
    const stream = streams[number], element = make("i");
    const names = [];
    if (isTrained(stream, span)) names.push("t");
    if (span[2] === "model") {
      const surprise = -stream.logprobs[at];
      let level = 0;
      while (level < HEAT.length && surprise > HEAT[level]) level++;
      if (level) names.push("p" + level);
    }
    if (stream.markers.has(stream.ids[at])) names.push("m");
    if (stream.guarded.has(at)) names.push("g");
    if (!stream.vocabulary) names.push("id");
    if (stream.spread[at] === "⋯") names.push("c");  // only goes on with the character before it
    if (names.length) element.className = names.join(" ");
    element.dataset.s = number;
    element.dataset.k = at;
    element.textContent = stream.spread[at] === "⋯" ? "" : textOf(stream, at);
    return element;
  };
  const thumbnail = (number, [start, , hash, words]) => {
    const button = make("button", "picture"), image = make("img");
    button.type = "button";
    Object.assign(button.dataset, { picture: hash, s: number, k: start });
    image.alt = "picture";
    button.append(image, make("small", "", words));
    hang(button);
    return button;
  };
  const fill = (into, number, start, end) => {
    const stream = streams[number], parts = document.createDocumentFragment();
    for (let at = start, span; at < end; at++) {
      if (!span || at >= span[1]) span = spanAt(stream, at);
      const seen = stream.media.length && mediaAt(stream, at);
      if (seen) {
        parts.append(thumbnail(number, seen));
        at = seen[0] + seen[1] - 1;
      } else parts.append(token(number, at, span));
    }
    into.append(parts);
  };
  /* What is far away is drawn when it comes near. */
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting || target.dataset.drawn) continue;
      target.dataset.drawn = "1";
      near.unobserve(target);
      target.classList.remove("empty");
      if (target.classList.contains("block")) fill(target, +target.dataset.stream, +target.dataset.start, +target.dataset.end);
      else {
        open(target);
        if (target.closest(".card.prompt") && target.scrollHeight > 1.4 * PROMPT) fold(target);
      }
    }
  }, { rootMargin: "900px" });
  /* A prompt repeats what every trajectory of its agent is told: only its end is shown. */
  const fold = (ribbon) => {
    const more = make("button", "more", `… the whole prompt, ${(ribbon.dataset.end - ribbon.dataset.start).toLocaleString("en")} tokens …`);
    more.addEventListener("click", () => unfold(ribbon));
    ribbon.before(more);
    ribbon.classList.add("folded");
    ribbon.style.maxHeight = PROMPT + "px";
    ribbon.scrollTop = ribbon.scrollHeight;
  };
  const unfold = (ribbon) => {
    if (!ribbon.classList.contains("folded")) return;
    ribbon.classList.remove("folded");
    ribbon.style.maxHeight = "";
    ribbon.previousElementSibling.remove();
  };
  const blocks = (before, number, start, end) => {
    for (let at = start, next; at < end; at = next) {
      const block = make("span", "block empty");
      next = Math.min(end, after(streams[number], at, BLOCK));
      Object.assign(block.dataset, { stream: number, start: at, end: next });
      before.before(block);
      near.observe(block);
    }
  };
  /* Where the first and the last part of much begin to be left out: nowhere, if all is shown. */
  const ends = (number, start, end) => {
    const stream = streams[number], count = shownIn(stream, start, end);
    return count <= HEAD + TAIL + BLOCK / 2 ? [end, end] : [after(stream, start, HEAD), after(stream, start, count - TAIL)];
  };
  const open = (ribbon, whole) => {
    const number = +ribbon.dataset.stream, start = +ribbon.dataset.start, end = +ribbon.dataset.end;
    ribbon.dataset.drawn = "1";
    near.unobserve(ribbon);
    ribbon.replaceChildren();
    const [head, tail] = ends(number, start, end);
    if (head === end) return fill(ribbon, number, start, end);
    if (whole) {
      const last = make("span");
      ribbon.append(last);
      blocks(last, number, start, end);
      return last.remove();
    }
    fill(ribbon, number, start, head);
    const more = make("button", "more", `… ${(tail - head).toLocaleString("en")} more tokens …`);
    more.addEventListener("click", () => open(ribbon, true));
    ribbon.append("\n", more, "\n");
    fill(ribbon, number, tail, end);
  };
  const watchRibbons = () => {
    for (const ribbon of fresh(".ribbon[data-stream]")) {
      if (+ribbon.dataset.end > +ribbon.dataset.start) {
        ribbon.classList.add("empty");
        near.observe(ribbon);
      }
    }
  };
  watchRibbons();
  const reveal = (number, at) => {
    const ribbon = [...document.querySelectorAll(".ribbon[data-stream]")].find((r) => +r.dataset.stream === number && at >= +r.dataset.start && at < +r.dataset.end);
    if (!ribbon) return;
    ribbon.classList.remove("empty");
    unfold(ribbon);
    const start = +ribbon.dataset.start, end = +ribbon.dataset.end;
    const [head, tail] = ends(number, start, end), folded = at >= head && at < tail;
    if (folded || !ribbon.dataset.drawn) open(ribbon, folded);
    const block = [...ribbon.querySelectorAll(".block")].find((b) => at >= +b.dataset.start && at < +b.dataset.end);
    if (block && !block.dataset.drawn) {
      block.dataset.drawn = "1";
      block.classList.remove("empty");
      fill(block, number, +block.dataset.start, +block.dataset.end);
    }
    const seen = mediaAt(streams[number], at), found = ribbon.querySelector(`[data-k="${seen ? seen[0] : at}"]`);
    for (const hit of document.querySelectorAll(".hit")) hit.classList.remove("hit");
    if (found) {
      found.classList.add("hit");
      found.scrollIntoView({ block: "center" });
    }
  };

  const linked = () => {
    const place = /^#token-(\d+)-(\d+)$/.exec(location.hash);
    if (place) reveal(+place[1], +place[2]);
  };
  addEventListener("hashchange", linked);
  linked();

  /* -- the strip --------------------------------------------------------------------------------------------- */
  const probe = make("span");
  document.body.append(probe);
  const colourOf = (name) => {
    probe.className = name;
    const style = getComputedStyle(probe);
    return style.getPropertyValue("--line").trim() || style.color;
  };
  const identifier = /^[A-Za-z_][A-Za-z0-9_]*$/;
  const draw = (figure) => {
    const canvas = figure.querySelector("canvas"), number = +figure.dataset.stream, stream = streams[number];
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, count = stream.ids.length;
    canvas.width = width * ratio;
    canvas.height = 92 * ratio;
    const pen = canvas.getContext("2d"), page = getComputedStyle(document.body);
    const ink = page.getPropertyValue("--page-ink"), accent = page.getPropertyValue("--accent"), pale = page.getPropertyValue("--pale-fill");
    const bad = page.getPropertyValue("--bad");
    pen.scale(ratio, ratio);
    if (!count || !width) return;
    const x = (at) => (at / count) * width;
    pen.fillStyle = pale;
    pen.fillRect(0, 18, width, 10);
    pen.fillRect(0, 32, width, 46);
    let versions = [...new Set(stream.spans.map((span) => span[5]).filter((version) => version >= 0))];
    for (const span of stream.spans) {
      const left = x(span[0]), size = Math.max(0.75, x(span[1]) - left);
      pen.fillStyle = colourOf(identifier.test(span[3]) ? "n-" + span[3] : "n-other");
      pen.globalAlpha = span[2] === "prompt" ? 0.4 : 1;
      pen.fillRect(left, 0, size, 14);
      pen.globalAlpha = 1;
      if (isTrained(stream, span)) {
        pen.fillStyle = accent;
        pen.fillRect(left, 18, size, 10);
      }
      if (span[5] >= 0) {
        pen.fillStyle = ink;
        pen.globalAlpha = 0.25 + 0.6 * (versions.length < 2 ? 0 : versions.indexOf(span[5]) / (versions.length - 1));
        pen.fillRect(left, 81, size, 7);
        pen.globalAlpha = 1;
      }
    }
    const tall = new Float32Array(Math.ceil(width) + 1);  /* the highest of a pixel's tokens */
    for (let at = 0; at < count; at++) {
      const column = Math.floor(x(at));
      if (-stream.logprobs[at] > tall[column]) tall[column] = -stream.logprobs[at];
    }
    pen.fillStyle = bad;
    const step = Math.max(1, width / count);
    for (let column = 0; column < tall.length; column++) {
      const height = Math.min(1, tall[column] / 8) * 44;
      if (height > 0.3) pen.fillRect(column, 78 - height, step - (step > 3 ? 1 : 0), height);
    }
  };
  const drawAll = () => document.querySelectorAll(".strip").forEach(draw);
  /* At once for what has a size; a notebook's frame that is far from being seen gets one later. */
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(target.closest(".strip"))));
  const beginStrips = () => {
    for (const figure of fresh(".strip")) {
      const canvas = figure.querySelector("canvas"), number = +figure.dataset.stream;
      const at = (event) => {
        const box = canvas.getBoundingClientRect(), count = streams[number].ids.length;
        return Math.max(0, Math.min(count - 1, Math.floor(((event.clientX - box.left) / box.width) * count)));
      };
      canvas.addEventListener("pointermove", (event) => streams[number].ids.length && showTip(aboutToken(number, at(event)), event.clientX, event.clientY));
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      canvas.addEventListener("click", (event) => reveal(number, at(event)));
      resized.observe(canvas);
    }
  };
  beginStrips();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("renewed", () => {  // a server has sent what has changed
    data = JSON.parse(document.getElementById("data").textContent);
    streams = decoded();
    foldLong();
    hangPictures();
    watchRibbons();
    beginStrips();
    drawAll();
  });

  /* -- the report's table ------------------------------------------------------------------------------------ */
  const table = document.getElementById("trajectories");
  if (table && data.rows) {
    const body = table.tBodies[0], heads = [...table.tHead.querySelectorAll("th")], SHOWN = 200;
    const search = document.getElementById("search"), reason = document.getElementById("reason"), agent = document.getElementById("agent");
    const state = { column: -1, down: false, shown: SHOWN };
    /* Where one number of a column has digits behind the point, all have, so that the points stand below each other. */
    const behind = data.columns.map((column, index) => data.rows.some((row) => !Number.isInteger(row[index] ?? 0)) ? column.digits : 0);
    const cell = (row, index) => {
      const column = data.columns[index], value = row[index], td = make("td", column.number ? "num" : "");
      if (index === 0) {
        const page = row[row.length - 1];
        if (page) {
          const link = make("a");
          link.href = page;
          link.append(make("bdi", "", value));
          td.append(link);
        } else {
          const link = make("button", "command", "");
          link.append(make("bdi", "", value));
          link.dataset.row = data.rows.indexOf(row);
          link.dataset.tip = data.no_page;
          td.append(link);
        }
      } else if (value === null) td.textContent = "–";
      else if (column.number) td.textContent = (+value).toLocaleString("en", { minimumFractionDigits: behind[index], maximumFractionDigits: behind[index] });
      else td.append(make("bdi", "", value));
      return td;
    };
    const refresh = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let rows = data.rows.filter((row) =>
        (!reason.value || row[data.reason] === reason.value) && (!agent.value || row[data.agent] === agent.value) &&
        words.every((word) => row.slice(0, data.columns.length).some((value) => String(value).toLowerCase().includes(word))));
      if (state.column >= 0) {
        const sign = state.down ? -1 : 1, index = state.column;
        rows = rows.slice().sort((a, b) => {
          if (a[index] === null || b[index] === null) return (a[index] === null) - (b[index] === null);
          return sign * (typeof a[index] === "number" ? a[index] - b[index] : String(a[index]).localeCompare(String(b[index]), "en", { numeric: true }));
        });
      }
      body.replaceChildren(...rows.slice(0, state.shown).map((row) => {
        const tr = make("tr");
        tr.append(...data.columns.map((_, index) => cell(row, index)));
        return tr;
      }));
      document.getElementById("count").textContent = `${rows.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")}`;
      document.getElementById("more").hidden = rows.length <= state.shown;
      heads.forEach((head, index) => head.setAttribute("aria-sort", index !== state.column ? "none" : state.down ? "descending" : "ascending"));
    };
    heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
      state.down = state.column === index ? !state.down : data.columns[index].number === true;
      state.column = index;
      refresh();
    }));
    for (const control of [search, reason, agent]) control.addEventListener("input", () => { state.shown = SHOWN; refresh(); });
    document.getElementById("more").addEventListener("click", () => { state.shown += 5 * SHOWN; refresh(); });
    for (const link of document.querySelectorAll("[data-filter]")) link.addEventListener("click", () => {
      reason.value = link.dataset.filter;
      state.shown = SHOWN;
      refresh();
      document.getElementById("list").scrollIntoView();
    });
    const command = document.getElementById("command");
    document.addEventListener("click", (event) => {
      const link = event.target.closest("button.command");
      if (!link) return;
      const row = data.rows[+link.dataset.row], id = row[row.length - 2];
      command.textContent = data.command.replace("TRAJECTORY", () => "'" + id.replaceAll("'", "'\\''") + "'");
      command.parentElement.hidden = false;
      command.parentElement.scrollIntoView({ block: "nearest" });
    });
    const columns = JSON.stringify(data.columns);
    document.addEventListener("renewed", () => JSON.stringify(data.columns) === columns ? refresh() : location.reload());
    refresh();
  }
  document.documentElement.dataset.ready = "1";
})();
