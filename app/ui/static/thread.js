// The messages: copying, liking, and paging upward without a jump.

const said = element.querySelector("#tc-said");
let saidTimer = 0;
function say(words) {
  said.querySelector("span").textContent = words;
  said.hidden = false;
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => { said.hidden = true; }, 1600);
}

async function api(method, path, data) {
  const options = { method };
  if (data !== undefined) {
    options.body = data instanceof Blob ? data : JSON.stringify(data);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await fetch(path, options);
  const result = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(result?.error?.message ?? `The server answered ${answer.status}.`);
  return result;
}

async function toClipboard(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  // Without TLS the browser has no clipboard for pages, but still the command.
  const field = document.createElement("textarea");
  field.value = text;
  field.style.cssText = "position:fixed;opacity:0";
  body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

Object.assign(here, {
  async copy(target) {
    try {
      await toClipboard((await api("GET", `/api/messages/${encodeURIComponent(target.dataset.id)}`)).content);
      say("Copied");
    } catch (error) { say(error.message); }
  },
  async rate(target) {
    const on = target.getAttribute("aria-pressed") !== "true";
    const rating = on ? Number(target.dataset.rating) : null;
    try {
      await api("PUT", `/api/replies/${encodeURIComponent(target.dataset.id)}/rating`, { rating });
      ratings.set(target.dataset.id, rating);
      showRatings();
    } catch (error) { say(error.message); }
  },
});

// What was rated on this page: the thread may be drawn anew from what the server sent before.
const ratings = new Map();
function showRatings() {
  for (const [id, rating] of ratings) {
    for (const button of document.querySelectorAll(`#tc-chat [data-act="rate"][data-id="${CSS.escape(id)}"]`)) {
      const pressed = String(Number(button.dataset.rating) === rating);
      if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
    }
  }
}

const chat = document.querySelector("#tc-chat");
const scroller = () => chat.querySelector(".bubble-wrap");
let anchored = null;

// Keep what the reader looks at in its place while messages are put in above it.
function holdPlace() {
  const box = scroller();
  if (!box || !anchored) return;
  if (Date.now() > anchored.until) { anchored = null; return; }
  const top = box.scrollHeight - anchored.fromEnd;
  if (box.scrollHeight !== anchored.height && Math.abs(box.scrollTop - top) > 1) box.scrollTop = top;
}

function askEarlier() {
  const box = scroller();
  if (anchored || !box?.querySelector(".tc-earlier")) return;
  anchored = { fromEnd: box.scrollHeight - box.scrollTop, height: box.scrollHeight, until: Date.now() + 3000 };
  trigger("show_earlier", {});
}
here.show_earlier = askEarlier;

let drawn = 0;
new MutationObserver(() => {
  holdPlace();
  cancelAnimationFrame(drawn);
  drawn = requestAnimationFrame(() => { holdPlace(); showRatings(); });
}).observe(chat, { childList: true, subtree: true });
chat.addEventListener("wheel", (event) => {
  if (event.deltaY < 0 && scroller()?.scrollTop < 400) askEarlier();
}, { passive: true });
chat.addEventListener("touchmove", () => {
  if (scroller()?.scrollTop < 200) askEarlier();
}, { passive: true });
