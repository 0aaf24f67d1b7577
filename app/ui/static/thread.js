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
  edit(target) {
    // Gradio's own edit button stands, unseen, between the message and its footer.
    const buttons = target.closest(".message-row").previousElementSibling;
    buttons?.querySelector('[aria-label="Edit"]')?.click();
    setTimeout(() => {
      const field = document.querySelector("#tc-chat textarea.edit-textarea");
      if (!field) return;
      field.ariaLabel = "Your message";
      field.focus();
    }, 50);
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

const MARKS = '[data-act="copy"][data-id]';
const scroller = () => document.querySelector("#tc-chat .bubble-wrap");
const WAIT_MS = 10000;
const HOLD_MS = 700;
let anchor = null;

// What the reader looks at: the first footer in sight, by its message's id, and how far down it is. Gradio uses
// its elements for other messages when some are put in above them, so the element itself would not do.
function sight(box) {
  const edge = box.getBoundingClientRect().top;
  for (const mark of box.querySelectorAll(MARKS)) {
    const top = mark.getBoundingClientRect().top - edge;
    if (top > 0) return { id: mark.dataset.id, top };
  }
  return null;
}

// Keep it in its place while messages are put in above it, and take up the room that they need.
function holdPlace() {
  const box = scroller();
  if (!box || !anchor) return;
  const mark = box.querySelector(`[data-act="copy"][data-id="${CSS.escape(anchor.id)}"]`);
  if (mark) box.scrollTop += mark.getBoundingClientRect().top - box.getBoundingClientRect().top - anchor.top;
  const count = box.querySelectorAll(MARKS).length;
  if (count !== anchor.count) Object.assign(anchor, { count, until: Date.now() + HOLD_MS });
  if (Date.now() < anchor.until) requestAnimationFrame(holdPlace);
  else anchor = null;
}

function askEarlier() {
  const box = scroller();
  if (anchor || !box?.querySelector(".tc-earlier")) return;
  anchor = sight(box);
  if (!anchor) return;
  Object.assign(anchor, { count: box.querySelectorAll(MARKS).length, until: Date.now() + WAIT_MS });
  trigger("show_earlier", {});
  holdPlace();
}
here.show_earlier = askEarlier;

// What was just sent or opened is seen from its end, until the reader scrolls.
let endUntil = 0;
function toEnd() {
  if (Date.now() > endUntil) return;
  const box = scroller();
  if (box) box.scrollTop = box.scrollHeight;
  requestAnimationFrame(toEnd);
}
function showEnd() {
  const running = Date.now() <= endUntil;
  endUntil = Date.now() + 2500;
  if (!running) toEnd();
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && event.target === composer()) showEnd();
}, true);
document.addEventListener("click", (event) => {
  if (event.target.closest?.('#tc-composer .submit-button, [data-act="open_chat"]')) showEnd();
}, true);

function nearTop() {
  if (scroller()?.scrollTop < 400) askEarlier();
}

let drawn = 0;
whenThere("#tc-chat", (chat) => {
  new MutationObserver(() => {
    cancelAnimationFrame(drawn);
    drawn = requestAnimationFrame(showRatings);
  }).observe(chat, { childList: true, subtree: true });
  for (const move of ["wheel", "touchmove", "pointerdown", "keydown"]) {  // pointerdown: taking the scroll bar
    chat.addEventListener(move, () => { endUntil = 0; }, { passive: true, capture: true });
  }
  // The reader's own moves only: the page scrolls by itself too, and must not page upward by that.
  chat.addEventListener("wheel", (event) => {
    if (event.deltaY < 0) nearTop();
    else anchor = null;
  }, { passive: true });
  chat.addEventListener("touchmove", nearTop, { passive: true });
  chat.addEventListener("keydown", (event) => {
    if (["PageUp", "Home", "ArrowUp"].includes(event.key)) nearTop();
  });
});
