// The dashboard: asks /status every two seconds, listens to /events, and draws. Text from the run is only ever set as text.
"use strict";

const POLL_MS = 2000, TIMEOUT_MS = 6000, OLD_S = 15, KEPT_EVENTS = 100;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let token = sessionStorage.getItem("hsx-token") || "";
let span = null, shown = null, ended = false, lost = null, listening = false;
let fresh = { time: 0, at: 0 };
const events = new Map();

// --- building

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "width%") node.style.width = `${Math.max(0, Math.min(100, value))}%`;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

const drawn = new Map();
function draw(id, facts, build) {
  // What has not changed is left alone, so that a selection or a scroll position in it stays.
  const key = JSON.stringify(facts);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  $(id).replaceChildren(...build().flat(9).filter((part) => part !== null && part !== undefined && part !== false));
}

// --- words

const known = (value) => value !== null && value !== undefined;
const count = (value) => known(value) ? Math.round(value).toLocaleString("en-US") : "–";
function short(value, unit = "") {
  if (!known(value)) return "–";
  const steps = ["", "k", "M", "G", "T", "P"];
  let power = 0;
  while (Math.abs(value) >= (power ? 999.5 : 9999.5) && power < steps.length - 1) { value /= 1000; power += 1; }
  const digits = value === 0 || value >= 100 || (power === 0 && value >= 10) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toLocaleString("en-US", { minimumFractionDigits: power ? digits : 0, maximumFractionDigits: digits })}${power || unit ? " " : ""}${steps[power]}${unit}`;
}
const size = (value) => short(value, "B");
function duration(seconds) {
  if (!known(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 90) return `${whole} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
  const hours = Math.round(seconds / 3600);
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}
const pad = (number) => String(number).padStart(2, "0");
function clock(time, seconds = true) {
  const date = new Date(time * 1000);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}${seconds ? `:${pad(date.getSeconds())}` : ""}`;
}
function day(time) {
  const date = new Date(time * 1000);
  const isToday = date.toDateString() === new Date(shown.time * 1000).toDateString();
  return `${isToday ? "" : `${date.toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" })} `}${clock(time, false)}`;
}
const sample = (marker) => { const parts = marker.split("-"); return parts.length === 5 ? `sample ${parts[2]}, attempt ${parts[3]}` : marker; };

// --- parts

const STATES = { READY: "good", STARTING: "busy", BACKOFF: "warn", FAILED: "bad", DRAINING: "warn", STOPPED: "" };
const PHASES = { starting: "busy", extracting: "good", draining: "warn", done: "good", interrupted: "warn", failed: "bad" };

function header(status) {
  const paused = status.intake.paused && status.phase.name === "extracting";
  $("name").textContent = status.job.name || "hsx";
  const waits = status.phase.name === "extracting" && status.engine.state !== "READY";
  const phase = paused ? "paused" : waits ? "waiting" : status.phase.name;
  $("phase").textContent = phase;
  $("phase").className = `pill ${paused ? "warn" : waits ? "busy" : PHASES[phase] || ""}`;
  $("engine-pill").textContent = `engine ${status.engine.state}`;
  $("engine-pill").className = `pill ${STATES[status.engine.state] || ""}`;
  $("clock").textContent = `as of ${clock(status.time)} · running for ${duration(status.job.seconds)}`;
  const { total, committed } = status.progress.tokens;
  const percent = total ? `${Math.floor(100 * committed / total)} % ` : "";
  document.title = `${percent}${status.job.name || "hsx"} · ${phase}`;
}

function verdict(status) {
  const { phase, intake, engine } = status;
  const silent = lost !== null && Date.now() - lost > 3000;
  if (phase.name === "failed") return ["bad", `The run failed${phase.kind ? `: ${phase.kind}` : ""}`, phase.reason];
  if (phase.name === "done") {
    const given = status.quarantine.count;
    return ["good", "The job is done", `${count(status.progress.samples.committed)} samples are committed${given ? `, ${count(given)} are quarantined` : ""}. hsx has ended.`];
  }
  if (phase.name === "interrupted") return ["warn", "The run was stopped", "hsx has ended; the same command continues the job."];
  if (silent) return ["bad", "No answer from hsx", `Shown is what was known at ${clock(status.time)}.`];
  if (fresh.at && Date.now() - fresh.at > OLD_S * 1000) return ["bad", "hsx says nothing new", `It hangs, or was stopped. Shown is what was known at ${clock(status.time)}.`];
  if (intake.paused) return ["warn", "Paused: no room", intake.pauses.map((pause) => `${pause.message} (${pause.kind}, since ${day(pause.since)}; goes on by itself)`).join("\n")];
  if (engine.state === "FAILED") return ["bad", "The engine failed", engine.reason];
  if (engine.state === "BACKOFF") return ["warn", "The engine is being restarted", engine.reason];
  if (engine.state === "STARTING") return ["", engine.restarts.total ? "The engine is coming up again" : "The engine is coming up", engine.waiting_for || engine.reason];
  if (phase.name === "draining") return ["warn", "Draining", "What is in flight is finished; no new samples are started."];
  if (!status.health.ok) return ["bad", "hsx is not sound", status.health.reason];
  return null;
}

function banner(status) {
  const found = verdict(status);
  $("banner").hidden = found === null;
  draw("banner", found, () => found === null ? [] : [h("strong", {}, found[1]), found[2] || ""]);
  if (found) $("banner").className = found[0];
}

function progress(status) {
  const { samples, tokens, bytes, eta, adopted, shared } = status.progress;
  const share = tokens.total ? 100 * tokens.committed / tokens.total : null;
  const given = samples.total ? 100 * status.quarantine.count / samples.total : 0;
  const over = ["done", "failed", "interrupted"].includes(status.phase.name);
  const per = known(tokens.committed) && tokens.committed ? bytes.committed / tokens.committed : null;
  const whole = per && tokens.total ? ` of about ${size(per * tokens.total)}` : "";
  // Never 100.0 % before everything is there.
  const percent = share === null ? "–" : `${(share >= 100 ? 100 : Math.min(99.9, share)).toFixed(1)} %`;
  draw("progress", [samples, tokens, bytes, eta, over, status.quarantine.count, adopted, shared], () => [
    h("div", { class: "split" },
      h("div", {}, h("div", { class: "big", id: "percent", "data-value": share }, percent), h("div", { class: "muted" }, "of the tokens committed")),
      over ? null : h("div", { class: "right" },
        h("div", { class: "big", id: "eta", "data-value": eta.seconds }, known(eta.seconds) ? duration(eta.seconds) : "–"),
        h("div", { class: "muted" }, known(eta.seconds) ? `left, until ${day(status.time + eta.seconds)} · ${eta.basis}` : eta.basis))),
    h("div", { class: "bar", role: "progressbar", "aria-valuenow": share, "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Tokens committed" },
      h("i", { class: `fill ${status.phase.name === "done" ? "good" : ""}`, "width%": share || 0 }), h("i", { class: "fill bad", "width%": given })),
    h("div", { class: "figures" },
      figure("samples", samples.committed, count(samples.committed), `of ${count(samples.total)} samples`),
      figure("tokens", tokens.committed, short(tokens.committed), `of ${short(tokens.total)} tokens`),
      figure("bytes", bytes.committed, size(bytes.committed), `stored${whole}`),
      figure("pending", samples.pending, count(samples.pending), "samples pending"),
      figure("by-run", samples.committed_by_run, count(samples.committed_by_run), `committed by this run${adopted ? `, ${count(adopted)} adopted` : ""}`),
      shared.samples ? figure("shared", shared.samples, count(shared.samples), "share another's prompt and shard") : null,
      samples.revoked_by_run ? figure("revoked", samples.revoked_by_run, count(samples.revoked_by_run), "revoked, to be extracted again") : null),
  ]);
}
const figure = (name, value, text, label) => h("div", { class: "figure" }, h("b", { "data-field": name, "data-value": value }, text), h("span", {}, label));

function rates(status) {
  const { samples, tokens, bytes } = status.progress;
  draw("rates", [samples.per_second, tokens.per_second, bytes.per_second], () => [
    figure("tokens-minute", tokens.per_second.minute, `${short(tokens.per_second.minute)} tokens/s`, "last minute"),
    figure("tokens-ten", tokens.per_second.ten_minutes, `${short(tokens.per_second.ten_minutes)} tokens/s`, "last 10 minutes"),
    figure("tokens-run", tokens.per_second.run, `${short(tokens.per_second.run)} tokens/s`, "this run"),
    figure("bytes-minute", bytes.per_second.minute, `${size(bytes.per_second.minute)}/s`, "to disk, last minute"),
    figure("samples-minute", samples.per_second.minute, `${short(samples.per_second.minute)} /s`, "samples, last minute"),
  ]);
}

function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function chart(status) {
  const curve = status.history[span], step = curve.step_seconds;
  const width = $("chart").clientWidth || 600, height = $("chart").clientHeight || 190;
  const left = 46, right = 8, top = 8, bottom = 22;
  // The slice that is not over yet would look like a slump.
  const values = curve.tokens.slice(0, -1).map((tokens) => tokens / step);
  draw("chart", [span, curve, width], () => {
    if (values.length < 2) return [h("p", { class: "none" }, "The curve begins when two slices of time are over.")];
    const most = ceiling(Math.max(...values));
    // A young run fills the left part of a frame of at least five minutes.
    const slots = Math.max(values.length, span === "recent" ? 60 : 30);
    const x = (at) => left + (width - left - right) * (at / (slots - 1)), y = (value) => height - bottom - (height - top - bottom) * (value / most);
    const line = values.map((value, at) => `${at ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Tokens per second over time" });
    for (const part of [0, 0.5, 1]) {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(most * part), y2: y(most * part) }),
        s("text", { x: left - 7, y: y(most * part) + 4, "text-anchor": "end" }, short(most * part)));
    }
    const marks = width < 480 ? 3 : 5;
    for (let mark = 0; mark < marks; mark += 1) {
      const at = (slots - 1) * mark / (marks - 1);
      svg.append(s("text", { x: x(at), y: height - 5, "text-anchor": mark === 0 ? "start" : mark === marks - 1 ? "end" : "middle" },
        clock(curve.begins + (at + 0.5) * step, false)));
    }
    svg.append(s("path", { class: "area", d: `${line}L${x(values.length - 1).toFixed(1)} ${y(0)}L${left} ${y(0)}Z` }), s("path", { class: "curve", d: line }));
    curve.restarts.slice(0, -1).forEach((restarts, at) => {
      if (restarts) svg.append(s("line", { class: "restart", x1: x(at), x2: x(at), y1: top, y2: height - bottom }, s("title", {}, "restart")));
    });
    const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" }), dot = s("circle", { class: "dot", r: 3.5, visibility: "hidden" });
    const tip = h("div", { class: "tip", hidden: "" });
    svg.append(cross, dot);
    svg.addEventListener("pointermove", (event) => {
      const at = Math.max(0, Math.min(values.length - 1, Math.round((event.offsetX - left) / (width - left - right) * (slots - 1))));
      for (const node of [cross, dot]) node.setAttribute("visibility", "visible");
      cross.setAttribute("x1", x(at)); cross.setAttribute("x2", x(at));
      dot.setAttribute("cx", x(at)); dot.setAttribute("cy", y(values[at]));
      tip.hidden = false;
      tip.textContent = `${clock(curve.begins + at * step, step < 60)} · ${short(values[at])} tokens/s · ${size(curve.bytes[at] / step)}/s${curve.restarts[at] ? " · restart" : ""}`;
      tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, x(at) + 10))}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; for (const node of [cross, dot]) node.setAttribute("visibility", "hidden"); });
    return [svg, tip];
  });
}

function meter(name, value, most, text) {
  const share = most ? 100 * value / most : 0;
  return h("div", { class: "meter" }, h("div", { class: "label" }, h("span", {}, name), h("span", { "data-field": name, "data-value": value }, text)),
    most ? h("div", { class: "bar thin" }, h("i", { class: `fill ${share > 97 ? "warn" : ""}`, "width%": share })) : null);
}

function underway(status) {
  const limits = status.limits || {}, flight = status.in_flight, staging = status.staging.bytes;
  const of = (text, most, say) => known(most) ? `${text} of ${say(most)}` : text;
  const samples = status.progress.samples.committed_by_run;
  const steps = samples ? Object.entries(status.progress.step_seconds).map(([name, seconds]) => [name, seconds / samples]) : [];
  const longest = Math.max(...steps.map(([, seconds]) => seconds), 0.001);
  draw("underway", [limits, flight, staging, steps], () => [
    h("div", { class: "head" }, h("h2", {}, "Under way")),
    meter("Requests", flight.requests, limits.requests, of(count(flight.requests), limits.requests, count)),
    meter("Prompt tokens", flight.tokens, limits.tokens, of(short(flight.tokens), limits.tokens, short)),
    meter("Staging", staging, limits.staging_bytes, of(size(staging), limits.staging_bytes, size)),
    steps.length ? [h("p", { class: "muted sub" }, "Seconds a sample spends in each step, on average"),
      steps.map(([name, seconds]) => h("div", { class: "step" }, h("span", {}, name),
        h("div", { class: "bar thin" }, h("i", { class: "fill", "width%": 100 * seconds / longest })), h("span", {}, seconds.toFixed(seconds < 9.995 ? 2 : 1))))] : null,
  ]);
}

function roots(status) {
  const WORDS = { in_service: "in service", refusing: "refuses, is tried again", draining: "being emptied", silent: "does not answer", lost: "lost" };
  const names = Object.keys(status.roots).sort();
  draw("roots", status.roots, () => [
    h("div", { class: "head" }, h("h2", {}, "Roots"), h("span", { class: "muted" }, names.length ? `${names.length} ${names.length === 1 ? "disk" : "disks"}` : "")),
    names.length ? null : h("p", { class: "none" }, "No root has been looked at yet."),
    names.map((name) => {
      const root = status.roots[name], whole = root.size_bytes;
      const sound = root.state === "in_service";
      const reserve = Math.min(root.reserve_bytes || 0, known(root.free_bytes) ? root.free_bytes : Infinity);
      const parts = whole && known(root.free_bytes) && root.state !== "lost"
        ? [["used", whole - root.free_bytes], ["promised", root.promised_bytes], ["reserve", reserve]] : [];
      const words = [];
      if (!sound && root.state !== "lost") words.push(WORDS[root.state]);
      if (root.state !== "lost" && known(root.room_bytes)) words.push(`${size(root.room_bytes)} of room`);
      if (known(root.bytes_per_second)) words.push(`${size(root.bytes_per_second)}/s`);
      return h("div", { class: "meter", "data-root": name, "data-state": root.state, title: root.path },
        h("div", { class: "label" }, h("span", {}, name, " ", sound ? null : h("span", { class: `pill ${root.state === "lost" ? "bad" : "warn"}` }, root.state)),
          h("span", { "data-field": `room-${name}`, "data-value": root.room_bytes }, words.join(" · "))),
        h("div", { class: "bar thin" }, parts.map(([kind, bytes]) => h("i", { class: kind, "width%": 100 * bytes / whole }))),
        h("div", { class: "muted" }, root.reason || `${count(root.by_run.samples)} samples, ${size(root.by_run.bytes)} by this run`));
    }),
    names.length ? h("div", { class: "legend" }, ["used", "promised", "reserve", "free"].map((kind) => h("span", {}, h("i", { class: kind }), kind))) : null,
  ]);
}

function engine(status) {
  const { state, since, epoch, restarts, timeline, reason, waiting_for: waits } = status.engine;
  const over = ["done", "failed", "interrupted"].includes(status.phase.name);
  draw("engine", [status.engine, over, Math.floor(status.time / 5)], () => {
    const begin = timeline.length ? timeline[0].time : status.job.began;
    const length = Math.max(1, status.time - begin);
    const pieces = timeline.map((step, at) => [step, (at + 1 < timeline.length ? timeline[at + 1].time : status.time) - step.time]);
    return [
      h("div", { class: "head" }, h("h2", {}, "Engine"), h("span", { class: "muted" }, `${state} since ${day(since)}`)),
      pieces.length ? [
        h("div", { class: "strip", role: "img", "aria-label": `States of the engine; now ${state}` },
          pieces.map(([step, seconds]) => h("i", { class: step.state, "width%": 100 * seconds / length, title: `${clock(step.time)} ${step.state} for ${duration(seconds)}${step.reason ? `: ${step.reason}` : ""}` }))),
        h("div", { class: "ends" }, h("span", {}, day(begin)), h("span", {}, over ? day(status.time) : "now")),
        h("div", { class: "legend" }, [...new Set(timeline.map((step) => step.state))].map((name) => h("span", {}, h("i", { class: name }), name))),
      ] : null,
      h("div", { class: "figures gap" },
        figure("restarts", restarts.total, count(restarts.total), restarts.total === 1 ? "restart in this run" : "restarts in this run"),
        figure("requeued", restarts.requeued, count(restarts.requeued), "samples requeued by them"),
        figure("epochs", epoch.count, count(epoch.count), `epochs${epoch.id ? `; now ${epoch.id.slice(0, 8)}${epoch.continued ? ", continued" : ""}` : ""}`)),
      waits || (state !== "READY" && reason) ? h("p", { class: "none" }, waits ? `Waits for: ${waits}` : reason) : null,
      restarts.last.length ? h("table", { class: "gap", id: "restarts" },
        h("thead", {}, h("tr", {}, h("th", {}, "when"), h("th", {}, "why"), h("th", { class: "number" }, "requeued"))),
        h("tbody", {}, restarts.last.slice(-6).reverse().map((one) => h("tr", {}, h("td", { class: "time" }, day(one.time)),
          h("td", {}, h("code", {}, one.reason), ` ${one.evidence}`), h("td", { class: "number" }, count(one.requeued)))))) : null,
    ];
  });
}

function invariants(status) {
  const { violations, by_name: run, job } = status.invariants, canaries = status.canaries;
  const names = Object.keys(job.by_name).filter((name) => job.by_name[name]).sort((a, b) => job.by_name[b] - job.by_name[a]);
  draw("invariants", [run, job, canaries], () => [
    h("div", { class: "head" }, h("h2", {}, "Invariants"),
      h("span", { class: `pill ${violations ? "warn" : "good"}`, "data-field": "violations", "data-value": violations },
        violations ? `${count(violations)} ${violations === 1 ? "violation" : "violations"} in this run` : names.length ? "none in this run" : "all held")),
    names.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "invariant"), h("th", { class: "number" }, "this run"), h("th", { class: "number" }, "job"))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("td", {}, h("code", {}, name)), h("td", { class: "number" }, count(run[name] || 0)), h("td", { class: "number" }, count(job.by_name[name]))))))
      : h("p", { class: "none" }, "Every state that was looked at is proved to be its sample's."),
    h("p", { class: "muted" }, canaries.passed ? `${count(canaries.passed)} canaries passed, the last at ${day(canaries.time)}` : "No canary has come back yet."),
  ]);
}

function quarantine(status) {
  const { count: total, by_reason: reasons, last, rejected_rows: rejected, convicted } = status.quarantine;
  const names = Object.keys(reasons).sort((a, b) => reasons[b] - reasons[a]);
  draw("quarantine", status.quarantine, () => [
    h("div", { class: "head" }, h("h2", {}, "Quarantine"),
      h("span", { class: `pill ${total ? "warn" : "good"}`, "data-field": "quarantined", "data-value": total }, total ? `${count(total)} samples` : "empty")),
    names.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "reason"), h("th", { class: "number" }, "samples"))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("td", {}, h("code", {}, name)), h("td", { class: "number" }, count(reasons[name]))))))
      : h("p", { class: "none" }, "No sample was given up."),
    last.slice(-3).reverse().map((one) => h("p", { class: "muted" }, `${clock(one.time)} ${sample(one.marker)}: ${one.reason}: ${one.evidence}`)),
    rejected || convicted ? h("p", { class: "muted" }, `${rejected ? `${count(rejected)} rows of the dataset were rejected. ` : ""}${convicted ? `${count(convicted)} samples kill the server.` : ""}`) : null,
  ]);
}

function word(value) {
  // A uuid is known by its beginning.
  return String(value).replace(/\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b/g, "$1");
}

function recent() {
  const last = [];
  for (const event of [...events.values()].sort((a, b) => b.id - a.id).slice(0, KEPT_EVENTS)) {
    // What is routine is shown once, with how often it came in a row.
    const before = last[last.length - 1];
    if (before && event.level === "info" && before.event === event.event) before.times += 1;
    else last.push({ ...event, times: 1 });
  }
  draw("events", last.map((event) => [event.id, event.times]), () => [
    h("div", { class: "head" }, h("h2", {}, "Recent events"), h("span", { class: "muted", id: "live" }, "newest first")),
    last.length ? h("ul", { class: "list" }, last.map((event) => h("li", { class: event.level, "data-id": event.id },
      h("span", { class: "muted" }, clock(event.time)), h("span", { class: "what" }, event.event, event.times > 1 ? h("span", { class: "muted" }, ` × ${event.times}`) : null),
      h("span", { class: "why" }, Object.entries(event.fields).filter(([, value]) => known(value) && value !== "").map(([name, value]) => `${name} ${word(value)}`).join(" · ")))))
      : h("p", { class: "none" }, "Nothing has happened yet."),
  ]);
}

function facts(status) {
  const capture = status.capture;
  const parts = [["store", status.job.store], ["run", status.job.run], ["states", capture && `${capture.states.join(", ")} × ${capture.hidden_size}`],
    ...Object.entries(status.versions)];
  draw("facts", parts, () => parts.filter(([, value]) => value).map(([name, value]) => h("span", {}, `${name} ${value}`)));
}

function show(status) {
  if (fresh.time !== status.time) fresh = { time: status.time, at: Date.now() };
  shown = status;
  // A run of less than 20 minutes is drawn finely, unless somebody chose.
  if (span === null) choose(status.job.seconds < 2400 ? "recent" : "minutes");
  for (const event of status.events) events.set(event.id, event);
  if (events.size > 2 * KEPT_EVENTS) for (const id of [...events.keys()].sort((a, b) => a - b).slice(0, events.size - KEPT_EVENTS)) events.delete(id);
  $("board").hidden = false;
  $("login").hidden = true;
  for (const part of [header, banner, progress, rates, chart, underway, roots, engine, invariants, quarantine, recent, facts]) part(status);
  document.body.dataset.time = status.time;
}

function choose(name) {
  span = name;
  for (const button of document.querySelectorAll("[data-span]")) button.setAttribute("aria-pressed", String(button.dataset.span === name));
  if (shown) chart(shown);
}

// --- asking

const headers = () => token ? { Authorization: `Bearer ${token}` } : {};

function unreachable() {
  if (lost === null) lost = Date.now();
  if (shown) banner(shown);
  else if (Date.now() - lost > 3000) {
    $("banner").hidden = false;
    $("banner").className = "bad";
    $("banner").replaceChildren(h("strong", {}, "No answer from hsx"), "It is not running, or starts only now. This page goes on asking.");
  }
}

async function ask() {
  const stop = new AbortController(), timer = setTimeout(() => stop.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch("status", { headers: headers(), signal: stop.signal, cache: "no-store" });
    if (answer.status === 401) return login();
    if (!answer.ok) return unreachable();
    const status = await answer.json();
    lost = null;
    // Where the last word was heard, only another run has more to say.
    if (ended && status.job.began === shown.job.began) return;
    ended = false;
    show(status);
    listen();
  } catch {
    unreachable();
  } finally {
    clearTimeout(timer);
  }
}

function login() {
  $("board").hidden = true;
  $("login").hidden = false;
  $("login-error").textContent = token ? "That was not it." : "";
}

// EventSource cannot send a token, so the stream is read by hand.
async function listen() {
  if (listening) return;
  listening = true;
  try {
    const newest = Math.max(-1, ...events.keys());
    const answer = await fetch("events", { headers: { ...headers(), ...(newest >= 0 ? { "Last-Event-ID": String(newest) } : {}) }, cache: "no-store" });
    if (!answer.ok) return;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) hear(block);
    }
  } catch {
    // The next answer of /status brings it back.
  } finally {
    setTimeout(() => { listening = false; }, POLL_MS);
  }
}

function hear(block) {
  const data = block.match(/^data: (.*)$/m);
  if (!data) return;
  const found = JSON.parse(data[1]);
  if (/^event: ended$/m.test(block)) {
    ended = true;
    show(found);
  } else {
    events.set(found.id, found);
    recent();
  }
}

for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => choose(button.dataset.span));
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("hsx-token", token);
  ask();
});
new ResizeObserver(() => { if (shown) chart(shown); }).observe($("chart"));
ask();
setInterval(ask, POLL_MS);
