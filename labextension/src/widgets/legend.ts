import { count, element, say, short } from './dom';
import { css, type Palettes, SPECIAL, TOP } from './palette';

/** The colours and their ends, and how many values are none of them. */
export class Legend {
  readonly root = element('div', { class: 'nnl-legend' });
  #bar = element('canvas', { width: '150', height: '10', 'aria-hidden': 'true' });
  #low = element('span');
  #high = element('span');
  #special = element('span', { class: 'nnl-special' });
  #plain = false;

  constructor(readonly palettes: Palettes) {
    this.root.append(this.#low, this.#bar, this.#high, this.#special);
  }

  colours(colours: Uint32Array): void {
    const context = this.#bar.getContext('2d')!;
    for (let x = 0; x < 150; x++) {
      context.fillStyle = css(colours[Math.round((x / 149) * TOP)]!);
      context.fillRect(x, 0, 1, 10);
    }
  }

  span(low: number, high: number, scale: string): void {
    const of = scale === 'log' ? '|x| ' : '';
    say(this.#low, `${of}${short(low)}`);
    say(this.#high, short(high));
  }

  /** Without colours: of a line. */
  plain(): void {
    this.#plain = true;
    this.#bar.hidden = this.#low.hidden = this.#high.hidden = true;
  }

  /** How many values are special, the share that was looked at, and how many values there are. */
  special(counts: [number, number, number, number], of: number): void {
    // Colours that no value has would only puzzle.
    const none = counts[3] >= 1 && counts[0] + counts[1] + counts[2] === of;
    this.#bar.hidden = this.#low.hidden = this.#high.hidden = none || this.#plain;
    const parts = SPECIAL.map(([name, , text, sign], number) => {
      const swatch = element('i', { class: 'nnl-swatch', 'aria-hidden': 'true' }, sign);
      swatch.style.background = this.palettes[name] as string;
      return counts[number]! > 0 ? element('span', {}, swatch, ` ${count(counts[number]!)} ${text}`) : null;
    }).filter(part => part !== null);
    if (parts.length && counts[3] < 1) {
      parts.push(element('span', {}, `in the ${Math.floor(100 * counts[3])} % looked at`));
    }
    if (none) {
      parts.push(element('span', {}, 'no finite value'));
    }
    this.#special.replaceChildren(...parts);
  }
}
