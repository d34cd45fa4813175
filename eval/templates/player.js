// The player: episodes step by step, side by side. Data comes as JSON from the page or from the server (play.js), and is
// only ever written as text: nothing here builds HTML from a string.
"use strict";
const Player = (() => {
  const root = document.getElementById("player");
  if (!root) return null;
  const data = JSON.parse(document.getElementById("player-data").textContent);
  const alone = document.body.classList.contains("alone");
  const MARKS = { success: "✓", failure: "✗", broken: "!" };
  const SHOWN_COMMANDS = 6;
  const now = { task: 0, t: 0, active: 0, shown: 0, playing: 0, lanes: [] };  // a lane: { name, view, live }
  const filters = { outcome: "", family: "", type: "", emission: "" };
  const hooks = {};  // filled by play.js
  const opened = new Set();  // names of the parts that the reader has opened

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
    return node;
  }
  const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);
  const hook = (name, ...given) => (hooks[name] ? hooks[name](...given) : null);
  const number = (value, digits = 3) => (typeof value === "number" ? String(Number(value.toPrecision(digits))) : "–");
  const percent = (p) => `${(100 * p).toFixed(p < 0.0995 ? 1 : 0)} %`;

  // a part that opens and stays open at other steps
  function part(name, title, ...content) {
    const node = el("details", { class: "part", open: opened.has(name) }, el("summary", {}, title), ...content);
    node.addEventListener("toggle", () => (node.open ? opened.add(name) : opened.delete(name)));
    return node;
  }
  const block = (title, ...content) => el("section", { class: "block" }, el("h4", {}, title), ...content);

  // which tasks and episodes -------------------------------------------------------------------------------------------

  const tasks = () => (data.live ? hook("tasks") || [] : data.tasks);
  const lengthOf = (lane) => (lane.view ? lane.view.steps.length : 0);
  const last = () => Math.max(0, ...now.lanes.map(lengthOf).map((n) => n - 1));
  const episodeOf = (name) => (tasks()[now.task]?.episodes || []).find((view) => view.delivery === name) || null;

  function matches(entry) {
    const shown = now.lanes.map((lane) => lane.name).filter(Boolean);
    const played = entry.episodes.filter((view) => !shown.length || shown.includes(view.delivery));
    const outcomes = new Set(played.map((view) => view.outcome === "success"));
    const wanted = (view) => (!filters.outcome || filters.outcome === "disagree" || view.outcome === filters.outcome)
      && (!filters.emission || (filters.emission === "parse_error" ? view.parse_errors > 0 : view.kinds.includes(filters.emission)));
    return (!filters.family || entry.task.family === filters.family) && (!filters.type || entry.task.kind === filters.type)
      && (filters.outcome !== "disagree" || outcomes.size > 1) && (played.some(wanted) || !played.length);
  }

  function choose(task) {
    now.task = task;
    now.t = 0;
    stop();
    if (data.live) return hook("choose", task);
    for (const lane of now.lanes) lane.view = episodeOf(lane.name);
    render();
  }

  // parts of a step ----------------------------------------------------------------------------------------------------

  function seen(step) {
    const image = step.picture && el("img", {
      src: `data:image/png;base64,${step.picture.data}`, width: step.picture.width, height: step.picture.height,
      alt: `what the agent sees at step ${step.t}`,
    });
    return block("View", el("div", { class: "seen" }, image,
      el("p", { class: `data observation${step.seen_before ? " known" : ""}` }, step.observation || "(no text)")));
  }

  function memory(lane, step, index) {
    const { view } = lane;
    if (!step.recalled.length && !view.memory_text) return block("Memory", el("p", { class: "soft" }, "none is recalled"));
    const entries = step.recalled.map((id) => {
      const isCited = step.cited.includes(id);
      const text = view.memory[id];
      const own = hook("entry", lane, step, id, text);
      return el("div", { class: `entry${isCited ? " cited" : ""}` },
        el("p", { class: "tags" }, isCited && el("b", { class: "mark" }, "cited"), step.fresh.includes(id) && el("span", {}, "new"),
          el("span", { class: "id data" }, id)),
        own || (text !== undefined && el("pre", { class: "data" }, text)));
    });
    const cited = step.recalled.filter((id) => step.cited.includes(id)).map((id) => view.memory[id]);
    const title = `${step.recalled.length} ${step.recalled.length === 1 ? "entry" : "entries"}${step.fresh.length ? `, ${step.fresh.length} new` : ""}`;
    return block("Memory",
      cited.length > 0 && !opened.has(`memory${index}`) && el("pre", { class: "data quoted" }, cited.join("\n\n")),
      part(`memory${index}`, title, ...entries, view.memory_text && el("pre", { class: "data" }, view.memory_text)));
  }

  function state(step) {
    if (!step.state.length) return null;
    const lines = step.state.map(([label, pieces]) => {
      const shown = pieces.flatMap(([change, text], i) => {
        const tag = { added: "ins", removed: "del" }[change] || "span";
        const next = pieces[i + 1];
        return [el(tag, {}, text), next ? (change === "removed" && next[0] === "added" ? " " : " ; ") : null];
      });
      return el("div", { class: "line" }, el("span", { class: "name data" }, label), el("span", { class: "data" }, shown));
    });
    return block(step.changed ? "Brief State" : "Brief State, unchanged", el("div", { class: `state${step.changed ? "" : " still"}` }, lines));
  }

  function emission(lane, step) {
    const tools = hook("emission", lane, step);
    if (!step.kind && !step.emission && !tools) return null;
    const kind = step.kind && el("span", { class: `kind ${data.kinds.includes(step.kind) ? step.kind : ""}` }, step.kind);
    return block("Emission", el("p", { class: "tags" }, kind, step.by?.includes("compiler") && el("b", { class: "mark" }, "yours"),
      step.gate !== null && el("span", {}, `gate ${number(step.gate, 2)}`),
      step.confidence !== null && el("span", {}, `confidence without compiling ${number(step.confidence, 2)}`)),
      (step.kind || step.emission) && el("pre", { class: "emission data" }, step.emission || "(empty)"),
      step.parse_error && el("p", { class: "bad data" }, `parse error: ${step.parse_error}`),
      step.op_errors.map((error) => el("p", { class: "bad data" }, error)), tools);
  }

  function soft(step) {
    if (!step.soft) return null;
    const facts = Object.entries(step.soft).filter(([name]) => name !== "tokens");
    const rows = (step.soft_tokens || []).map((token, i) => el("tr", {}, el("th", {}, String(i + 1)), el("td", {}, number(token.norm)),
      el("td", {}, number(token.sigma)),
      el("td", { class: "data" }, token.words.map(([word, likeness]) => `${JSON.stringify(word)} ${number(likeness, 2)}`).join(", "))));
    return block(step.soft_read ? "Soft tokens" : "Soft tokens, not read by the executor",
      el("p", { class: "stats" }, facts.map(([name, value]) => el("span", { class: "data" }, `${name.replaceAll("_", " ")} `, el("b", {}, number(value, 4))))),
      rows.length > 0 && el("table", { class: "tokens" }, el("thead", {}, el("tr", {}, ["token", "norm", "sigma", "nearest words (cosine)"].map((head) => el("th", {}, head)))),
        el("tbody", {}, rows)));
  }

  const bar = (p, kind) => el("meter", { class: `prob ${kind}`, min: "0", max: "1", value: String(p) });

  // The commands of a step, likeliest first.
  function ranked(step) {
    const listed = (step.commands || []).map((name, i) => ({ name, p: step.probabilities?.given[i], bare: step.probabilities?.bare?.[i] }));
    return step.probabilities ? listed.sort((a, b) => b.p - a.p) : listed;
  }

  function commands(lane, step, index) {
    const all = ranked(step);
    const row = (command, i) => {
      const chosen = command.name === step.action;
      const inside = [el("span", { class: "data" }, chosen ? "→ " : "", command.name)];
      if (step.probabilities) {
        inside.push(el("span", { class: "pair" }, bar(command.p, "given"), el("b", {}, percent(command.p))));
        if (command.bare !== undefined) inside.push(el("span", { class: "pair bare" }, bar(command.bare, "bare"), percent(command.bare)));
      }
      return hook("command", lane, step, command, i, inside, chosen) || el("li", { class: chosen ? "chosen" : "" }, inside);
    };
    const first = step.probabilities || hooks.command ? SHOWN_COMMANDS : 0;
    const likely = all.slice(0, first);
    const at = all.findIndex((command) => command.name === step.action);
    if (first && at >= first) likely.push(all[at]);
    const rest = all.filter((command) => !likely.includes(command));
    const legend = step.probabilities && el("p", { class: "legend" }, el("span", { class: "given" }, "■ as delivered"),
      step.probabilities.bare ? el("span", { class: "bare" }, "■ without guidance") : "no guidance was delivered");
    if (!all.length && !hooks.command) return null;
    return block("Commands", legend, likely.length > 0 && el("ul", { class: "commands" }, likely.map(row)),
      rest.length > 0 && part(`commands${index}`, first ? `${rest.length} more` : `${rest.length} possible`, el("ul", { class: "commands" }, rest.map(row))), hook("ownCommand", lane, step));
  }

  function answer(lane, step) {
    const cost = ["compiler", "executor", "environment"].filter((role) => step.seconds[role]).map((role) => {
      const read = step.tokens[`${role}_in`];
      return `${role} ${Math.round(1000 * step.seconds[role])} ms${read ? `, ${read} + ${step.tokens[`${role}_out`] || 0} tokens` : ""}`;
    });
    const waits = lane.live && !lane.live.over && step.t === lengthOf(lane) - 1;
    return el("section", { class: "block answer" },
      el("p", { class: "action" }, el("b", { class: "data" }, step.action || "(no action)"),
        step.grounding && el("span", { class: `ground ${["failed", "fuzzy"].includes(step.grounding) ? step.grounding : ""}` }, step.grounding),
        step.by?.includes("executor") && el("b", { class: "mark" }, "yours"), waits && el("span", { class: "soft" }, "not taken yet")),
      step.wrote && el("p", { class: "wrote data" }, `wrote: ${step.wrote}`),
      step.feedback && el("p", { class: "feedback data" }, step.feedback),
      cost.length > 0 && el("p", { class: "cost" }, cost.join(" · ")));
  }

  // lanes --------------------------------------------------------------------------------------------------------------

  function outcomeOf(lane) {
    if (lane.live && !lane.live.over) return el("span", { class: "outcome" }, "playing");
    return el("span", { class: `outcome ${lane.view.outcome}` }, `${MARKS[lane.view.outcome]} ${lane.view.outcome}`);
  }

  function deliverySelect(lane, index) {
    const options = hook("options") || (data.deliveries || tasks()[now.task].episodes.map((view) => ({ name: view.delivery, label: view.label })));
    return el("select", {
      "aria-label": `delivery of column ${index + 1}`,
      onchange: (event) => {
        lane.name = event.target.value;
        if (data.live) return hook("lane", lane);
        lane.view = episodeOf(lane.name);
        render();
      },
    }, index > 0 && el("option", { value: "", selected: !lane.name }, "(one column)"),
    options.map(({ name, label }) => el("option", { value: name, selected: name === lane.name }, label)));
  }

  function stepDots(lane, index) {
    const dots = lane.view.steps.map((step) => button(String(step.t), () => { now.active = index; go(step.t); }, {
      class: `stepdot ${step.kind && data.kinds.includes(step.kind) ? step.kind : ""}${step.by?.length ? " own" : ""}`,
      "aria-current": step.t === now.t ? "step" : null, "aria-label": `step ${step.t} ${step.kind}`,
    }));
    return el("div", { class: "dots" }, dots);
  }

  function laneNode(lane, index) {
    const head = [deliverySelect(lane, index)];
    if (!lane.view) {
      const why = lane.error || (lane.name ? (data.live ? "loading…" : "not played under this delivery") : "choose a delivery to compare with");
      return el("article", { class: `lane${lane.name ? "" : " closed"}` }, el("header", {}, head), el("p", { class: lane.error ? "bad data" : "soft" }, why));
    }
    const { view } = lane;
    const step = view.steps[Math.min(now.t, view.steps.length - 1)];
    head.push(outcomeOf(lane), hook("tools", lane, index));
    const about = `${view.steps.length} ${view.steps.length === 1 ? "step" : "steps"} · progress ${number(view.progress, 2)} · ${lane.live && !lane.live.over ? "" : `${view.stop_reason.replaceAll("_", " ")} · `}seed ${view.seed}`;
    return el("article", { class: `lane${index === now.active ? " active" : ""}`, "data-delivery": view.delivery, onpointerdown: () => { now.active = index; } },
      el("header", {}, el("div", { class: "row" }, head), el("p", { class: "about" }, about), (view.error || lane.error) && el("p", { class: "bad data" }, lane.error || view.error),
        stepDots(lane, index)),
      step
        ? el("div", { class: "step", "data-t": String(step.t) }, now.t >= view.steps.length && el("p", { class: "soft" }, `over after step ${step.t}`),
          seen(step), memory(lane, step, index), state(step), emission(lane, step), soft(step), commands(lane, step, index), answer(lane, step),
          step.prompt && part(`prompt${index}`, "executor prompt", el("pre", { class: "data" }, step.prompt)))
        : el("p", { class: "soft" }, "Failed for technical reasons before the first step."));
  }

  // moving -------------------------------------------------------------------------------------------------------------

  function go(t) {
    now.t = Math.max(0, Math.min(t, last()));
    render();
  }
  async function next() {
    if (now.t < last()) return go(now.t + 1);
    const more = data.live ? await hook("next") : false;
    if (more) go(now.t + 1);
    else { stop(); render(); }
    return more;
  }
  function stop() {
    clearTimeout(now.playing);
    now.playing = 0;
  }
  function toggle() {
    if (now.playing) { stop(); return render(); }
    const run = async () => {
      await next();
      if (now.playing && (data.live || now.t < last())) now.playing = setTimeout(run, data.live ? 150 : 900);
      else { stop(); render(); }
    };
    now.playing = setTimeout(run, 0);
    render();
  }

  function transport() {
    const range = el("input", { type: "range", min: "0", max: String(last()), value: String(Math.min(now.t, last())), "aria-label": "step", oninput: (event) => go(Number(event.target.value)) });
    return el("div", { class: "transport" },
      button("|◀", () => go(0), { "aria-label": "first step" }), button("◀", () => go(now.t - 1), { "aria-label": "step back" }), range,
      el("output", { id: "where" }, `step ${Math.min(now.t, last())} of ${last()}`),
      button(data.live && now.t >= last() ? "Step ▶" : "▶", next, { id: "next", class: "main", "aria-label": "next step" }),
      button(now.playing ? "❚❚" : "▶▶", toggle, { id: "run", "aria-label": now.playing ? "pause" : "play on" }), hook("transport"));
  }

  function filterSelect(name, title, options) {
    return options.length > 0 && el("label", {}, `${title} `, el("select", { "data-filter": name, onchange: (event) => {
      filters[name] = event.target.value;
      const at = tasks().findIndex(matches);
      if (at >= 0 && !matches(tasks()[now.task])) choose(at);
      else render();
    } }, el("option", { value: "" }, "any"), options.map(({ name: value, label }) => el("option", { value, selected: filters[name] === value }, label))));
  }

  function chooser() {
    const all = tasks();
    if (!all.length) return null;
    const listed = all.map((entry, i) => [entry, i]).filter(([entry]) => matches(entry));
    const label = ({ task, episodes }) => `${task.scene && !task.goal.includes(task.scene) ? `${task.scene}: ` : ""}${task.goal}  ${episodes.map((view) => MARKS[view.outcome]).join("")}`;
    const plain = (name) => ({ name, label: name.replaceAll("_", " ") });
    return el("div", { class: "chooser" },
      all.length > 1 && el("label", { class: "task" }, "task ", el("select", { id: "task", onchange: (event) => choose(Number(event.target.value)) },
        listed.map(([entry, i]) => el("option", { value: String(i), selected: i === now.task }, label(entry))))),
      all.length > 1 && !data.live && part("filters", `filters (${listed.length} of ${all.length} tasks)`, el("div", { class: "selects" },
        filterSelect("outcome", "outcome", ["success", "failure", "broken", "disagree"].map(plain)), filterSelect("family", "family", data.families || []),
        filterSelect("type", "type", (data.types || []).map(plain)), filterSelect("emission", "emission", [...data.kinds, "parse_error"].map(plain)))),
      listed.length === 0 && el("p", { class: "empty" }, "No replay matches. Widen the filters above."), hook("chooser"));
  }

  function render() {
    const entry = tasks()[now.task];
    const held = document.activeElement?.id;
    const before = root.querySelector(".lanes");
    root.replaceChildren(...[chooser(),
      entry && el("p", { class: "goal" }, el("b", { class: "data" }, entry.task.goal),
        el("span", { class: "tags" }, [entry.task.kind, entry.task.scene, entry.task.family_title, entry.task.id].filter(Boolean).map((text) => el("span", { class: "data" }, text)))),
      entry && transport(),
      entry && el("div", { class: `lanes n${now.lanes.filter((lane) => lane.name).length}` }, now.lanes.map(laneNode)),
      el("p", { class: "keyhelp" }, "Keys: ← → step, Home End, space plays on, x changes the column", data.live ? ", e writes guidance, 1 to 9 choose a command." : ".")].filter(Boolean));
    const lanes = root.querySelector(".lanes");
    const moved = lanes && now.shown !== now.active && lanes.children[now.active];
    lanes?.scrollTo({ left: moved ? moved.offsetLeft - lanes.offsetLeft : before?.scrollLeft || 0 });  // on a phone
    now.shown = now.active;
    if (held) document.getElementById(held)?.focus();
  }

  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest?.("input:not([type=range]), textarea, select")) return;
    if (!alone && !root.contains(target)) return;
    if (event.key === " " && target.closest?.("button, summary")) return;
    const keys = {
      ArrowRight: next, ArrowLeft: () => go(now.t - 1), Home: () => go(0), End: () => go(last()), " ": toggle,
      x: () => { now.active = (now.active + 1) % Math.max(1, now.lanes.filter((lane) => lane.name).length); render(); },
    };
    const done = keys[event.key] ? (keys[event.key](), true) : hook("key", event.key, now.lanes[now.active]);
    if (done) event.preventDefault();
  });

  if (!data.live && tasks().length) {
    const played = [...new Set(tasks().flatMap((entry) => entry.episodes.map((view) => view.delivery)))];
    const names = (data.lanes || played).filter((name) => played.includes(name)).slice(0, 2);
    now.lanes = [names[0] || played[0], names[1] || ""].map((name) => ({ name, view: null, live: null, error: "" }));
    choose(0);
  }
  return { root, data, now, hooks, el, button, part, ranked, render, go, lengthOf };
})();
