// The page: asks status.json once a second, which says something new as often, and draws what it says. Curves are of what was seen while the page is open.
import { Curves, RankMap, drawBars, swatch } from "./pictures.js";
import { bytes, clock, count, element, fillTable, fillText, orDash, pace, percent, seconds } from "./text.js";

const PERIOD_MS = 1000;
const RETRY_MS = 150; // the answer was still the one before
const LIMIT_MS = 5000;
const KEPT_SAMPLES = 600; // ten minutes
const SLOW_SHARE = 0.2; // where the alert SharddStraggler begins
const PHASES = ["forward", "backward", "waiting", "reduction", "optimizer", "commit"];
// By number, as rank_states has them: what it is called, and its colour.
const STATES = [
  ["unknown", "c7"],
  ["absent", "gone"],
  ["attaching", "c5"],
  ["idle", "c7"],
  ["forward", "c0"],
  ["backward", "c1"],
  ["stepped", "c4"],
  ["full_params", "c3"],
  ["finished", "c9"],
];

const at = (id) => document.getElementById(id);
const keyOf = (job) => `${job.uid} ${job.name}`;
const samples = new Map(); // by job: what was seen of it
const colours = new Map(); // by purpose: in the order in which they came
let links = new Map(); // by job and node: bytes at the time before
let chosen = new URLSearchParams(location.hash.slice(1));
let heard = null; // when the daemon was last heard, by performance.now()
let latest = null;

const purposeClass = (purpose) => {
  if (!colours.has(purpose)) colours.set(purpose, `c${colours.size % 10}`);
  return colours.get(purpose);
};

const hovered = { time: null, pace: null };
const stepTime = new Curves(at("step-time"), {
  series: PHASES.map((phase) => (sample) => (sample.step_s === null ? null : sample.phases[phase])),
  stacked: true,
  format: seconds,
  classOf: (number) => `c${number}`,
  show: (sample) => {
    hovered.time = sample;
    sayCurves();
  },
});
const throughput = new Curves(at("throughput"), {
  series: [(sample) => sample.pace],
  stacked: false,
  format: pace,
  show: (sample) => {
    hovered.pace = sample;
    sayCurves();
  },
});
const rankMap = new RankMap(at("rank-map"));
let shown = null; // the newest sample of the job that is shown

function sayCurves() {
  const time = hovered.time ?? shown;
  const parts = time && time.step_s !== null ? PHASES.map((phase) => `${phase} ${seconds(time.phases[phase])}`) : [];
  at("phases").replaceChildren(...PHASES.map((phase, number) => element("li", "", swatch(`c${number}`), parts[number] ?? phase)));
  fillText("step-time-now", time && time.step_s !== null ? seconds(time.step_s) : "no step yet");
  const now = hovered.pace ?? shown;
  fillText("throughput-now", now ? `${pace(now.pace)}${now.reduced === null ? "" : `, ${bytes(now.reduced)} of gradients a second`}` : "");
}

function keep(status) {
  const there = new Set();
  for (const job of status.jobs) {
    const key = keyOf(job);
    there.add(key);
    const list = samples.get(key) ?? [];
    const { step_s, phases_s, steps_per_s, reduced_bytes_per_s } = job.pace;
    list.push({ time: status.time_unix_ms, step_s, phases: phases_s, pace: steps_per_s, reduced: reduced_bytes_per_s });
    samples.set(key, list.slice(-KEPT_SAMPLES));
  }
  for (const key of samples.keys()) if (!there.has(key)) samples.delete(key);
}

function choose(job) {
  chosen = new URLSearchParams({ job: job.name, uid: job.uid });
  history.replaceState(null, "", `#${chosen}`);
  if (latest) draw(latest);
  ask();
}

const slowText = ({ slowest_rank, slowest_share }) =>
  slowest_rank === null || slowest_share === 0 ? "–" : `rank ${slowest_rank}, ${percent(slowest_share)}`;
const slowClass = ({ slowest_share }) => (slowest_share >= SLOW_SHARE ? "warn" : "");

function drawJobs(status, job) {
  const columns = [
    ["Job", "wide"], ["User", "number"], ["State"], ["Ranks", "number"], ["Step", "number"], ["Step time", "number"],
    ["Steps/s", "number"], ["Goodput", "number"], ["Slowest rank, awaited"], ["Memory", "number"], ["Last commit", "number"],
  ]; // prettier-ignore
  const rows = status.jobs.map((each) => [
    { text: each.name, action: () => choose(each) },
    each.uid,
    each.state,
    { text: `${each.attached_ranks}/${each.world_size}`, className: each.attached_ranks === each.world_size ? "" : "bad" },
    each.step,
    seconds(each.pace.step_s),
    pace(each.pace.steps_per_s),
    percent(each.goodput),
    { text: slowText(each.pace), className: slowClass(each.pace) },
    bytes(each.memory.allocated_bytes),
    seconds(each.since_commit_s),
  ]);
  fillTable(at("jobs"), columns, rows, {
    empty: status.hidden_jobs > 0 ? "none that you may see" : "none",
    selected: status.jobs.indexOf(job),
  });
}

function drawTiles(job) {
  const lost = Object.entries(job.interruptions).filter(([, times]) => times > 0);
  const tiles = [
    ["step", job.step, ""],
    ["step time", seconds(job.pace.step_s), ""],
    ["steps a second", pace(job.pace.steps_per_s), ""],
    ["goodput", percent(job.goodput), job.goodput !== null && job.goodput < 0.8 ? "warn" : ""],
    ["slowest rank, awaited", slowText(job.pace), slowClass(job.pace)],
    ["lost work", seconds(job.lost_work_s), job.lost_work_s > 0 ? "warn" : ""],
    ["interruptions", lost.length ? lost.map(([cause, times]) => `${times} ${cause}`).join(", ") : "0", ""],
    ["parameters", count(job.parameters), ""],
    ["epoch", job.epoch, ""],
    ["departures", job.departures, ""],
    ["reduced by", orDash(job.collective), ""],
  ];
  at("tiles").replaceChildren(
    ...tiles.map(([name, value, className]) => element("div", "", element("dt", "", name), element("dd", className, `${value}`))),
  );
}

function drawRanks(job, selected) {
  const digits = [...job.rank_states].map(Number);
  const stateOf = (digit) => STATES[digit] ?? STATES[0];
  const ranks = selected && selected.job === job.name && selected.uid === job.uid ? selected.ranks : [];
  const waits = (rank) => (ranks[rank]?.waits ? `, waits for ${ranks[rank].waits}` : "");
  rankMap.draw(
    digits.map((digit) => stateOf(digit)[1]),
    digits.map((digit, rank) => `rank ${rank}: ${stateOf(digit)[0]}${waits(rank)}`),
  );
  const counted = STATES.map(([name, className], digit) => [name, className, digits.filter((each) => each === digit).length]);
  at("rank-states").replaceChildren(
    ...counted.filter(([, , times]) => times).map(([name, className, times]) => element("li", "", swatch(className), `${times} ${name}`)),
  );
  const waiting = ranks.filter((rank) => rank.waits).length;
  fillText("ranks-now", `${job.attached_ranks} of ${job.world_size} attached, ${waiting} wait`);
  const columns = [["Rank", "number"], ["State"], ["Waits for", "wide"], ["Awaited", "number"], ["Last command"], ["Before", "number"], ["Device"], ["Pid", "number"]];
  const rows = ranks.map((rank, number) => {
    const share = number === job.pace.slowest_rank ? job.pace.slowest_share : (job.pace.awaited[number] ?? 0);
    return [
      number,
      { text: rank.state, className: rank.state === "absent" ? "bad" : rank.state === "attaching" ? "warn" : "" },
      orDash(rank.waits),
      { text: share ? percent(share) : "–", className: share >= SLOW_SHARE ? "warn" : "" },
      orDash(rank.last),
      rank.last ? seconds(rank.age_ms / 1000) : "–",
      rank.device,
      rank.pid ? rank.pid : "–",
    ];
  });
  fillTable(at("ranks"), columns, rows, { empty: "not told yet" });
}

function drawMemory(job) {
  const bars = new Map();
  const barOf = (name) => {
    if (!bars.has(name)) bars.set(name, { name, total: 0, planned: 0, pieces: [] });
    return bars.get(name);
  };
  for (const purpose of job.memory.purposes) {
    const className = purposeClass(purpose.purpose);
    const parts = purpose.devices.length ? purpose.devices : [{ device: "host", bytes: purpose.allocated_bytes }];
    for (const part of parts) {
      const bar = barOf(part.device);
      const title = `${purpose.purpose}: ${bytes(part.bytes)} on ${part.device}${purpose.backing ? `, ${purpose.backing}` : ""}`;
      bar.total += part.bytes;
      bar.planned += purpose.devices.length ? part.bytes : purpose.planned_bytes;
      if (part.bytes > 0) bar.pieces.push({ bytes: part.bytes, class: className, title });
    }
  }
  drawBars(at("memory"), [...bars.values()], bytes);
  at("purposes").replaceChildren(
    ...job.memory.purposes
      .filter((purpose) => purpose.planned_bytes + purpose.allocated_bytes > 0)
      .map((purpose) => element("li", "", swatch(purposeClass(purpose.purpose)), `${purpose.purpose} ${bytes(purpose.allocated_bytes)}`)),
  );
  fillText("memory-now", `${bytes(job.memory.allocated_bytes)} of ${bytes(job.memory.planned_bytes)} planned`);
}

function drawNodes(job, timeMs) {
  at("links").hidden = job.nodes.length === 0;
  const rate = (node, name) => {
    const before = links.get(`${keyOf(job)} ${node.index}`);
    const past = before ? (timeMs - before.timeMs) / 1000 : 0;
    return past > 0 && node[name] >= before[name] ? `${bytes((node[name] - before[name]) / past)}/s` : "–";
  };
  const columns = [["Node", "number"], ["Address"], ["Link", "wide"], ["Sent", "number"], ["", "number"], ["Received", "number"], ["", "number"]];
  const rows = job.nodes.map((node) => [
    node.index,
    node.address,
    { text: node.here ? "this node" : node.state, className: node.here ? "" : node.state === "up" ? "good" : "bad" },
    bytes(node.bytes_sent),
    rate(node, "bytes_sent"),
    bytes(node.bytes_received),
    rate(node, "bytes_received"),
  ]);
  fillTable(at("nodes"), columns, rows);
  links = new Map(job.nodes.map((node) => [`${keyOf(job)} ${node.index}`, { ...node, timeMs }]));
}

function drawDaemon(status) {
  const { daemon } = status;
  fillText("version", daemon.version);
  const lag = daemon.loop_lag_s === null ? "" : `, loop lag ${seconds(daemon.loop_lag_s)}`;
  fillText("facts", `up ${seconds(Math.max(0, status.time_unix_ms - daemon.start_unix_ms) / 1000)}, ${bytes(daemon.free_memory_bytes)} of memory free${lag}`);
  const busy = (device) => Object.entries(device.busy).map(([stream, share]) => `${stream} ${percent(share)}`);
  fillTable(
    at("devices"),
    [["Device"], ["State", "wide"], ["Streams' time in operations", "wide"], ["What it is", "wide"]],
    daemon.devices.map((device) => [
      device.name,
      { text: device.lost ? `lost: ${device.lost}` : "works", className: device.lost ? "bad" : "good" },
      orDash(busy(device).join(", ")),
      orDash(device.description),
    ]),
  );
  fillTable(
    at("incidents"),
    [["Time"], ["Job"], ["Step", "number"], ["Rank", "number"], ["What"], ["Why", "wide"]],
    status.incidents.map((each) => [
      clock(each.unix_ms),
      each.job,
      each.step,
      orDash(each.rank),
      { text: each.kind, className: each.kind === "epoch" ? "" : "bad" },
      each.text,
    ]),
    { empty: "none that is remembered" },
  );
  const hidden = status.hidden_jobs;
  const others = hidden ? `${hidden} ${hidden === 1 ? "job is" : "jobs are"} hidden: ` : "";
  at("note").hidden = status.viewer.sees === "all" && !hidden;
  fillText("note", `${others}${status.viewer.why}.`);
}

function draw(status) {
  const job = status.jobs.find((each) => each.name === chosen.get("job") && `${each.uid}` === chosen.get("uid")) ?? status.jobs[0] ?? null;
  drawDaemon(status);
  drawJobs(status, job);
  at("job").hidden = job === null;
  if (!job) return;
  fillText("job-name", `${job.name} of user ${job.uid}`);
  drawTiles(job);
  const seen = samples.get(keyOf(job)) ?? [];
  shown = seen[seen.length - 1] ?? null;
  stepTime.draw(seen);
  throughput.draw(seen);
  drawRanks(job, status.selected);
  drawMemory(job);
  drawNodes(job, status.time_unix_ms);
}

function sayState(problem) {
  const silent = problem !== null;
  at("state").className = silent ? "silent" : "live";
  document.querySelector("main").classList.toggle("silent", silent && latest !== null);
  const since = heard === null ? "" : `, for ${seconds(Math.round((performance.now() - heard) / 1000))}`;
  fillText("state", silent ? `${problem}${since}` : "live");
}

// Null: nobody answered.
async function answerTo(question) {
  try {
    const answer = await fetch(question, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

let asking = false;
let askAgain = false;
let timer = null;

// Whether it says what is known already.
function take(status) {
  if (status === null || status.daemon === null) {
    sayState(status === null ? "shardd-metrics does not answer" : "the daemon does not answer");
    return false;
  }
  heard = performance.now();
  const isOld = status.time_unix_ms === latest?.time_unix_ms;
  askAgain ||= latest === null && status.jobs.length > 0; // with the ranks of the one that is shown
  if (!isOld) keep(status);
  latest = status;
  draw(status);
  sayState(null);
  return isOld;
}

async function ask() {
  if (asking) {
    askAgain = true;
    return;
  }
  clearTimeout(timer);
  asking = true;
  const first = latest?.jobs[0];
  const which = chosen.has("job") || !first ? chosen : new URLSearchParams({ job: first.name, uid: first.uid });
  const status = await answerTo(`status.json?${which}`);
  let wait = PERIOD_MS;
  try {
    if (take(status)) wait = RETRY_MS;
  } finally {
    asking = false;
    timer = setTimeout(askUnlessHidden, askAgain ? 0 : wait);
    askAgain = false;
  }
}

function askUnlessHidden() {
  if (!document.hidden) ask();
}
document.addEventListener("visibilitychange", askUnlessHidden);
ask();
