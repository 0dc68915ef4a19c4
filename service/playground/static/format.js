// Numbers as people read them, and where they are shown.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(value);
export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

export function show(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}
