import type { Disposer } from './disposer';
import { count, element, say } from './dom';

/**
 * A prompt's tokens in a line that wraps, each with a weight as the colour behind it: where one of them looks.
 *
 * One stop of the Tab key; arrow keys walk it.
 */
export class TokenLine {
  readonly root = element('div', { class: 'nnl-line-box' });
  #list = element('div', { class: 'nnl-line-of-tokens', role: 'listbox', tabindex: '0', 'aria-label': 'Tokens of the prompt' });
  #words = element('div', { class: 'nnl-faint' });
  #tokens: HTMLElement[] = [];
  #at = 0;
  #timer = 0;

  constructor(
    readonly pointed: (at: number) => void,
    readonly picked: (at: number) => void,
    /** The pointer went away: what it looked at is over. */
    readonly left: () => void,
    disposer: Disposer
  ) {
    this.root.append(this.#words, this.#list);
    const of = (event: Event) => {
      const at = (event.target as HTMLElement).closest<HTMLElement>('[data-at]')?.dataset.at;
      return at === undefined ? null : Number(at);
    };
    disposer.listen(this.#list, 'pointerover', event => {
      const at = of(event);
      clearTimeout(this.#timer);
      if (at !== null) {
        this.#timer = window.setTimeout(() => this.pointed(at), 60);
      }
    });
    disposer.listen(this.#list, 'pointerleave', () => {
      clearTimeout(this.#timer);
      this.left();
    });
    disposer.listen(this.#list, 'click', event => {
      const at = of(event);
      if (at !== null) {
        this.#go(at);
        this.picked(at);
      }
    });
    disposer.listen(this.#list, 'keydown', event => {
      const moves: Record<string, number> = {
        ArrowLeft: this.#at - 1,
        ArrowUp: this.#at - 1,
        ArrowRight: this.#at + 1,
        ArrowDown: this.#at + 1,
        Home: 0,
        End: this.#tokens.length - 1
      };
      const move = moves[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey || !this.#tokens.length) {
        return;
      }
      if (move !== undefined) {
        this.#go(move);
        this.pointed(this.#at);
      } else if (event.key === 'Enter' || event.key === ' ') {
        this.picked(this.#at);
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
    });
    disposer.add(() => clearTimeout(this.#timer));
  }

  show(tokens: string[], total: number): void {
    const prefix = `nnl-${Math.random().toString(36).slice(2)}`;
    this.#tokens = tokens.map((text, at) =>
      element('span', { role: 'option', id: `${prefix}-${at}`, 'data-at': String(at), class: 'nnl-token', 'aria-selected': 'false' }, text)
    );
    this.#list.replaceChildren(...this.#tokens);
    if (total > tokens.length) {
      this.#list.append(element('span', { class: 'nnl-faint' }, ` … ${count(total - tokens.length)} more tokens are in the picture only`));
    }
    this.#at = Math.max(0, tokens.length - 1);
  }

  /** Colour every token by the weight it is looked at with. */
  weigh(weights: Float32Array, from: number): void {
    this.#tokens.forEach((token, at) => {
      const weight = weights[at] ?? 0;
      // Most weights are small: their roots are told apart.
      token.style.setProperty('--nnl-weight', `${Math.round(100 * Math.sqrt(Math.min(Math.max(weight, 0), 1)))}%`);
      token.title = `${count(at)}: ${(100 * weight).toFixed(2)} %`;
      token.classList.toggle('nnl-from', at === from);
      token.setAttribute('aria-label', `${token.textContent} ${(100 * weight).toFixed(1)} percent`);
    });
    if (from < this.#tokens.length) {
      this.#at = from;
    }
    this.#active();
  }

  words(text: string): void {
    say(this.#words, text);
  }

  choose(at: number | null): void {
    this.#tokens.forEach((token, number) => token.setAttribute('aria-selected', String(number === at)));
  }

  #go(at: number): void {
    this.#at = Math.min(Math.max(at, 0), this.#tokens.length - 1);
    this.#active();
  }

  #active(): void {
    const token = this.#tokens[this.#at];
    if (token) {
      this.#list.setAttribute('aria-activedescendant', token.id);
    }
  }
}
