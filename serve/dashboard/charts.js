"use strict";
// Line charts over time on canvas. All charts of the page share one time range and one hover position.

const LEFT = 50, RIGHT = 6, TOP = 8, BOTTOM = 18;

/** A 2D context in CSS pixels, cleared, on a canvas that is as sharp as the screen. */
function prepareCanvas(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return { pen, width, height };
}

/** A round step so that about `count` of them cover `span`. */
function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((f) => f * power >= rough * 0.999);
  return factor * power;
}

/** Labelled horizontal lines from 0 to `top`; returns value -> y. */
function drawScale(pen, area, top, step, label) {
  const y = (value) => area.bottom - (value / top) * (area.bottom - area.top);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let value = 0; value <= top * 1.0001; value += step) {
    const at = Math.round(y(value)) + 0.5;
    pen.strokeStyle = colour(value === 0 ? "edge" : "grid");
    pen.beginPath();
    pen.moveTo(area.left, at);
    pen.lineTo(area.right, at);
    pen.stroke();
    pen.fillStyle = colour("muted");
    pen.fillText(label(value), area.left - 6, at);
  }
  return y;
}

class TimeChart {
  /**
   * `series`: [{field, name, colour}], the first is filled. `format`: value -> text with unit.
   * `axis`: value -> text of the scale. `fixedTop`: end of the scale, if it does not follow the data; `whole`: the scale
   * has whole numbers only.
   */
  constructor(parent, { title, unit, series, format, axis, fixedTop = null, floor = 1, whole = false, empty }) {
    Object.assign(this, { title, series, format, axis, fixedTop, floor, whole });
    const card = element("div", "card chart");
    const head = element("div", "head");
    const heading = element("h2", "", title);
    if (unit) heading.append(element("small", "", unit));
    const legend = element("ul", "legend");
    this.values = series.map((line) => {
      const item = element("li", "");
      const swatch = element("i", "swatch");
      swatch.style.background = `var(--${line.colour})`;
      const value = element("b", "", NONE);
      item.append(swatch, series.length > 1 ? `${line.name} ` : "", value);
      legend.append(item);
      return value;
    });
    head.append(heading, legend);
    const plot = element("div", "plot");
    this.canvas = element("canvas", "");
    this.canvas.setAttribute("role", "img");
    this.empty = element("p", "empty", empty);
    plot.append(this.canvas, this.empty);
    card.append(head, plot);
    parent.append(card);
  }

  /** `rows`: objects with `time` and the fields; shows `seconds` up to `now`, and the values at `hover` if given. */
  draw(rows, now, seconds, hover) {
    const { pen, width, height } = prepareCanvas(this.canvas);
    const area = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
    const shown = rows.filter((row) => row.time >= now - seconds - 2);
    const all = shown.flatMap((row) => this.series.map((line) => row[line.field])).filter((v) => v !== null);
    this.empty.hidden = !rows.length || all.some((v) => v > 0);
    const largest = Math.max(this.floor, ...all);
    const step = this.fixedTop ? this.fixedTop / 4 : this.whole ? Math.ceil(niceStep(largest, 3)) : niceStep(largest, 3);
    const top = this.fixedTop || Math.ceil(largest / step - 1e-9) * step;
    const y = drawScale(pen, area, top, step, this.axis);
    const x = (time) => area.right - ((now - time) / seconds) * (area.right - area.left);
    this.drawTimes(pen, area, seconds);
    pen.save();
    pen.beginPath();
    pen.rect(area.left, 0, area.right - area.left, height);
    pen.clip();
    [...this.series].reverse().forEach((line) => this.drawLine(pen, area, shown, line, x, y));
    pen.restore();
    this.showValues(pen, area, shown, hover, x, y);
  }

  drawTimes(pen, area, seconds) {
    pen.textBaseline = "alphabetic";
    pen.fillStyle = colour("muted");
    const minutes = seconds / 60;
    for (const part of [0, 0.5, 1]) {
      pen.textAlign = part === 0 ? "left" : part === 1 ? "right" : "center";
      const back = minutes * (1 - part);
      const text = part === 1 ? "now" : back < 1 ? `−${back * 60} s` : `−${back} min`;
      pen.fillText(text, area.left + part * (area.right - area.left), area.bottom + 14);
    }
  }

  drawLine(pen, area, rows, line, x, y) {
    const pieces = [[]];
    let before = null;
    for (const row of rows) {
      const value = row[line.field];
      if (value === null || (before !== null && row.time - before > 3)) pieces.push([]);
      if (value !== null) pieces[pieces.length - 1].push([x(row.time), y(value)]);
      before = row.time;
    }
    pen.strokeStyle = colour(line.colour);
    pen.fillStyle = colour(line.colour);
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    for (const points of pieces.filter((piece) => piece.length)) {
      pen.beginPath();
      points.forEach(([px, py], i) => (i ? pen.lineTo(px, py) : pen.moveTo(px, py)));
      if (points.length === 1) pen.lineTo(points[0][0] + 1.5, points[0][1]);
      pen.stroke();
      if (line === this.series[0]) {
        pen.lineTo(points[points.length - 1][0], area.bottom);
        pen.lineTo(points[0][0], area.bottom);
        pen.globalAlpha = 0.1;
        pen.fill();
        pen.globalAlpha = 1;
      }
    }
    pen.lineWidth = 1;
  }

  showValues(pen, area, rows, hover, x, y) {
    let row = rows[rows.length - 1];
    if (hover !== null && rows.length) {
      row = rows.reduce((best, r) => (Math.abs(r.time - hover) < Math.abs(best.time - hover) ? r : best));
      pen.strokeStyle = colour("muted");
      pen.globalAlpha = 0.6;
      pen.beginPath();
      pen.moveTo(Math.round(x(row.time)) + 0.5, area.top);
      pen.lineTo(Math.round(x(row.time)) + 0.5, area.bottom);
      pen.stroke();
      pen.globalAlpha = 1;
    }
    const texts = this.series.map((line) => (row && row[line.field] !== null ? this.format(row[line.field]) : NONE));
    this.values.forEach((value, i) => setText(value, texts[i]));
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.series.map((l, i) => `${l.name} ${texts[i]}`).join(", ")}`);
    if (hover === null || !row) return;
    for (const line of this.series.filter((l) => row[l.field] !== null)) {
      pen.fillStyle = colour(line.colour);
      pen.beginPath();
      pen.arc(x(row.time), y(row[line.field]), 3, 0, 2 * Math.PI);
      pen.fill();
    }
  }
}
