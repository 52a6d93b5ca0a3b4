// How numbers, sizes, times and durations are written, as rendering.py does; and text that strangers chose.
//
// Times are UTC, or the browser's if that was chosen: see choices.js.
"use strict";
(() => {
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const MAX_DATE_MS = 253_402_300_799_999; // the end of the year 9999
  // Characters that are invisible or reorder the text around them; as the server shows them.
  const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

  const visible = (text) => text.replace(UNSEEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

  // Three significant digits: 999 B, 1.00 KiB, 12.3 MiB.
  function bytes(size) {
    let power = 0;
    for (; size >= 999.5 && power < UNITS.length - 1; power += 1) size /= 1024;
    return `${size.toFixed(!power || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2)} ${UNITS[power]}`;
  }

  function short(value) {
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (value >= size) return `${+(value / size).toPrecision(3)}${unit}`;
    }
    return `${+value.toPrecision(3)}`;
  }

  // Thousands separated by a narrow space. Not for offsets.
  const count = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");

  // One unit, rounded down.
  function duration(ms) {
    for (const [seconds, unit] of [[86_400, "d"], [3600, "h"], [60, "min"]]) {
      if (ms >= 2000 * seconds) return `${Math.floor(ms / 1000 / seconds)} ${unit}`;
    }
    return ms >= 1000 || !ms ? `${Math.floor(ms / 1000)} s` : `${ms.toFixed(0)} ms`;
  }

  const isLocal = () => document.documentElement.dataset.zone === "local";

  // To the millisecond: 2013-07-04 01:00:01.005Z, or with the browser's offset from UTC.
  function moment(ms) {
    if (!(ms >= 0)) return "–";
    if (ms > MAX_DATE_MS) return `${ms} ms`;
    const minutes = isLocal() ? -new Date(ms).getTimezoneOffset() : 0;
    const text = new Date(ms + minutes * 60_000).toISOString().replace("T", " ");
    if (!isLocal()) return text;
    const pad = (number) => `${Math.floor(number)}`.padStart(2, "0");
    const size = Math.abs(minutes);
    return `${text.slice(0, -1)}${minutes < 0 ? "-" : "+"}${pad(size / 60)}:${pad(size % 60)}`;
  }

  const zone = () => (isLocal() ? "local time" : "UTC");

  // A date, or a time without an offset, as it was typed, with the offset of the zone that times are shown in.
  function inZone(text) {
    const match = /^\s*(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d+)?)?))?\s*$/.exec(text);
    if (!match || !isLocal()) return text;
    const time = new Date(`${match[1]}T${match[2] ?? "00:00"}`);
    return Number.isNaN(time.valueOf()) ? text : time.toISOString();
  }


  window.tierlog = { visible, bytes, short, count, duration, moment, zone, inZone };
})();
