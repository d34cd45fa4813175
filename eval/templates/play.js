// The live part of the player: games on the server, which the reader can edit. It fills the player's hooks.
"use strict";
(() => {
  if (!Player || !Player.data.live) return;
  const { now, hooks, el, button, render, go, lengthOf, ranked } = Player;
  const state = { tasks: [], deliveries: [], rows: 0, out: "", lanes: [] };
  const seats = new WeakMap();  // lane -> { compiler, executor }: what the visitor decides alone
  const edits = new Map();  // name of an open form -> the texts in it
  let trouble = "";

  async function ask(path, body) {
    const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
    let answer;
    try {
      answer = await fetch(path, options);
    } catch {
      throw new Error("the server does not answer: is `memcompiler play` still running?");
    }
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw new Error(error || `the server answered ${answer.status}`);
  }

  const task = () => state.tasks[now.task];
  const seatsOf = (lane) => seats.get(lane) || seats.set(lane, { compiler: false, executor: false }).get(lane);
  const isHead = (lane, step) => lane.live && !lane.live.over && step.t === lengthOf(lane) - 1;

  function show(lane, answer) {
    lane.view = answer.view;
    lane.live = answer;
    state.rows = answer.rows;
  }

  // One request of a lane; an error is shown in its column. Answers that arrive after the lane has changed are dropped.
  async function inLane(lane, path, body, after = () => {}) {
    const name = lane.name;
    const shown = task();
    lane.error = "";
    lane.busy = true;
    mark();
    try {
      const answer = await (await ask(path, body)).json();
      if (lane.name !== name || task() !== shown) return false;
      show(lane, answer);
      after();
      return true;
    } catch (error) {
      lane.error = error.message;
      return false;
    } finally {
      lane.busy = false;
      render();
      mark();
    }
  }

  function mark() {
    document.querySelectorAll(".lane").forEach((node, i) => node.classList.toggle("busy", Boolean(now.lanes[i]?.busy)));
    const busy = now.lanes.some((lane) => lane.busy);
    document.body.setAttribute("aria-busy", String(busy));
    const counted = state.rows === 1 ? "1 row" : `${state.rows} rows`;
    document.getElementById("tools").replaceChildren(busy ? "thinking…" : "", el("span", { title: state.out }, `${counted} recorded`),
      button("export", exported, { title: "these episodes as one HTML file that opens offline" }), trouble && el("span", { class: "bad data" }, trouble));
  }

  // Opens what a lane's name says: `recorded:N`, or a delivery.
  async function open(lane) {
    lane.view = lane.live = null;
    lane.error = "";
    edits.clear();
    render();
    if (!lane.name) return;
    const [kind, n] = lane.name.split(":");
    if (kind !== "recorded") return inLane(lane, "api/games", { task: task().task.id, delivery: lane.name });
    try {
      const name = lane.name;
      const view = await (await ask(`api/episodes/${n}`)).json();
      if (lane.name === name) lane.view = view;
    } catch (error) {
      lane.error = error.message;
    }
    render();
  }

  async function exported() {
    const lanes = now.lanes.filter((lane) => lane.view).map((lane) => (lane.live
      ? { game: lane.live.game, line: lane.live.line } : { episode: Number(lane.name.split(":")[1]) }));
    try {
      const file = await (await ask("api/export", { lanes })).blob();
      const link = el("a", { href: URL.createObjectURL(file), download: "episode.html" });
      link.click();
      URL.revokeObjectURL(link.href);
      trouble = "";
    } catch (error) {
      trouble = error.message;
    }
    mark();
  }

  // hooks --------------------------------------------------------------------------------------------------------------

  hooks.tasks = () => state.tasks;
  hooks.choose = async () => {
    const entry = task();
    const recorded = entry.recorded.map((one) => `recorded:${one.number}`);
    const names = recorded.length ? recorded : state.lanes;
    now.lanes = [names[0] || state.deliveries[0]?.name || "", recorded.length ? recorded[1] || "" : state.lanes[1] || ""].map((name) => ({ name, view: null, live: null, error: "" }));
    now.active = now.lanes[1].name ? 1 : 0;
    for (const lane of now.lanes) await open(lane);
  };
  hooks.lane = (lane) => open(lane);
  hooks.options = () => [
    ...task().recorded.map((one) => ({ name: `recorded:${one.number}`, label: `recorded: ${one.label}${one.where ? ` (${one.where})` : ""}` })),
    ...(task().playable ? state.deliveries.map(({ name, label }) => ({ name, label: `play: ${label}` })) : []),
  ];

  hooks.next = async () => {
    const lanes = now.lanes.filter((lane) => lane.live && !lane.live.over && !lane.busy);
    const waiting = lanes.find((lane) => seatsOf(lane).executor || (seatsOf(lane).compiler && edits.has(formName(lane))));
    if (waiting) {
      waiting.error = seatsOf(waiting).executor ? "you act: choose a command" : "you compile: write guidance, then deliver it";
      return false;
    }
    let moved = false;
    for (const lane of lanes) {
      const t = lengthOf(lane) - 1;
      if (t <= now.t) moved = (await inLane(lane, `api/games/${lane.live.game}/step`, { line: lane.live.line, t }, () => ready(lane))) || moved;
    }
    return moved;
  };

  const formName = (lane) => `emission ${now.lanes.indexOf(lane)}`;
  function ready(lane) {  // a new step of a lane whose compiler is the visitor
    if (seatsOf(lane).compiler && !lane.live.over) edits.set(formName(lane), { guidance: "", reason: "", operations: "" });
  }

  hooks.tools = (lane, index) => {
    if (!lane.live) {
      if (!lane.view || !task().playable) return null;
      const plain = lane.view.delivery.split("/").pop();
      const delivery = state.deliveries.some(({ name }) => name === plain) ? plain : state.deliveries[0]?.name;
      const number = Number(lane.name.split(":")[1]);
      return button("play on from here", () => {
        const t = Math.min(now.t, lengthOf(lane) - 1);
        lane.name = delivery;
        inLane(lane, "api/games", { task: task().task.id, delivery, episode: number, t });
      });
    }
    const lines = lane.live.lines.length > 1 && el("select", {
      "aria-label": `line of column ${index + 1}`, class: "line-select",
      onchange: (event) => inLane(lane, `api/games/${lane.live.game}?line=${event.target.value}`),
    }, lane.live.lines.map(({ id, parent, fork }) => el("option", { value: String(id), selected: id === lane.live.line },
      parent === null ? "line 0" : `line ${id}: leaves ${parent} at ${fork}`)));
    const seat = (name, text, possible) => possible && el("label", {}, el("input", {
      type: "checkbox", checked: seatsOf(lane)[name],
      onchange: (event) => {
        seatsOf(lane)[name] = event.target.checked;
        if (name === "compiler" && event.target.checked) ready(lane);
        if (name === "compiler" && !event.target.checked) edits.delete(formName(lane));
        render();
      },
    }), text);
    return [lines, el("span", { class: "seats" }, seat("compiler", "I compile", lane.live.compiles), seat("executor", "I act", true))];
  };

  function decide(lane, t, change, form) {
    return inLane(lane, `api/games/${lane.live.game}/decide`, { line: lane.live.line, t, ...change }, () => { edits.delete(form); now.t = t; });
  }

  hooks.entry = (lane, step, id, text) => {
    if (!lane.live || !lane.live.recalls) return null;
    const form = `memory ${now.lanes.indexOf(lane)} ${step.t} ${id}`;
    const written = edits.get(form);
    if (written === undefined) {
      return el("div", {}, el("pre", { class: "data" }, text ?? ""), el("p", { class: "tags" },
        button("edit", () => { edits.set(form, text ?? ""); render(); }), button("leave out", () => decide(lane, step.t, { memory: { [id]: null } }, form))));
    }
    return el("div", { class: "edit" }, area(form, "text", written, 5, "text of the entry", (value) => edits.set(form, value)),
      el("div", { class: "row" }, button("use this text", () => decide(lane, step.t, { memory: { [id]: edits.get(form) } }, form), { class: "main" }), cancel(form)));
  };

  const cancel = (form) => button("cancel", () => { edits.delete(form); render(); });
  function area(form, field, value, rows, label, keep) {
    const node = el("textarea", { id: `${form} ${field}`, rows: String(rows), "aria-label": label, oninput: (event) => keep(event.target.value) });
    node.value = value;
    return node;
  }

  hooks.emission = (lane, step) => {
    if (!lane.live || !lane.live.compiles) return null;
    const form = formName(lane);
    const written = edits.get(form);
    if (!written) return el("p", {}, button("write guidance", () => begin(lane, step)));
    const field = (name, label, rows) => el("label", {}, label, area(form, name, written[name], rows, label, (value) => { written[name] = value; }));
    return el("div", { class: "edit" }, field("guidance", "guidance: what to do now", 1), field("reason", "because (optional)", 1),
      field("operations", "operations on the Brief State, one a line: + key: value   ~ key: value   - key   ^ summary", 3),
      el("div", { class: "row" }, button("deliver", () => decide(lane, step.t, { emission: { ...written } }, form), { class: "main" }), cancel(form)));
  };

  function begin(lane, step) {
    const operations = step.parse_error ? "" : step.emission.split("\n").filter((line) => /^[+~^-]/.test(line)).join("\n");
    edits.set(formName(lane), { guidance: step.guidance, reason: step.reason, operations });
    render();
    document.getElementById(`${formName(lane)} guidance`)?.focus();
  }

  const take = (lane, step, command) => inLane(lane, `api/games/${lane.live.game}/step`, { line: lane.live.line, t: step.t, command },
    () => { edits.delete(formName(lane)); ready(lane); now.t = Math.min(step.t + 1, lengthOf(lane) - 1); });

  hooks.command = (lane, step, command, index, inside, chosen) => lane.live && el("li", { class: "choice" },
    button(inside, () => take(lane, step, command.name), { class: chosen ? "chosen" : "", title: isHead(lane, step) ? "take this command" : "go back to this step and take this command" }));

  hooks.ownCommand = (lane, step) => {
    if (!lane.live || step.commands !== null) return null;
    const input = el("input", { "aria-label": "your command", placeholder: "your command" });
    return el("div", { class: "edit" }, el("div", { class: "row" }, input, button("take it", () => input.value.trim() && take(lane, step, input.value.trim()))));
  };

  hooks.key = (key, lane) => {
    if (!lane?.live) return false;
    const step = lane.view.steps[Math.min(now.t, lengthOf(lane) - 1)];
    if (key === "e" && lane.live.compiles) { begin(lane, step); return true; }
    const command = /^[1-9]$/.test(key) && ranked(step)[Number(key) - 1];
    if (command && !lane.busy) { take(lane, step, command.name); return true; }
    return false;
  };

  (async () => {
    try {
      Object.assign(state, await (await ask("api/state")).json());
      for (const entry of state.tasks) Object.assign(entry.task, { family: "", family_title: "" }), (entry.episodes = []);
      if (state.tasks.length) await hooks.choose(0);
      else trouble = "there is nothing to watch or play here";
    } catch (error) {
      trouble = error.message;
    }
    mark();
    go(0);
  })();
})();
