/** How scores become colours, as the kernel says it. */
export interface Colours {
  scale?: string;
  low?: number;
  high?: number;
  note?: string;
  /** Evenly spaced, from the lowest score to the highest. */
  light?: string[];
  dark?: string[];
}

type Rgb = [number, number, number];

/** The colours of scores on a light or on a dark page. */
export class Shades {
  readonly known: boolean;
  readonly low: number;
  readonly high: number;
  #log: boolean;
  #anchors: Rgb[];

  constructor(colours: Colours, dark: boolean) {
    this.#anchors = ((dark ? colours.dark : colours.light) ?? []).map(rgb);
    this.known = this.#anchors.length > 1;
    this.low = colours.low ?? 0;
    this.high = colours.high ?? 1;
    this.#log = colours.scale === 'log';
  }

  /** The colour at a place from 0 to 1. */
  at(place: number): string {
    return this.known ? css(this.#mixed(place)) : '';
  }

  /** The colour of a score, and of text on it: black or white, whichever is read better. */
  of(score: number): [string, string] {
    if (!this.known) {
      return ['', ''];
    }
    const to = (value: number) => (this.#log ? Math.log(Math.max(value, this.low)) : value);
    const place = (to(score) - to(this.low)) / (to(this.high) - to(this.low));
    const colour = this.#mixed(place);
    const light = luminance(colour);
    return [css(colour), (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) ? '#000' : '#fff'];
  }

  #mixed(place: number): Rgb {
    const at = Math.min(Math.max(place, 0), 1) * (this.#anchors.length - 1);
    const first = Math.min(Math.floor(at), this.#anchors.length - 2);
    const [one, other] = [this.#anchors[first]!, this.#anchors[first + 1]!];
    return one.map((value, channel) => value + (other[channel]! - value) * (at - first)) as Rgb;
  }
}

function rgb(text: string): Rgb {
  return [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16)) as Rgb;
}

function css(colour: Rgb): string {
  return `rgb(${colour.map(Math.round).join(', ')})`;
}

/** As WCAG 2 defines it. */
function luminance(colour: Rgb): number {
  const [red, green, blue] = colour.map(value => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as Rgb;
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
