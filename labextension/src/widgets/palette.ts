/** From codes to colours; what the codes mean is said in `nnsight_lab/widgets/spans.py`. */

export const TOP = 249;
export const CODE_NAN = 251;
export const CODE_POSINF = 252;
export const CODE_NEGINF = 253;

export type Palettes = Record<string, string[] | string>;
export type Rgb = [number, number, number];

export const SPECIAL: [string, number, string, string][] = [
  ['nan', CODE_NAN, 'NaN', '×'],
  ['posinf', CODE_POSINF, '+inf', '▲'],
  ['neginf', CODE_NEGINF, '−inf', '▼']
];

function rgb(text: string): Rgb {
  return [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)) as Rgb;
}

/** The colour of each code, as a canvas stores it. */
export function lookup(palettes: Palettes, scale: string, dark: boolean): Uint32Array {
  const name = scale === 'diverging' ? `diverging-${dark ? 'dark' : 'light'}` : 'sequential';
  const anchors = (palettes[name] as string[]).map(rgb);
  const colours = new Uint32Array(256);
  for (let code = 0; code <= TOP; code++) {
    const at = (code / TOP) * (anchors.length - 1);
    const first = anchors[Math.floor(at)]!;
    const next = anchors[Math.min(Math.floor(at) + 1, anchors.length - 1)]!;
    const part = at - Math.floor(at);
    colours[code] = packed(first.map((one, channel) => Math.round(one + (next[channel]! - one) * part)) as Rgb);
  }
  for (const [name, code] of SPECIAL) {
    colours[code] = packed(rgb(palettes[name] as string));
  }
  return colours;
}

function packed([red, green, blue]: Rgb): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** A packed colour for CSS. */
export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

/** A canvas with codes as coloured pixels. */
export function paint(codes: Uint8Array, height: number, width: number, colours: Uint32Array): HTMLCanvasElement {
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < codes.length; at++) {
    pixels[at] = colours[codes[at]!]!;
  }
  canvas.getContext('2d')!.putImageData(image, 0, 0);
  return canvas;
}
