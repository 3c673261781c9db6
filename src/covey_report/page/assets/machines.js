"use strict";
// Machines as solids that are turned, sorted and painted here. Nothing moves before somebody asks for it.
const KINDS = { root: [42, 157, 143], rigid: [224, 180, 130], rod: [185, 139, 94], wheel: [92, 102, 112], rotor: [231, 111, 81], hinge: [244, 162, 97], ball: [244, 162, 97], swivel: [244, 162, 97], suspension: [163, 177, 138], container: [169, 197, 232], boulder: [141, 153, 174], caster: [92, 102, 112], pad: [132, 165, 157] };
const LIGHT = [.45, .8, -.4].map((v) => v / Math.hypot(.45, .8, .4));
const SUNK = .03, MARGIN = .6, GRID = 5;
const playing = new Set();

function dot(a, b) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

function stopMachines() {
  playing.forEach((stop) => stop());
  playing.clear();
}

// Where the bodies are at a moment: origin, and the directions of their three axes.
function bodiesAt(one, moment) {
  if (!one.motion) return one.pivots.map((origin) => ({ origin, axes: null }));
  const row = one.motion.moments[moment], n = one.motion.bodies;
  return Array.from({ length: n }, (_, b) => {
    const origin = [0, 1, 2].map((k) => row[3 * b + k] / 100), at = 3 * n + 6 * b;
    const x = [0, 2, 4].map((k) => row[at + k] / 1000), y = [1, 3, 5].map((k) => row[at + k] / 1000);
    return { origin, axes: [x, y, [x[1] * y[2] - x[2] * y[1], x[2] * y[0] - x[0] * y[2], x[0] * y[1] - x[1] * y[0]]] };
  });
}

function turned(body, v) {
  const a = body.axes;
  return a ? [0, 1, 2].map((k) => a[0][k] * v[0] + a[1][k] * v[1] + a[2][k] * v[2]) : v;
}

function placed(body, v) {
  const at = turned(body, v);
  return [at[0] + body.origin[0], at[1] + body.origin[1], at[2] + body.origin[2]];
}

// Solids at a moment, each with its points and the faces that are seen, what hides others last.
function scene(one, view, moment) {
  const bodies = bodiesAt(one, moment);
  const solids = one.solids.map((solid) => {
    const body = bodies[solid.body], points = [];
    const faces = solid.faces.map(([outward, flat]) => {
      const corners = [];
      for (let k = 0; k < flat.length; k += 3) corners.push(placed(body, flat.slice(k, k + 3)));
      points.push(...corners);
      return { outward: turned(body, outward), corners };
    }).filter((face) => dot(face.outward, view.into) < -1e-6);
    return { kind: solid.kind, points, faces, depth: points.reduce((sum, p) => sum + dot(p, view.into), 0) / points.length };
  });
  const lines = one.lines.map(([kind, of, ends]) => ({ kind, ends: ends.map((end, k) => placed(bodies[of[k]], end)) }));
  return { solids: fromBehind(solids), lines, root: bodies[0].origin };
}

// One that lies before a seen face of another cannot be hidden by it; a circle begins with the farthest.
function fromBehind(solids) {
  const left = [...solids].sort((a, b) => b.depth - a.depth), order = [];
  const isBefore = (other, face) => { const level = dot(face.outward, face.corners[0]); return other.points.every((p) => dot(face.outward, p) - level >= -SUNK); };
  left.forEach((one) => { one.before = new Set(left.filter((other) => other !== one && one.faces.some((face) => isBefore(other, face)))); });
  while (left.length) {
    const free = left.findIndex((one) => !left.some((other) => other !== one && other.before.has(one) && !one.before.has(other)));
    order.push(left.splice(Math.max(0, free), 1)[0]);
  }
  return order;
}

function flat(view, p) {
  return [dot(view.right, p), dot(view.up, p)];
}

// What the picture shows at each moment: [left, right, low, high] of the whole machine, its boulder among it, smoothed.
function windowsOf(one, view) {
  const count = one.motion ? one.motion.moments.length : 1;
  const boxes = Array.from({ length: count }, (_, moment) => {
    const bodies = bodiesAt(one, moment), box = [Infinity, -Infinity, Infinity, -Infinity];
    one.solids.forEach((solid) => solid.faces.forEach(([, corners]) => {
      for (let k = 0; k < corners.length; k += 3) {
        const [x, y] = flat(view, placed(bodies[solid.body], corners.slice(k, k + 3)));
        box[0] = Math.min(box[0], x - MARGIN); box[1] = Math.max(box[1], x + MARGIN); box[2] = Math.min(box[2], y - MARGIN); box[3] = Math.max(box[3], y + MARGIN);
      }
    }));
    return box;
  });
  const near = (k) => boxes.slice(Math.max(0, k - 6), k + 7);
  return boxes.map((_, k) => [0, 1, 2, 3].map((side) => mean(near(k).map((box) => box[side]))));
}

function drawMachine(canvas, one, view, windows, moment) {
  const width = canvas.clientWidth || 300, height = Math.round(width * .58), dense = window.devicePixelRatio || 1;
  canvas.width = width * dense; canvas.height = height * dense;
  const ctx = canvas.getContext("2d"), [left, right, low, high] = windows[moment];
  const size = Math.min(width / (right - left), height / (high - low)), middle = [(left + right) / 2, (low + high) / 2];
  const at = (p) => { const [x, y] = flat(view, p); return [width / 2 + (x - middle[0]) * size, height / 2 - (y - middle[1]) * size]; };
  ctx.scale(dense, dense);
  const line = (points, stroke, thick) => { ctx.beginPath(); points.forEach((p, k) => ctx[k ? "lineTo" : "moveTo"](...at(p))); ctx.strokeStyle = stroke; ctx.lineWidth = thick; ctx.stroke(); };
  const now = scene(one, view, moment), every = (right - left) > 60 ? 20 : GRID, far = 30 + (right - left);
  ctx.font = "11px system-ui, sans-serif";
  for (let z = Math.floor((now.root[2] - far) / every) * every; z <= now.root[2] + far; z += every) {
    line([[-far, 0, z], [far, 0, z]], colour("--line"), 1);
    const [x0, y0] = at([0, 0, z]), [x1, y1] = at([1, 0, z]), bottom = height - 5, x = x0 + (x1 - x0) * (bottom - y0) / (y1 - y0);
    ctx.fillStyle = colour("--soft");
    if (x > 4 && x < width - 30) ctx.fillText(z + " m", x + 3, bottom);
  }
  if (one.motion && moment) {
    const past = Array.from({ length: moment + 1 }, (_, k) => bodiesAt(one, k)), boulder = one.solids.find((solid) => solid.kind === "boulder");
    line(past.map((bodies) => bodies[0].origin), colour("--accent"), 1.5);
    if (boulder && boulder.body) line(past.map((bodies) => bodies[boulder.body].origin), colour("--bad"), 1.5);
  }
  now.solids.forEach((solid) => solid.faces.forEach((face) => {
    const shade = .62 + .38 * Math.max(0, dot(face.outward, LIGHT));
    ctx.beginPath();
    face.corners.forEach((p, k) => ctx[k ? "lineTo" : "moveTo"](...at(p)));
    ctx.closePath();
    ctx.fillStyle = "rgb(" + (KINDS[solid.kind] || [200, 120, 120]).map((part) => Math.round(part * shade)).join(",") + ")";
    ctx.strokeStyle = ["boulder", "rod"].includes(solid.kind) ? ctx.fillStyle : "rgba(0,0,0,.35)";
    ctx.lineWidth = .6;
    ctx.fill();
    ctx.stroke();
  }));
  now.lines.forEach((one) => line(one.ends, "rgb(170,60,60)", 2));
  return now.root;
}

function machine(one, view, number) {
  const canvas = h("canvas", { role: "img", "aria-label": "machine " + number + ": " + one.about }), windows = windowsOf(one, view);
  const caption = h("figcaption", {}, h("b", {}, "score " + shown(one.score) + ", step " + one.step), one.about);
  if (!one.motion) {
    requestAnimationFrame(() => canvas.isConnected && drawMachine(canvas, one, view, windows, 0));
    return h("figure", {}, canvas, caption, h("p", { class: "soft" }, "No motion: the simulation broke off, or MuJoCo is not installed where the page was made."));
  }
  const { seconds, moments } = one.motion, last = moments.length - 1, still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const slider = h("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "moment of machine " + number, oninput: () => { stop(); show(Number(slider.value)); } });
  const now = h("span", { class: "soft now" }), start = bodiesAt(one, 0)[0].origin;
  let running = 0;
  const show = (moment) => {
    slider.value = moment;
    const root = drawMachine(canvas, one, view, windows, moment), way = root[2] - start[2];
    now.textContent = (moment * seconds).toFixed(1) + " s, " + Math.abs(way).toFixed(1) + " m " + (way < -.05 ? "back" : "forward");
    slider.setAttribute("aria-valuetext", now.textContent);
  };
  const stop = () => { cancelAnimationFrame(running); running = 0; playing.delete(stop); button.textContent = still ? "next" : "play"; };
  const play = () => {
    if (running) { stop(); return; }
    const from = Number(slider.value) >= last ? 0 : Number(slider.value);
    if (still) { show(Number(slider.value) >= last ? 0 : Math.min(last, from + Math.round(.5 / seconds))); return; }
    const began = performance.now();
    const frame = (time) => {
      const moment = Math.min(last, from + Math.max(0, Math.floor((time - began) / (1000 * seconds))));
      if (!canvas.isConnected) { stop(); return; }
      show(moment);
      if (moment < last) running = requestAnimationFrame(frame); else stop();
    };
    playing.add(stop);
    button.textContent = "pause";
    running = requestAnimationFrame(frame);
  };
  const button = h("button", { type: "button", class: "plain", "aria-label": (still ? "next picture of machine " : "play machine ") + number, onclick: play }, still ? "next" : "play");
  requestAnimationFrame(() => canvas.isConnected && show(Math.round(Math.max(0, Math.min(1, state.moment)) * last)));
  return h("figure", {}, canvas, h("div", { class: "bar" }, button, slider, now), caption);
}

function machinesPage(page) {
  if (!page.items.length) return h("p", {}, "No machine among the rollouts that were kept had a score: what was written was no machine, or did not move.");
  return h("div", {}, h("p", {}, "The machines with the highest scores among the rollouts that were kept, simulated again as the run did. Lines on the ground are labelled in metres forward; the blue line is the way of the starting block, the red one that of a boulder. Walls are left out."),
    h("div", { class: "machines" }, page.items.map((one, k) => machine(one, page.view, k + 1))));
}
