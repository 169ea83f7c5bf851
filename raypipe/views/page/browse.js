// The page: a list of episodes beside one of four views, which the address says.
//
//   /?episode=3&frame=40          an episode      /?step=5&batch_size=16&seed=0    a batch
//   /?view=findings               findings        /?view=dataset                   the dataset

import { Plot, drawHistogram, element, sharedScales } from "/plots.js";
import { Player } from "/player.js";

const ROW = 50;
const $ = (id) => document.getElementById(id);
const data = { about: null, list: null, findings: { stage: "waiting", folds: [], by_episode: {} } };
let rows = [], shown = { view: "", episode: null }, player = null, plots = [], asked = 0;

async function ask(path) {
  const answer = await fetch(path);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || `the server answered with ${answer.status}`);
  return content;
}

function tell(error) {
  $("trouble").hidden = !error;
  $("trouble").textContent = error ? error.message : "";
}

const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const seconds = (frames) => `${(frames / data.about.fps).toFixed(1)} s`;
const taskText = (row) => data.list.tasks[row].map((place) => data.list.texts[place]).join(" · ");
const rowOf = (episode) => data.list.episode.indexOf(episode);

// --- The list -------------------------------------------------------------------------------------------------------

function filterRows() {
  const words = $("filter-text").value.trim().toLowerCase(), task = $("filter-task").value, found = $("filter-findings").value;
  const least = parseFloat($("filter-least").value) || 0, most = parseFloat($("filter-most").value) || Infinity;
  rows = [];
  data.list.episode.forEach((episode, row) => {
    const length = data.list.length[row] / data.about.fps, severity = data.findings.by_episode[episode];
    if (length < least || length > most) return;
    if (task !== "" && !data.list.tasks[row].includes(Number(task))) return;
    if (found === "some" && !severity) return;
    if (found === "none" && severity) return;
    if (found === "error" && severity !== "error") return;
    if (words && String(episode) !== words && !taskText(row).toLowerCase().includes(words)) return;
    rows.push(row);
  });
  const total = data.list.episode.length;
  $("filter-count").textContent = rows.length === total ? counted(total, "episode") : `${rows.length.toLocaleString("en")} of ${counted(total, "episode")}`;
  $("filter-clear").hidden = rows.length === total;
  drawList();
  moveButtons();
}

function drawList() {
  const list = $("list"), inside = $("list-inside");
  inside.style.height = `${rows.length * ROW}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4);
  inside.replaceChildren(...rows.slice(first, last).map((row, place) => listItem(row, first + place)));
}

function listItem(row, place) {
  const episode = data.list.episode[row], severity = data.findings.by_episode[episode];
  const which = element("span", { class: "which", text: `Episode ${episode}` });
  if (severity) which.append(element("span", { class: `dot ${severity}`, title: `findings: ${severity}` }));
  const item = element("a", { class: "item", href: `/?episode=${episode}`, "data-go": "" }, which,
    element("span", { class: "long", text: seconds(data.list.length[row]) }),
    element("span", { class: "task", text: taskText(row) || "(no task)", title: taskText(row) }));
  item.style.top = `${place * ROW}px`;
  if (shown.view === "episode" && shown.episode === episode) item.setAttribute("aria-current", "true");
  return item;
}

function scrollToEpisode() {
  const place = rows.indexOf(rowOf(shown.episode)), list = $("list");
  if (place >= 0 && (place * ROW < list.scrollTop || (place + 1) * ROW > list.scrollTop + list.clientHeight)) {
    list.scrollTop = (place + 0.5) * ROW - list.clientHeight / 2;
  }
  drawList();
}

function neighbour(by) {
  const here = rowOf(shown.episode), place = rows.indexOf(here);
  // An episode that the filter leaves out has the nearest ones as neighbours.
  if (place < 0) return by > 0 ? rows.find((row) => row > here) : rows.findLast((row) => row < here);
  return rows[place + by];
}

function moveButtons() {
  $("previous").disabled = neighbour(-1) === undefined;
  $("next").disabled = neighbour(1) === undefined;
}

function move(by) {
  const row = neighbour(by);
  if (row !== undefined) go(`/?episode=${data.list.episode[row]}`);
}

// --- An episode -----------------------------------------------------------------------------------------------------

async function showEpisode(query) {
  const first = data.list.episode[0];
  if (first === undefined) throw new Error("the dataset has no episode");
  const number = Number(query.get("episode") ?? first), mine = ++asked;
  shown.episode = number;
  scrollToEpisode(); moveButtons();
  const wasPlaying = player?.isPlaying && shown.loaded !== undefined;
  const episode = await ask(`/api/episode?episode=${encodeURIComponent(query.get("episode") ?? first)}`);
  if (mine !== asked) return;
  player?.close();
  shown.loaded = number;
  document.title = `Episode ${number}, ${data.about.name}`;
  $("episode-title").textContent = `Episode ${number}`;
  $("episode-tasks").replaceChildren(...episode.tasks.map((run) => taskButton(run, episode)));
  $("episode-errors").replaceChildren(...[...episode.errors.map((text) => element("p", { class: "trouble", text })), ...episodeFindings(number)]);
  $("cameras").replaceChildren();
  $("scrub").max = episode.length - 1;
  player = new Player($("cameras"), episode, data.about.fps, showFrame, showState);
  player.setRate(Number($("rate").value));
  const scales = sharedScales(episode.curves);
  plots = episode.curves.map((one, place) => new Plot(one, scales[place], episode, data.about.fps, (frame) => player.seek(frame)));
  $("plots").replaceChildren(...plots.map((one) => one.root));
  plots.forEach((one) => one.draw());
  player.seek(Number(query.get("frame") ?? 0));
  showState();
  if (wasPlaying) player.play();
}

function taskButton(run, episode) {
  const isWhole = episode.tasks.length === 1;
  const button = element("button", { class: "task-run", type: "button", text: run.text || "(no text)" });
  if (!isWhole) button.append(element("span", { class: "dim", text: `  ${seconds(run.start)} to ${seconds(run.stop)}` }));
  button.title = isWhole ? "The task of this episode" : "Go to where this task begins";
  button.addEventListener("click", () => player.seek(run.start));
  button.run = run;
  return button;
}

function episodeFindings(number) {
  return data.findings.folds.filter((fold) => fold.episodes.includes(number)).map((fold) => {
    const here = fold.details.filter((one) => one.episodes.includes(number)).map((one) => one.message);
    const summary = element("summary", {}, element("span", { class: `pill ${fold.severity}`, text: fold.severity }), " ",
      element("b", { text: fold.kind }), ` ${here[0] ?? fold.message}`);
    const more = here.slice(1, 8).map((text) => element("p", { text }));
    return element("details", { class: "finding slim" }, summary, ...more, element("p", { class: "dim", text: `Remedy: ${fold.remedy}` }));
  });
}

function showFrame(frame) {
  $("scrub").value = frame;
  const length = player.episode.length;
  $("clock").textContent = `frame ${frame} of ${length} · ${(frame / data.about.fps).toFixed(2)} s`;
  $("scrub").setAttribute("aria-valuetext", $("clock").textContent);
  for (const plot of plots) plot.show(frame);
  for (const button of $("episode-tasks").children) {
    const isHere = player.episode.tasks.length > 1 && frame >= button.run.start && frame < button.run.stop;
    if (isHere) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
  }
}

function showState() {
  $("play").textContent = player?.isPlaying ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(Boolean(player?.isPlaying)));
}

// --- A batch --------------------------------------------------------------------------------------------------------

const BATCH = ["step", "batch_size", "seed", "epoch", "rank", "world_size"];

async function showBatch(query) {
  const form = $("batch-form").elements, wanted = new URLSearchParams(), mine = ++asked;
  for (const name of BATCH) {
    if (query.has(name)) form[name].value = query.get(name);
    wanted.set(name, form[name].value);
  }
  document.title = `Step ${form.step.value}, ${data.about.name}`;
  $("batch-title").textContent = `Step ${form.step.value}`;
  $("batch-frames").replaceChildren();
  $("batch-told").textContent = "Planning ...";
  const batch = await ask(`/api/batch?${wanted}`).catch((error) => { $("batch-told").textContent = ""; throw error; });
  if (mine !== asked) return;
  shown.batch = batch;
  const episodes = new Set(batch.episode).size;
  $("batch-title").textContent = `Step ${form.step.value} of ${batch.num_steps.toLocaleString("en")}`;
  $("batch-told").textContent = `${counted(batch.frame.length, "frame")} from ${counted(episodes, "episode")}, in the order of the batch: `
    + `rp.Pipeline(ds, batch_size=${form.batch_size.value}, seed=${form.seed.value}) with its defaults plans them so.`;
  $("step-before").disabled = Number(form.step.value) < 1;
  $("step-after").disabled = Number(form.step.value) + 1 >= batch.num_steps;
  drawBatch();
}

function drawBatch() {
  const camera = $("batch-camera").value, batch = shown.batch;
  if (!batch) return;
  $("batch-frames").replaceChildren(...batch.episode.map((episode, place) => {
    const frame = batch.frame[place], picture = element("div", { class: "picture", text: camera === "" ? "no camera" : "" });
    if (camera !== "") {
      const source = `/frame?episode=${episode}&camera=${camera}&frame=${frame}&size=small`;
      const image = element("img", { loading: "lazy", alt: "", src: source });
      image.addEventListener("error", () => picture.replaceChildren("cannot be decoded"));
      picture.append(image);
    }
    const text = element("div", { class: "text" }, element("b", { text: `Episode ${episode}` }), ` frame ${frame} `,
      element("div", { class: "dim", text: taskText(rowOf(episode)), title: taskText(rowOf(episode)) }));
    if (batch.is_repeat[place]) text.append(element("span", { class: "pill warning", text: "repeat" }));
    return element("a", { class: "frame", href: `/?episode=${episode}&frame=${frame}`, "data-go": "" }, picture, text);
  }));
}

function moveStep(by) {
  const form = $("batch-form").elements, step = Number(form.step.value) + by;
  if (step >= 0 && shown.batch && step < shown.batch.num_steps) { form.step.value = step; submitBatch(); }
}

function submitBatch() {
  const wanted = new URLSearchParams();
  for (const name of BATCH) wanted.set(name, $("batch-form").elements[name].value || "0");
  go(`/?${wanted}`);
}

// --- Findings and the dataset ---------------------------------------------------------------------------------------

async function watchFindings(start = false) {
  data.findings = await ask(`/api/findings${start ? "?start=1" : ""}`);
  const { folds, stage } = data.findings, worst = folds[0]?.severity ?? "", badge = $("findings-badge");
  badge.hidden = stage !== "done";
  badge.textContent = folds.length;
  badge.className = `badge ${worst}`;
  filterRows();
  if (shown.view === "findings") drawFindings();
  if (shown.view === "episode" && stage === "done" && shown.loaded !== undefined) {
    const errors = [...$("episode-errors").children].filter((one) => one.classList.contains("trouble"));
    $("episode-errors").replaceChildren(...errors, ...episodeFindings(shown.loaded));
  }
  if (stage === "running") setTimeout(() => watchFindings().catch(() => {}), 700);
}

function drawFindings() {
  const { stage, folds, error } = data.findings, box = $("findings");
  if (stage === "waiting") {
    const button = element("button", { class: "primary", text: "Check all files", onclick: () => watchFindings(true).catch(tell) });
    box.replaceChildren(element("p", { text: "Files were not checked yet: there are many, or they are not on this machine." }), button);
  } else if (stage === "running") box.replaceChildren(element("p", { class: "dim", text: "Checking files ..." }));
  else if (stage === "failed") box.replaceChildren(element("p", { class: "trouble", text: error }));
  else if (!folds.length) box.replaceChildren(element("p", { text: "Nothing is wrong with it." }));
  else box.replaceChildren(...folds.map(findingCard));
}

function findingCard(fold) {
  const card = element("article", { class: "finding" },
    element("header", {}, element("span", { class: `pill ${fold.severity}`, text: fold.severity }), element("b", { text: fold.kind }),
      element("span", { class: "dim", text: fold.place.split("\n").join(", ") })),
    element("p", { text: fold.message }), element("p", { class: "dim", text: `Remedy: ${fold.remedy}` }));
  if (fold.episodes.length) {
    const links = element("div", { class: "links" });
    for (const episode of fold.episodes.slice(0, 24)) links.append(element("a", { href: `/?episode=${episode}`, "data-go": "", text: episode }));
    if (fold.episodes.length > 24) links.append(element("span", { class: "dim", text: `and ${counted(fold.episodes.length - 24, "more episode")}` }));
    card.append(links);
  }
  return card;
}

function showDataset() {
  document.title = data.about.name;
  const lines = [["root", data.about.root], ...data.about.lines];
  $("facts").replaceChildren(...lines.map(([name, text]) => element("tr", {}, element("th", { scope: "row", text: name }), element("td", { text }))));
  $("lengths-title").textContent = `Lengths of ${counted(data.list.length.length, "episode")}`;
  drawHistogram($("lengths"), data.list.length, data.about.fps);
  const counts = data.list.texts.map(() => 0);
  for (const places of data.list.tasks) for (const place of places) counts[place]++;
  const order = counts.map((_, place) => place).sort((one, other) => counts[other] - counts[one]);
  $("tasks-title").textContent = counted(order.length, "task");
  $("tasks").replaceChildren(...order.slice(0, 200).map((place) => element("tr", {},
    element("td", { text: data.list.texts[place] || "(no text)" }),
    element("td", { class: "number", text: counted(counts[place], "episode") }))));
}

// --- Addresses, keys ------------------------------------------------------------------------------------------------

const VIEWS = { episode: showEpisode, batch: showBatch, findings: drawFindings, dataset: showDataset };

function viewOf(query) {
  if (query.has("step")) return "batch";
  return query.get("view") in VIEWS ? query.get("view") : "episode";
}

function hideToken() {
  // The cookie has it now: an address that is copied, or kept in the history, lets nobody in.
  const address = new URL(location.href);
  if (!address.searchParams.has("token")) return;
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

async function route() {
  const query = new URLSearchParams(location.search), view = viewOf(query);
  if (view !== "episode") player?.pause();
  shown.view = view;
  for (const name of Object.keys(VIEWS)) $(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  $("side").classList.remove("is-open"); $("toggle-list").setAttribute("aria-expanded", "false");
  tell(null);
  drawList();
  try { await VIEWS[view](query); } catch (error) { tell(error); }
}

function go(address) {
  history.pushState(null, "", address);
  route();
}

function redraw() {
  if (shown.view === "episode") plots.forEach((one) => one.draw());
  if (shown.view === "dataset") showDataset();
  drawList();
}

function turnTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("raypipe-theme", theme); } catch { /* A browser may forbid it. */ }
  redraw();
}

function onKey(event) {
  const isTyping = event.target.matches("input:not([type=range]), select, textarea");
  if (event.key === "Escape" && isTyping) event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], frames = event.shiftKey ? Math.max(1, Math.round(data.about.fps)) : 1;
  const isEpisode = shown.view === "episode" && player;
  if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else if (event.key === "/") $("filter-text").focus();
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === " " && isEpisode) { player.toggle(); document.activeElement?.matches("button") && document.activeElement.blur(); }
  else if (by && isEpisode) { player.pause(); player.seek(player.frame + by * frames); }
  else if (by && shown.view === "batch") moveStep(by);
  else if (event.key === "Home" && isEpisode) player.seek(0);
  else if (event.key === "End" && isEpisode) { player.pause(); player.seek(player.episode.length - 1); }
  else return;
  event.preventDefault();
}

function listen() {
  document.addEventListener("keydown", onKey);
  // A button that has the focus would take the space bar, too.
  document.addEventListener("keyup", (event) => { if (event.key === " " && event.target.matches("button") && shown.view === "episode") event.preventDefault(); });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-go], nav a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  window.addEventListener("popstate", route);
  window.addEventListener("resize", redraw);
  $("list").addEventListener("scroll", drawList);
  $("filters").addEventListener("input", () => { $("list").scrollTop = 0; filterRows(); });
  $("filters").addEventListener("reset", () => setTimeout(filterRows));
  $("filters").addEventListener("submit", (event) => { event.preventDefault(); if (rows.length) go(`/?episode=${data.list.episode[rows[0]]}`); });
  $("play").addEventListener("click", () => player?.toggle());
  $("scrub").addEventListener("input", () => player?.seek(Number($("scrub").value)));
  $("rate").addEventListener("change", () => player?.setRate(Number($("rate").value)));
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("batch-form").addEventListener("submit", (event) => { event.preventDefault(); submitBatch(); });
  $("step-before").addEventListener("click", () => moveStep(-1));
  $("step-after").addEventListener("click", () => moveStep(1));
  $("batch-camera").addEventListener("change", drawBatch);
  $("theme").addEventListener("click", turnTheme);
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("toggle-list").addEventListener("click", () => {
    const isOpen = $("side").classList.toggle("is-open");
    $("toggle-list").setAttribute("aria-expanded", String(isOpen));
    drawList();
  });
}

async function begin() {
  [data.about, data.list] = await Promise.all([ask("/api/about"), ask("/api/episodes")]);
  const total = data.list.length.reduce((sum, one) => sum + one, 0);
  $("dataset-name").textContent = data.about.name; $("dataset-name").title = data.about.root;
  $("dataset-sum").textContent = `${counted(data.list.episode.length, "episode")}, ${counted(total, "frame")} at ${data.about.fps} fps`;
  data.list.texts.forEach((text, place) => $("filter-task").append(element("option", { value: place, text: text || "(no text)" })));
  $("filter-task").hidden = data.list.texts.length < 2;
  data.about.cameras.forEach((camera, place) => $("batch-camera").append(element("option", { value: place, text: camera.short })));
  $("batch-camera-label").hidden = data.about.cameras.length < 2;
  listen();
  filterRows();
  await route();
  document.body.dataset.ready = "";
  watchFindings().catch(tell);
}

hideToken();
begin().catch(tell);
