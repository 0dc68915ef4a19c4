// The picture of a plan: each pair's wavelength on a logarithmic axis, unscaled and under the plan.

import { count } from "./format.js";

const MARGIN = { top: 18, right: 6, bottom: 40, left: 44 };
const svg = document.getElementById("picture");
let drawn = null;

function element(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

const line = (kind, x1, y1, x2, y2) => element("line", { class: kind, x1, y1, x2, y2 });
const text = (content, x, y, attributes = {}) => element("text", { x, y, ...attributes }, content);

function mark(kind, x, y, size) {
  const shapes = {
    kept: () => element("circle", { cx: x, cy: y, r: size * 0.95 }),
    interpolated: () => element("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size }),
  };
  const reach = size * 1.3;
  const diamond = () =>
    element("path", { d: `M${x} ${y - reach}L${x + reach} ${y}L${x} ${y + reach}L${x - reach} ${y}Z` });
  const made = (shapes[kind] ?? diamond)();
  made.setAttribute("class", `mark ${kind}`);
  return made;
}

const icon = (shape) => element("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, shape);

/** A mark by itself, for the legend. */
export const markIcon = (kind) => icon(mark(kind, 6, 6, 3.6));

/** The line of the unscaled wavelengths, for the legend. */
export const unscaledIcon = () => icon(line("native-line", 0, 6, 12, 6));

/** Draw a plan: pairs with wavelength, plan_wavelength and kind; lengths in tokens; label: all of it in words. */
export function draw(picture) {
  drawn = picture;
  const width = Math.max(svg.clientWidth, 240);
  const height = Math.min(Math.max(width * 0.74, 260), 400);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", picture.label);
  const scales = scalesOf(picture, width, height);
  svg.replaceChildren(
    ...axes(picture, scales, width, height),
    ...lengths(picture, scales, width),
    ...lines(picture.pairs, scales),
    ...picture.pairs.map((pair, number) =>
      mark(pair.kind, scales.x(number), scales.y(pair.plan_wavelength), scales.markSize),
    ),
  );
}

function scalesOf({ pairs, nativeLength, length }, width, height) {
  const values = [nativeLength, length, ...pairs.flatMap((pair) => [pair.wavelength, pair.plan_wavelength])];
  const logs = values.filter((value) => value > 0 && Number.isFinite(value)).map(Math.log10);
  const bottom = Math.floor(Math.min(...logs));
  const top = Math.max(...logs) + 0.15;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  const spacing = inner.width / pairs.length;
  return {
    bottom,
    top,
    markSize: Math.min(Math.max(spacing * 0.26, 1.6), 4),
    x: (pair) => MARGIN.left + spacing * (pair + 0.5),
    y: (tokens) => MARGIN.top + (inner.height * (top - Math.log10(tokens))) / (top - bottom),
  };
}

function axes({ pairs, nativeLength }, { x, y, bottom, top }, width, height) {
  const [left, right, floor] = [MARGIN.left, width - MARGIN.right, height - MARGIN.bottom];
  const powers = Array.from({ length: Math.floor(top) - bottom + 1 }, (_, number) => bottom + number);
  const shown = (power) => (power < 3 ? `${10 ** power}` : power < 6 ? `${10 ** (power - 3)}k` : `${10 ** (power - 6)}M`);
  const unseen = Math.max(y(nativeLength) - MARGIN.top, 0);
  return [
    element("rect", { class: "unseen", x: left, y: MARGIN.top, width: right - left, height: unseen }),
    ...powers.map((power) => line("grid", left, y(10 ** power), right, y(10 ** power))),
    ...powers.map((power) => text(shown(power), left - 8, y(10 ** power) + 4, { "text-anchor": "end" })),
    text("wavelength, tokens", 0, 8),
    ...(unseen > 60 ? [text("never a full turn in training", left + 8, MARGIN.top + 18, { class: "on-shade" })] : []),
    text("1", x(0), floor + 17, { "text-anchor": "middle" }),
    text(`${pairs.length}`, x(pairs.length - 1), floor + 17, { "text-anchor": "middle" }),
    text("pair of dimensions, fast to slow", (left + right) / 2, floor + 33, { "text-anchor": "middle" }),
  ];
}

/** The two lengths, named on the side where the pairs are not, and apart from each other. */
function lengths({ nativeLength, length }, { y }, width) {
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const isLonger = length > nativeLength;
  const over = (content, tokens, kind) => text(content, left + 8, y(tokens) - 7, { class: `${kind} on-shade` });
  const under = (content, tokens, kind, at = {}) => text(content, left + 8, y(tokens) + 16, { class: kind, ...at });
  const native = `native length ${count(nativeLength)}`;
  const request = `this request ${count(length)}`;
  return [
    line("native-length", left, y(nativeLength), right, y(nativeLength)),
    line("request-length", left, y(length), right, y(length)),
    ...(isLonger
      ? [under(native, nativeLength, "native"), over(request, length, "request")]
      : [over(native, nativeLength, "native"), under(request, length, "request", { x: right - 8, "text-anchor": "end" })]),
  ];
}

function lines(pairs, { x, y }) {
  const through = (kind, field) =>
    element("polyline", {
      class: kind,
      points: pairs.map((pair, number) => `${x(number)},${y(pair[field])}`).join(" "),
    });
  return [through("native-line", "wavelength"), through("plan-line", "plan_wavelength")];
}

new ResizeObserver(() => drawn && draw(drawn)).observe(svg.parentElement);
