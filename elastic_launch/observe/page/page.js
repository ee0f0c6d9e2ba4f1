'use strict';
// Draws the document that is in the page; on the page of a run in progress, also those that it fetches.
// elastic_launch/observe/document.py has the fields of a document.

// Size of a picture, whose width is stretched to that of the window; the bottom of what it shows, and its distance from
// the top; the width of the longest incident's bar; parts into which marks divide a time axis; milliseconds.
const WIDTH = 960, HEIGHT = 140, FLOOR = 128, MARGIN = 4, BAR = 160, TICKS = 4, LOOK_EVERY = 1000, PATIENCE = 10000;

const find = name => document.getElementById(name);
const SVG = document.querySelector('svg').namespaceURI;
const SHAPE_OF = {
  starting: '◔', training: '●', changing: '◆', 'standing still': '▲', parked: '■', saving: '▼', ended: '✔', failed: '✖',
};
const title = document.title;
const SHAPES = new Set(['svg', 'rect', 'line', 'polyline', 'title']);

// All texts go through here, and become text.
function make(name, attributes, ...children) {
  const node = SHAPES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Draws only what has changed, which keeps what a reader has marked, or points at.
const shown = {};
function show(name, of, place, draw) {
  const key = JSON.stringify(of);
  if (shown[name] === key) return;
  shown[name] = key;
  place.replaceChildren(...draw());
}

const paragraphs = lines => lines.map(line => make('p', {}, line));

function time(run, at) {
  return run.zero === null ? `+${at.toFixed(1)} s` : new Date(1000 * (run.zero + at)).toISOString().slice(11, 19);
}

// The wall clock, and the seconds since the first event.
const clock = (run, at) => run.zero === null ? time(run, at) : `${time(run, at)} (+${ago(at)})`;

function ago(seconds) {
  const minutes = Math.round(seconds / 60);
  return seconds < 100 ? `${Math.round(seconds)} s` : minutes < 120 ? `${minutes} min` : `${Math.round(minutes / 60)} h`;
}

// Its heading is shown beside it on a narrow screen.
function cell(head, value, kind = typeof value === 'number' ? 'number' : '') {
  return make('td', {class: kind, 'data-head': head}, value instanceof Node ? value : `${value ?? '-'}`);
}

function figure(caption, range, label, shapes, run) {
  const floor = make('line', {class: 'axis', x1: 0, x2: WIDTH, y1: FLOOR, y2: FLOOR});
  const about = {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label};
  const parts = Array.from({length: TICKS + 1}, (_, part) => run.since + (run.until - run.since) * part / TICKS);
  return [
    make('figure', {}, make('figcaption', {}, caption, make('span', {}, range)), make('svg', about, ...shapes, floor)),
    make('div', {class: 'ticks dim'}, ...parts.map(at => make('span', {}, time(run, at)))),
  ];
}

function axisOf(run) {
  const whole = Math.max(run.until - run.since, 1e-6);
  return at => WIDTH * Math.min(Math.max((at - run.since) / whole, 0), 1);
}

function area(kind, left, right, height, least, text) {
  const box = {class: kind, x: left.toFixed(1), width: Math.max(least, right - left).toFixed(1)};
  return make('rect', {...box, y: (FLOOR - height).toFixed(1), height: height.toFixed(1)}, make('title', {}, text));
}

// When training stood still.
function bands(run, across) {
  return run.incidents.map(it => area('still', across(it.since), across(it.until), FLOOR, 2, it.text));
}

function rounds(run) {
  const across = axisOf(run), largest = Math.max(1, ...run.rounds.map(it => it.world));
  const bars = run.rounds.map(it =>
    area('round', across(it.since), across(it.until), (FLOOR - MARGIN) * it.world / largest, 1, it.text));
  const marks = run.marks.map(it => {
    const x = across(it.at).toFixed(1);
    return make('line', {class: `mark ${it.tone}`, x1: x, x2: x, y1: FLOOR, y2: HEIGHT}, make('title', {}, it.text));
  });
  return figure(run.label, '', run.label, [...bars, ...bands(run, across), ...marks], run);
}

function chart(run, {name, unit, points}) {
  const across = axisOf(run), values = points.map(([, value]) => value), height = FLOOR - MARGIN;
  const least = Math.min(...values), most = Math.max(...values), middle = (least + most) / 2;
  const scale = most > least ? height / (most - least) : 0;  // a value that stays is drawn in the middle
  const y = value => (FLOOR - height / 2 - scale * (value - middle)).toFixed(1);
  const short = value => String(Number(value.toPrecision(4)));
  const curve = {class: 'curve', points: points.map(([at, value]) => `${across(at).toFixed(1)},${y(value)}`).join(' ')};
  const text = `${name}: ${short(values.at(-1))}${unit}`;
  return figure(text, `${short(least)} to ${short(most)}`, text, [...bands(run, across), make('polyline', curve)], run);
}

function incident(run, it) {
  const longest = Math.max(...run.incidents.map(other => other.still_s)) || 1;
  let x = 0;
  const bars = it.parts.map((seconds, part) => {
    const width = BAR * (seconds ?? 0) / longest, text = `${run.parts[part]}: ${(seconds ?? 0).toFixed(2)} s`;
    x += width;
    const box = {class: `p${part}`, x: (x - width).toFixed(1), width: width.toFixed(1), height: 12};
    return make('rect', box, make('title', {}, text));
  });
  const spent = it.parts.map((seconds, part) => `${run.parts[part]} ${(seconds ?? 0).toFixed(2)} s`).join(', ');
  return make('tr', {},
    cell('incident', it.id), cell('at', clock(run, it.since)), cell('rounds', it.rounds, 'place'), cell('kind', it.kind),
    cell('stood still', `${it.still_s.toFixed(2)} s`, 'number'),
    cell('parts', make('svg', {width: BAR, height: 12, role: 'img', 'aria-label': spent}, ...bars), 'parts'),
    cell('steps lost', it.lost_steps, 'number'), cell('cause', it.cause));
}

function legend(parts) {
  return ['Parts:', ...parts.flatMap((name, part) => [
    make('svg', {class: 'swatch', width: 10, height: 10}, make('rect', {class: `p${part}`, width: 10, height: 10})),
    name])];
}

function draw(run) {
  show('lines', run.lines, find('lines'), () => paragraphs(run.lines));
  find('summary').textContent = run.summary;
  show('notes', run.notes, find('notes'), () => paragraphs(run.notes));
  // What grows with the time alone is drawn again once it has grown by a hundredth.
  const grown = Math.round(100 * Math.log(run.until - run.since + 1));
  show('rounds', [grown, run.rounds.length, run.incidents, run.marks], find('rounds'), () => rounds(run));
  show('charts', [grown, run.charts, run.incidents], find('charts'), () => run.charts.flatMap(it => chart(run, it)));
  find('training').hidden = !run.charts.length;
  const rows = run.incidents, body = find('incidents').tBodies[0];
  show('incidents', rows, body, () => rows.map(it => incident(run, it)));
  find('none').hidden = rows.length > 0;
  find('some').hidden = !rows.length;
  show('legend', run.parts, find('legend'), () => legend(run.parts));
  show('advice', run.advice, find('advice').querySelector('ul'), () => run.advice.map(line => make('li', {}, line)));
  find('advice').hidden = !run.advice.length;
  if (run.nodes) drawNodes(run.nodes);
  if (run.now) drawNow(run, run.now);
}

function drawNodes({about, heads, rows, marked = []}) {
  const table = find('nodes');
  find('roster').hidden = false;
  show('about', about, find('about'), () => paragraphs(about));
  show('heads', heads, table.tHead.rows[0], () => heads.map(head => make('th', {scope: 'col'}, head)));
  const kind = row => marked.includes(row) ? {class: 'marked'} : {};
  show('nodes', [rows, marked], table.tBodies[0], () => rows.map((row, at) => make('tr', kind(at), ...row.map((value, column) => cell(heads[column], value)))));
  table.parentElement.hidden = !rows.length;
}

function drawState(word, since) {
  find('word').className = word.replace(' ', '-');
  find('shape').textContent = SHAPE_OF[word] ?? '?';
  find('word').querySelector('strong').textContent = word;
  find('since').textContent = since;
  document.title = `${word} - ${title}`;
}

function drawNow(run, {doing, figures, ranks, node, state, since, safe, happened}) {
  drawState(state, `since ${time(run, since)} UTC, for ${ago(Math.max(0, run.until - since))}`);
  find('safe').textContent = safe && `State: ${safe}.`;
  const lines = happened.map(([at, text]) => `${time(run, at)}, ${ago(Math.max(0, run.until - at))} ago: ${text}`);
  show('happened', lines, find('last').querySelector('ul'), () => lines.map(line => make('li', {}, line)));
  find('last').hidden = !lines.length;
  const now = find('now');
  now.hidden = false;
  headline.textContent = doing;
  show('figures', figures, now.querySelector('dl'), () =>
    figures.map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value))));
  const before = rank.value;
  show('ranks', ranks, rank, () => ['', ...ranks].map(number => make('option', {value: number}, `${number}`)));
  if (before && ranks.includes(Number(before))) rank.value = before;
  find('node').textContent = node;
}

const [headline, rank, log, state, pause] = ['headline', 'rank', 'log', 'state', 'pause'].map(find);
const me = Math.random().toString(36).slice(2);  // the server tells each page of the end
const base = location.origin + location.pathname.replace(/\/*$/, '/');  // a proxy may leave the last slash out
let turn = 0, tries = 0, answered = Date.now();

async function ask(path) {
  const answer = await fetch(base + path, {signal: AbortSignal.timeout(PATIENCE)});
  if (!answer.ok) throw new Error(answer.status);
  return answer.text();
}

async function output() {
  const chosen = rank.value, end = log.scrollHeight - log.scrollTop - log.clientHeight < 8;
  log.hidden = !chosen;
  if (!chosen) return;
  const text = await ask('log?rank=' + chosen).catch(() => null);
  if (text === null || chosen !== rank.value || text === log.textContent) return;
  log.textContent = text;
  if (end) log.scrollTop = log.scrollHeight;
}

async function look(mine) {
  const text = await ask('live?page=' + me).catch(() => null);
  if (mine !== turn) return;
  if (text !== null) {
    const run = last = JSON.parse(text);
    tries = 0;
    state.textContent = run.now.ended ? 'no longer updated' : 'live';
    pause.hidden = run.now.ended;
    draw(run);
    await output();
    if (run.now.ended) return;
    answered = Date.now();
  } else if (++tries > 3) {
    state.textContent = 'the agent does not answer';
    const when = new Date(answered).toISOString().slice(11, 19);
    drawState('no answer', `from the agent since ${when} UTC: the run has ended, or the agent cannot be reached`);
    headline.textContent = `Before: ${last.now.state}; ${last.now.doing}`;
  }
  if (mine === turn) setTimeout(() => mine === turn && look(mine), LOOK_EVERY);
}

let last = JSON.parse(find('document').textContent);
draw(last);
if (last.now) {
  find('live').hidden = find('output').hidden = false;
  rank.onchange = () => { log.textContent = ''; output(); };
  pause.onclick = () => {
    turn += 1;
    const paused = pause.textContent === 'Pause';
    pause.textContent = paused ? 'Resume' : 'Pause';
    if (paused) state.textContent = 'paused';
    else look(turn);
  };
  if (last.now.ended) [state.textContent, pause.hidden] = ['no longer updated', true];
  else look(turn);
}
