import type { AnyModel } from '@anywidget/types';
import { Chooser } from './chooser';
import { Conversation, KernelError } from './conversation';
import { Disposer } from './disposer';
import { count, element, say, short } from './dom';
import * as kinds from './kinds';
import { rendered } from './render';
import { type Colours, Shades } from './shades';
import { isDark, onTheme } from './theme';

/** A token as the kernel sends it: id, as seen, as said (0: the same but for spaces), whether it ends a line. */
type Token = [number | null, string, string | 0, number];

interface Part {
  first: number;
  tokens: Token[];
  rows: number;
}

interface Status {
  words: string;
  running: boolean;
  ended: string;
}

const KEYS = 'Arrow keys move from token to token, Home and End to the ends, Enter chooses a token everywhere, Escape chooses none.';
/** On the page at once, of one row, and of several. */
const MOST_TOKENS = 1000;
const MOST_CELLS = 4000;
/** Of a score in a cell. */
const SEEN_DIGITS = 3;
/** Growth is announced no oftener than this. */
const SAY_APART_MS = 6000;

/**
 * When a run is over its output is written once more, and JupyterLab then draws a new view in the old one's place. This
 * module is one model's: when a view of it last ran is here for the next one.
 */
const before = { ranAt: -Infinity };
const TAKES_OVER_MS = 5000;

/** A token strip in one place on the page. */
class TokenStrip {
  #disposer = new Disposer();
  #conversation: Conversation;
  #chooser: Chooser;
  #tokens: Token[] = [];
  /** Of each token, its scores, row by row. */
  #scores: Float64Array[] = [];
  #first = 0;
  #pinned: boolean;
  /** The token and row that keys move from. */
  #active = 0;
  #row = 0;
  #cells = new Map<string, HTMLElement>();
  #shades!: Shades;
  #coloured = '';
  #legend = element('div', { class: 'nnl-strip-legend', 'aria-hidden': 'true' });
  #heading = element('strong');
  #status = element('span', { class: 'nnl-faint' });
  #stop = element('button', { type: 'button', class: 'nnl-button' }, '■ Stop');
  #ids = element('button', { type: 'button', class: 'nnl-button', 'aria-pressed': 'false', title: 'Show token ids' }, 'Ids');
  #earlier = element('button', { type: 'button', class: 'nnl-button' }, '◂ Earlier');
  #later = element('button', { type: 'button', class: 'nnl-button' }, 'Later ▸');
  #body: HTMLElement = element('div');
  #readout = element('div', { class: 'nnl-readout' });
  #words = element('div', { class: 'nnl-faint' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #live = element('div', { class: 'nnl-hidden', role: 'status', 'aria-live': 'polite' });
  #saidAt = performance.now();
  #asking = false;

  constructor(
    readonly model: AnyModel,
    readonly root: HTMLElement
  ) {
    this.#conversation = new Conversation(model, this.#disposer);
    this.#first = this.#get<number>('first_shown') ?? 0;
    this.#pinned = this.#first > 0;
    this.#build();
    const kept = this.#get<(Part & { scores: (number | string)[][] }) | undefined>('kept');
    if (kept?.tokens) {
      const numbers = Float64Array.from(kept.scores.flatMap(row => row.map(score => (typeof score === 'number' ? score : special(score)))));
      this.#take(kept, numbers);
    }
    this.#restyle();
    this.#chooser = new Chooser(
      model,
      this.#conversation,
      position => position < this.#count,
      position => this.#mark(position),
      this.#disposer
    );
    const heard = (message: unknown, buffers: DataView[]) => {
      const content = message as Record<string, unknown>;
      if (content[kinds.KIND] === kinds.GREW) {
        this.#grew(content, buffers);
      }
    };
    model.on('msg:custom', heard);
    this.#disposer.add(() => model.off('msg:custom', heard));
    for (const name of ['state', 'count', 'colours', 'names']) {
      const changed = () => this.#settled();
      model.on(`change:${name}`, changed);
      this.#disposer.add(() => model.off(`change:${name}`, changed));
    }
    onTheme(() => this.#recolour(), this.#disposer);
    this.#settled();
    this.#takeOver();
  }

  /** Say how it ended: the old view went before it could be heard. */
  #takeOver(): void {
    const { running, words } = this.#get<Status>('state');
    if (running || performance.now() - before.ranAt > TAKES_OVER_MS) {
      return;
    }
    before.ranAt = -Infinity;
    // A live region is read when it changes, not when it comes.
    const timer = window.setTimeout(() => say(this.#live, words), 300);
    this.#disposer.add(() => clearTimeout(timer));
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  #get<T>(name: string): T {
    return this.model.get(name) as T;
  }

  get #count(): number {
    return Math.max(this.#get<number>('count') ?? 0, this.#tokens.length);
  }

  get #names(): string[] {
    return this.#get<string[]>('names') ?? [];
  }

  /** How many tokens are on the page at once. */
  get #most(): number {
    const rows = Math.max(1, this.#names.length);
    return rows > 1 ? Math.max(1, Math.min(MOST_TOKENS, Math.floor(MOST_CELLS / rows))) : MOST_TOKENS;
  }

  get #last(): number {
    return Math.min(this.#first + this.#most, this.#count);
  }

  #build(): void {
    const { root } = this;
    root.classList.add('nnl-strip');
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.#stop.title = 'Stop generating; what came stays';
    this.#stop.onclick = () => {
      this.#stop.disabled = true;
      this.#conversation.ask(kinds.STOP, {}, () => undefined).catch(error => this.#fail(error as Error));
    };
    this.#ids.onclick = () => {
      const on = this.root.classList.toggle('nnl-with-ids');
      this.#ids.setAttribute('aria-pressed', String(on));
    };
    this.#earlier.onclick = () => this.#show(this.#first - this.#most, true);
    this.#later.onclick = () => this.#show(this.#first + this.#most, this.#first + 2 * this.#most < this.#count);
    const bar = element('div', { class: 'nnl-bar', role: 'group', 'aria-label': 'Token strip' }, this.#earlier, this.#later, this.#ids);
    root.append(
      element('div', { class: 'nnl-head' }, this.#heading, this.#status, this.#stop),
      this.#body,
      element('div', { class: 'nnl-foot' }, this.#readout, this.#legend, bar),
      this.#words,
      this.#error,
      this.#live
    );
    this.#disposer.listen(root, 'keydown', event => this.#pressed(event));
    const cellOf = (event: Event) => (event.target as HTMLElement).closest<HTMLElement>('[data-place]');
    this.#disposer.listen(root, 'click', event => {
      const cell = cellOf(event);
      if (cell && !String(getSelection() ?? '')) {
        this.#goTo(Number(cell.dataset.place), Number(cell.dataset.row), false);
        this.#toggle();
      }
    });
    this.#disposer.listen(root, 'pointerover', event => {
      const cell = cellOf(event);
      if (cell) {
        say(this.#readout, this.#said(Number(cell.dataset.place), Number(cell.dataset.row)));
      }
    });
    this.#disposer.listen(root, 'pointerleave', () => this.#readChosen());
    this.#disposer.listen(root, 'focusin', event => {
      const cell = cellOf(event);
      if (cell) {
        say(this.#readout, this.#said(Number(cell.dataset.place), Number(cell.dataset.row)));
      }
    });
  }

  // -- what the kernel said --------------------------------------------------------------------

  /** Take some tokens; whether there are any after them that were there before. */
  #take(part: Part, scores: Float64Array): void {
    const { first, tokens, rows } = part;
    tokens.forEach((token, number) => {
      this.#tokens[first + number] = token;
      this.#scores[first + number] = Float64Array.from({ length: rows }, (_, row) => scores[row * tokens.length + number]!);
    });
  }

  #grew(content: Record<string, unknown>, buffers: DataView[]): void {
    for (const [name, value] of Object.entries(content.traits as Record<string, unknown>)) {
      this.model.set(name, value);
    }
    const part = content as unknown as Part;
    const known = this.#tokens.length >= part.first;
    if (known) {
      this.#take(part, numbersOf(buffers[0]!));
    }
    // What is drawn stays: a token that is made anew at each update cannot be clicked.
    this.#settled(known ? part.first : this.#tokens.length);
  }

  /** The model says something else than before: draw it, and ask for what is missing. */
  #settled(from?: number): void {
    const { words, running } = this.#get<Status>('state');
    const wasRunning = this.root.dataset.state === 'busy';
    say(this.#heading, this.#get<string>('heading'));
    this.#heading.hidden = !this.#heading.textContent;
    say(this.#status, words);
    this.#stop.hidden = !running;
    if (!wasRunning) {
      this.#stop.disabled = false;
    }
    const now = performance.now();
    if (running || wasRunning) {
      before.ranAt = now;
    }
    if (words && (running !== wasRunning || (running && now - this.#saidAt > SAY_APART_MS))) {
      this.#saidAt = now;
      say(this.#live, words);
    }
    if (running && !this.#pinned && this.#count > this.#last) {
      this.#first = Math.floor((this.#count - 1) / this.#most) * this.#most;
    }
    if (this.#restyle()) {
      this.#cells.forEach(cell => this.#colour(cell));
    }
    const atEnd = this.#body.scrollTop + this.#body.clientHeight >= this.#body.scrollHeight - 8;
    this.#draw(from);
    if (running && atEnd) {
      // Whoever reads the end goes on reading it.
      this.#body.scrollTop = this.#body.scrollHeight;
    }
    this.#chooser?.follow();
    this.root.dataset.state = running ? 'busy' : 'done';
    this.root.dataset.count = String(this.#tokens.length);
    void this.#ask();
  }

  /** Ask for tokens that are in sight and not here. */
  async #ask(): Promise<void> {
    const missing = this.#missing();
    if (this.#asking || missing === null) {
      return;
    }
    this.#asking = true;
    try {
      await this.#conversation.ask(kinds.TOKENS, { first: missing, last: this.#last }, ({ content, buffers }) => {
        const part = content as unknown as Part;
        this.#take(part, new Float64Array(buffers[0]!.buffer));
        this.#draw();
        this.root.dataset.count = String(this.#tokens.length);
      });
      this.#asking = false;
      if (this.#missing() !== null && this.#missing() !== missing) {
        await this.#ask();
      }
    } catch (error) {
      this.#asking = false;
      this.#fail(error as Error);
    }
  }

  #missing(): number | null {
    for (let place = this.#first; place < this.#last; place++) {
      if (!this.#tokens[place]) {
        return place;
      }
    }
    return null;
  }

  #fail(error: Error): void {
    if (!(error instanceof KernelError)) {
      this.#conversation.tell(kinds.FAILED, { [kinds.ERROR]: error.stack ?? String(error) });
    }
    say(this.#error, error.message);
    this.#error.hidden = false;
  }

  // -- drawing ---------------------------------------------------------------------------------

  /** Take the colours as they are now; whether they changed. */
  #restyle(): boolean {
    const colours = this.#get<Colours>('colours');
    const key = JSON.stringify(colours);
    if (this.#coloured === key) {
      return false;
    }
    this.#coloured = key;
    this.#shades = new Shades(colours, isDark(this.root));
    this.#drawLegend();
    return true;
  }

  #recolour(): void {
    this.#shades = new Shades(this.#get<Colours>('colours'), isDark(this.root));
    this.#drawLegend();
    for (const cell of this.#cells.values()) {
      this.#colour(cell);
    }
  }

  #drawLegend(): void {
    const { low, high } = this.#shades;
    const boxes = Array.from({ length: 9 }, (_, step) => {
      const box = element('i');
      box.style.background = this.#shades.at(step / 8);
      return box;
    });
    this.#legend.replaceChildren(...(this.#shades.known ? [`${this.#get<string>('score_name')} ${short(low)}`, ...boxes, short(high)] : []));
  }

  #show(first: number, pinned: boolean): void {
    this.#first = Math.max(0, Math.min(first, Math.floor((this.#count - 1) / this.#most) * this.#most));
    this.#pinned = pinned;
    this.#draw();
    void this.#ask();
  }

  /** Draw the window; only what comes from a token on, where the rest is as it was. */
  #draw(from?: number): void {
    const several = this.#names.length > 0;
    const kind = JSON.stringify([this.#names, this.#first]);
    if (this.#body.dataset.kind !== kind || from === undefined) {
      this.#anew(several);
      this.#body.dataset.kind = kind;
      from = this.#first;
    }
    for (let place = Math.max(from, this.#first); place < this.#last; place++) {
      if (this.#tokens[place]) {
        this.#put(place, several);
      }
    }
    const prompt = this.#get<number>('prompt_count') ?? 0;
    this.#earlier.hidden = this.#first === 0;
    this.#later.hidden = this.#last >= this.#count;
    const shown = this.#last - this.#first;
    const hidden = this.#count - shown;
    const parts = [
      hidden > 0 ? `Tokens ${count(this.#first)} to ${count(this.#last - 1)} of ${count(this.#count)}.` : '',
      prompt > 0 && prompt < this.#count ? `The first ${count(prompt)} are the prompt.` : '',
      this.#get<Colours>('colours').note ?? ''
    ];
    say(this.#words, parts.filter(Boolean).join(' '));
    this.#active = Math.min(Math.max(this.#active, this.#first), Math.max(this.#first, this.#last - 1));
    this.#rove();
    this.#markCells(this.#chooser?.position ?? null);
  }

  #anew(several: boolean): void {
    const focused = this.#body.contains(document.activeElement);
    this.#cells.clear();
    const label = `Tokens with ${this.#get<string>('score_name')}`;
    const common = { 'aria-label': label, 'aria-description': KEYS };
    let body: HTMLElement;
    if (several) {
      const head = element('div', { role: 'row', class: 'nnl-strip-heads' }, element('div', { role: 'columnheader', class: 'nnl-strip-name' }));
      const lines = this.#names.map((name, row) =>
        element('div', { role: 'row', 'data-line': String(row) }, element('div', { role: 'rowheader', class: 'nnl-strip-name', title: name }, name))
      );
      body = element('div', { role: 'grid', class: 'nnl-strip-rows', ...common }, head, ...lines);
    } else {
      body = element('div', { role: 'listbox', class: 'nnl-strip-flow', ...common });
    }
    this.#body.replaceWith(body);
    this.#body = body;
    if (focused) {
      requestAnimationFrame(() => this.#cellAt(this.#active, this.#row)?.focus());
    }
  }

  #put(place: number, several: boolean): void {
    const [id, seen, , breaks] = this.#tokens[place]!;
    const ids = () => element('small', { 'aria-hidden': 'true' }, id === null ? '' : String(id));
    const rows = several ? this.#names.length : 1;
    for (let row = 0; row < rows; row++) {
      let cell = this.#cellAt(place, row);
      if (!cell) {
        cell = element('span', { role: several ? 'gridcell' : 'option', tabindex: '-1', class: 'nnl-token', 'data-place': String(place), 'data-row': String(row) });
        this.#cells.set(`${place},${row}`, cell);
        if (several) {
          cell.append(element('b', {}));
          this.#body.querySelector(`[data-line='${row}']`)!.append(cell);
        } else {
          cell.append(element('span', {}, seen), ids());
          this.#body.append(cell);
          if (breaks) {
            this.#body.append(element('br', { role: 'presentation' }));
          }
        }
      }
      if (several) {
        say(cell.firstElementChild as HTMLElement, number(this.#scores[place]![row]!, SEEN_DIGITS));
      }
      cell.classList.toggle('nnl-prompt-token', place < (this.#get<number>('prompt_count') ?? 0));
      // What is seen in a cell is part of what is read of it; all digits are in the readout.
      cell.setAttribute('aria-label', several ? this.#said(place, row, SEEN_DIGITS) : this.#said(place, row));
      this.#colour(cell);
    }
    if (several && !this.#cellAt(place, -1)) {
      const head = element('span', { role: 'columnheader', class: 'nnl-token', 'data-place': String(place), 'data-row': '0' }, element('span', {}, seen), ids());
      this.#cells.set(`${place},-1`, head);
      this.#body.firstElementChild!.append(head);
    }
  }

  #colour(cell: HTMLElement): void {
    const [place, row] = [Number(cell.dataset.place), Number(cell.dataset.row)];
    const score = this.#scores[place]?.[row] ?? NaN;
    if (cell.getAttribute('role') === 'columnheader') {
      return;
    }
    cell.classList.toggle('nnl-gap', !Number.isFinite(score));
    const [background, text] = Number.isFinite(score) ? this.#shades.of(score) : ['', ''];
    cell.style.backgroundColor = background;
    cell.style.color = text;
  }

  #cellAt(place: number, row: number): HTMLElement | undefined {
    return this.#cells.get(`${place},${row}`);
  }

  // -- words -----------------------------------------------------------------------------------

  #said(place: number, row: number, digits = 9): string {
    const token = this.#tokens[place];
    if (!token) {
      return '';
    }
    const [id, seen, said] = token;
    const names = this.#names;
    const parts = names.length ? [names[row]!] : [];
    parts.push(`token ${place}`);
    if (id !== null) {
      parts.push(`id ${id}`);
    }
    parts.push(`'${said === 0 ? seen.replaceAll('·', ' ') : said}'`);
    const score = this.#scores[place]?.[row] ?? NaN;
    const name = this.#get<string>('score_name');
    parts.push(Number.isNaN(score) ? `no ${name}${names.length ? ' (NaN)' : ''}` : `${name} ${number(score, digits)}`);
    return parts.join(', ');
  }

  #readChosen(): void {
    const position = this.#chooser.position;
    say(this.#readout, position === null ? '' : `Chosen: ${this.#said(position, this.#row)}`);
  }

  // -- choosing --------------------------------------------------------------------------------

  #pressed(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.target as HTMLElement).closest('[data-place]')) {
      return;
    }
    const rows = Math.max(1, this.#names.length);
    const moves: Record<string, [number, number]> = {
      ArrowLeft: [this.#active - 1, this.#row],
      ArrowRight: [this.#active + 1, this.#row],
      ArrowUp: rows > 1 ? [this.#active, this.#row - 1] : [this.#beside(-1), 0],
      ArrowDown: rows > 1 ? [this.#active, this.#row + 1] : [this.#beside(1), 0],
      Home: [this.#first, this.#row],
      End: [this.#last - 1, this.#row]
    };
    const move = moves[event.key];
    if (move) {
      this.#goTo(move[0], Math.min(Math.max(move[1], 0), rows - 1), true);
    } else if (event.key === 'Enter' || event.key === ' ') {
      this.#toggle();
    } else if (event.key === 'Escape' && this.#chooser.position !== null) {
      this.#chooser.choose(null);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** The token above or below the active one, as the lines happen to break. */
  #beside(step: number): number {
    const here = this.#cellAt(this.#active, 0)?.getBoundingClientRect();
    if (!here) {
      return this.#active;
    }
    let found = this.#active;
    let line: number | null = null;
    let nearest = Infinity;
    for (let place = this.#active + step; place >= this.#first && place < this.#last; place += step) {
      const box = this.#cellAt(place, 0)?.getBoundingClientRect();
      if (!box || Math.abs(box.top - here.top) < here.height / 2) {
        continue;
      }
      line ??= box.top;
      if (Math.abs(box.top - line) > here.height / 2) {
        break;
      }
      const far = Math.abs(box.left - here.left);
      if (far < nearest) {
        [nearest, found] = [far, place];
      }
    }
    return found;
  }

  #goTo(place: number, row: number, focus: boolean): void {
    this.#active = Math.min(Math.max(place, this.#first), Math.max(this.#first, this.#last - 1));
    this.#row = row;
    this.#rove();
    const cell = this.#cellAt(this.#active, row);
    if (focus && cell) {
      cell.focus({ preventScroll: true });
      cell.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    }
  }

  /** One token is in the order of the Tab key. */
  #rove(): void {
    for (const cell of this.#body.querySelectorAll<HTMLElement>("[tabindex='0']")) {
      cell.tabIndex = -1;
    }
    const cell = this.#cellAt(this.#active, this.#row) ?? this.#cellAt(this.#active, 0);
    if (cell) {
      cell.tabIndex = 0;
    }
  }

  #toggle(): void {
    const place = this.#active;
    this.#chooser.choose(this.#chooser.position === place ? null : place);
    say(this.#live, this.#chooser.position === null ? 'No token is chosen.' : `Chosen: ${this.#said(place, this.#row)}`);
  }

  /** Show what is chosen, wherever it was chosen. */
  #mark(position: number | null): void {
    if (position !== null && (position < this.#first || position >= this.#last)) {
      this.#show(Math.floor(position / this.#most) * this.#most, true);
    }
    this.#markCells(position);
    if (position !== null) {
      this.#active = position;
      this.#rove();
      const cell = this.#cellAt(position, this.#row);
      if (cell) {
        // Into sight within the strip; the page stays where it is.
        const [box, room] = [cell.getBoundingClientRect(), this.#body.getBoundingClientRect()];
        if (box.left < room.left || box.right > room.right) {
          this.#body.scrollLeft += box.left - room.left - room.width / 2;
        }
        if (box.top < room.top || box.bottom > room.bottom) {
          this.#body.scrollTop += box.top - room.top - room.height / 2;
        }
      }
    }
    if (this.#chooser) {
      this.#readChosen();
    }
  }

  #markCells(position: number | null): void {
    for (const cell of this.#body.querySelectorAll('.nnl-chosen')) {
      cell.classList.remove('nnl-chosen');
      cell.setAttribute('aria-selected', 'false');
    }
    if (position === null) {
      return;
    }
    for (let row = -1; row < Math.max(1, this.#names.length); row++) {
      const cell = this.#cellAt(position, row);
      cell?.classList.add('nnl-chosen');
      cell?.setAttribute('aria-selected', 'true');
    }
  }
}

function numbersOf(buffer: DataView): Float64Array {
  return new Float64Array(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength));
}

/** A score that JSON has no number for. */
function special(text: string): number {
  return text === 'inf' ? Infinity : text === '-inf' ? -Infinity : NaN;
}

function number(score: number, digits: number): string {
  if (Number.isNaN(score)) {
    return 'NaN';
  }
  if (!Number.isFinite(score)) {
    return score > 0 ? 'inf' : '−inf';
  }
  return String(Number(score.toPrecision(digits))).replace('-', '−');
}

export default { render: rendered((model, el) => new TokenStrip(model, el)) };
