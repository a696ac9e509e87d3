"use strict";
// Numbers with units, short enough for tiles, and colours of the style sheet.

const NONE = "–";

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(3)));
}

/** [number, unit] of a duration in seconds. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return [NONE, ""];
  if (seconds < 0.9995) {
    const ms = seconds * 1000;
    return [ms >= 100 ? String(Math.round(ms)) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2), "ms"];
  }
  return [seconds >= 100 ? String(Math.round(seconds)) : trim(seconds), "s"];
}

function durationText(seconds) {
  return duration(seconds).join(" ").trim();
}

/** A duration on a scale: no digits without a meaning. */
function durationTick(seconds) {
  if (seconds === 0) return "0";
  return seconds < 0.9995 ? `${trim(seconds * 1000)} ms` : `${trim(seconds)} s`;
}

function percentText(ratio) {
  if (ratio === null || ratio === undefined) return NONE;
  const percent = ratio * 100;
  return (percent < 10 ? Number(percent.toPrecision(2)) : Math.round(percent)) + " %";
}

/** Time since start, in its two largest units. */
function spanText(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  const parts = [];
  for (const [unit, size] of units.slice(first, first + 2)) {
    const count = Math.floor(seconds / size);
    seconds -= count * size;
    if (count) parts.push(`${count} ${unit}`);
  }
  return parts.join(" ");
}

function plural(count, noun) {
  return `${compact(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function byId(id) {
  return document.getElementById(id);
}

/** Writes only what changed, so that text that stays can be selected. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

let colourCache = new Map();

/** The value of a colour variable in the present scheme. */
function colour(name) {
  if (!colourCache.has(name)) {
    colourCache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colourCache.get(name);
}

function forgetColours() {
  colourCache = new Map();
}
