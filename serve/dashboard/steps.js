"use strict";
// The timeline of recent steps: what their tokens were, and how long host and device took.

class StepTimeline {
  constructor() {
    this.canvas = byId("steps");
    this.readout = byId("steps-readout");
    this.steps = [];
    this.shown = [];
    this.now = 0;
    this.hover = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
  }

  /** `steps`: objects by `step_fields`, oldest first; `now`: on their clock. */
  draw(steps, now) {
    Object.assign(this, { steps, now });
    byId("steps-empty").hidden = steps.length > 0;
    const { pen, width, height } = prepareCanvas(this.canvas);
    const area = { left: LEFT, right: width - RIGHT };
    const room = Math.floor((area.right - area.left) / 6);
    this.shown = steps.slice(-Math.min(room, 160));
    this.pitch = (area.right - area.left) / Math.min(room, 160);
    this.first = area.right - this.shown.length * this.pitch;
    this.drawTokens(pen, { ...area, top: 18, bottom: Math.round(height * 0.56) });
    this.drawTimes(pen, { ...area, top: Math.round(height * 0.56) + 26, bottom: height - 6 });
    this.describe();
  }

  drawTokens(pen, area) {
    const total = (step) => step.prefill + step.decode + step.padding;
    const { top, step } = scaleFor(Math.max(4, ...this.shown.map(total)));
    const y = drawScale(pen, area, top, step, compact);
    label(pen, "tokens per step", area);
    this.shown.forEach((entry, i) => {
      const x = this.first + i * this.pitch, width = Math.max(1, this.pitch - 1);
      let below = 0;
      for (const [kind, name] of [["decode", "blue"], ["prefill", "amber"], ["padding", "padding"]]) {
        pen.fillStyle = colour(name);
        pen.fillRect(x, y(below + entry[kind]), width, y(below) - y(below + entry[kind]));
        below += entry[kind];
      }
      if (entry.preempted) {
        pen.fillStyle = colour("red");
        pen.beginPath();
        pen.arc(x + width / 2, Math.max(4, y(below) - 5), 3, 0, 2 * Math.PI);
        pen.fill();
      }
    });
    this.markHover(pen, area);
  }

  drawTimes(pen, area) {
    const longest = Math.max(0.0005, ...this.shown.map((s) => Math.max(s.host, s.device)));
    const { top, step } = scaleFor(longest * 1000, 2);
    const y = drawScale(pen, area, top, step, trim);
    label(pen, "ms per step", area);
    this.shown.forEach((entry, i) => {
      const x = this.first + i * this.pitch, width = Math.max(1, this.pitch - 1);
      pen.fillStyle = colour("teal");
      pen.globalAlpha = 0.45;
      pen.fillRect(x, y(entry.device * 1000), width, area.bottom - y(entry.device * 1000));
      pen.globalAlpha = 1;
      pen.fillStyle = colour("violet");
      pen.fillRect(x + width * 0.3, y(entry.host * 1000), width * 0.4, area.bottom - y(entry.host * 1000));
    });
    this.markHover(pen, area);
  }

  markHover(pen, area) {
    if (this.hover === null) return;
    pen.strokeStyle = colour("text");
    pen.globalAlpha = 0.5;
    pen.strokeRect(this.first + this.hover * this.pitch - 1, area.top, this.pitch + 1, area.bottom - area.top);
    pen.globalAlpha = 1;
  }

  point(x) {
    const at = x === null ? -1 : Math.floor((x - this.first) / this.pitch);
    this.hover = at >= 0 && at < this.shown.length ? at : null;
    this.draw(this.steps, this.now);
  }

  describe() {
    const entry = this.hover === null ? this.shown[this.shown.length - 1] : this.shown[this.hover];
    if (!entry) {
      setText(this.readout, "\u00a0");
      return;
    }
    const parts = [
      `${this.hover === null ? "Newest step" : "Step"} ${entry.index.toLocaleString("en")}`,
      this.now - entry.start < 1 ? "just now" : `${spanText(this.now - entry.start)} ago`,
      plural(entry.sequences, "sequence"),
      `${entry.decode} decode + ${entry.prefill} prefill + ${entry.padding} padding tokens`,
      `device ${durationText(entry.device)}`,
      `host ${durationText(entry.host)}`,
    ];
    if (entry.preempted) parts.push(`${entry.preempted} preempted`);
    setText(this.readout, parts.join(" · "));
    this.canvas.setAttribute("aria-label", parts.join(", "));
  }
}

function scaleFor(largest, count = 3) {
  const step = niceStep(largest, count);
  return { step, top: Math.ceil(largest / step - 1e-9) * step };
}

function label(pen, text, area) {
  pen.fillStyle = colour("muted");
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.fillText(text, area.left, area.top - 6);
}
