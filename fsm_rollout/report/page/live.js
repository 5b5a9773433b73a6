"use strict";
/* Keeps a page that a server makes as things are now: asks for it again, and changes what has changed. It runs before
   the page's own script, and knows the page as it was sent; what that script or a reader changed in it stays. */
(() => {
  const EVERY = 1000, SOON = 250, AGAIN = 3000;  // milliseconds
  const main = document.querySelector("main"), info = document.getElementById("data");
  const shown = new WeakMap();  // from the nodes of `sent` to those on the page
  const pair = (a, b) => {
    shown.set(a, b);
    a.childNodes.forEach((child, index) => pair(child, b.childNodes[index]));
    return a;
  };
  const sent = pair(main.cloneNode(true), main);

  /* -- changing what has changed ------------------------------------------------------------------------------- */
  const keyed = (nodes) => {
    const times = {}, found = new Map();
    for (const node of nodes) {
      const name = (node.dataset && node.dataset.key) || node.id || node.nodeName;
      times[name] = (times[name] || 0) + 1;
      found.set(`${name} ${times[name]}`, node);
    }
    return found;
  };
  const change = (old, now) => {
    const live = shown.get(old);
    if (old.nodeType !== Node.ELEMENT_NODE) {
      old.data = live.data = now.data;
      return;
    }
    for (const { name } of [...old.attributes]) if (!now.hasAttribute(name)) for (const of of [old, live]) of.removeAttribute(name);
    for (const { name, value } of now.attributes) {
      if (old.getAttribute(name) !== value) for (const of of [old, live]) of.setAttribute(name, value);
    }
    const before = keyed(old.childNodes);
    let last = null;
    for (const [key, node] of keyed(now.childNodes)) {
      let here = before.get(key);
      before.delete(key);
      if (here && here.nodeName !== node.nodeName) {
        here.remove();
        shown.get(here).remove();
        here = undefined;
      }
      if (!here) here = pair(node.cloneNode(true), document.importNode(node, true));
      else if (!here.isEqualNode(node)) change(here, node);
      if ((last ? last.nextSibling : old.firstChild) !== here) {
        old.insertBefore(here, last ? last.nextSibling : old.firstChild);
        live.insertBefore(shown.get(here), last ? shown.get(last).nextSibling : live.firstChild);
      }
      last = here;
    }
    for (const gone of before.values()) {
      shown.get(gone).remove();
      gone.remove();
    }
  };

  /* -- asking --------------------------------------------------------------------------------------------------- */
  let version = JSON.parse(info.textContent).version, waiting, asking;
  const ask = async () => {
    clearTimeout(waiting);
    if (asking) asking.abort();
    const mine = asking = new AbortController();
    let wait = EVERY;
    try {
      if (!document.hidden) {
        const answer = await fetch(location.href, { headers: { "If-None-Match": `"${version}"` }, cache: "no-store", signal: mine.signal });
        if (answer.status === 200) {
          const next = new DOMParser().parseFromString(await answer.text(), "text/html");
          if (mine !== asking) return;
          info.textContent = next.getElementById("data").textContent;
          version = JSON.parse(info.textContent).version;
          document.title = next.title;
          const style = document.querySelector("style"), colours = next.querySelector("style").textContent;
          if (style.textContent !== colours) style.textContent = colours;
          change(sent, next.querySelector("main"));
          document.dispatchEvent(new Event("renewed"));
        } else if (answer.status >= 400) wait = AGAIN;
      }
      delete document.body.dataset.lost;
    } catch (error) {
      if (mine !== asking) return;
      document.body.dataset.lost = "1";
      wait = AGAIN;
    }
    if (JSON.parse(info.textContent).soon) wait = SOON;
    waiting = setTimeout(ask, wait);
  };
  document.addEventListener("visibilitychange", ask);
  /* A form of filters applies itself. */
  document.addEventListener("input", (event) => {
    const form = event.target.closest("form.filters");
    if (!form) return;
    const chosen = [...new FormData(form)].filter(([, value]) => value !== "");
    history.replaceState(null, "", `?${new URLSearchParams(chosen)}`);
    clearTimeout(waiting);
    waiting = setTimeout(ask, 200);
  });
  waiting = setTimeout(ask, JSON.parse(info.textContent).soon ? SOON : EVERY);
})();
