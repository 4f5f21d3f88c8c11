import type { AnyModel } from '@anywidget/types';
import { Axes } from './axes';
import { Chooser } from './chooser';
import { Conversation, KernelError } from './conversation';
import { Detail } from './detail';
import { Disposer } from './disposer';
import { button, copy, count, element, say } from './dom';
import * as kinds from './kinds';
import { Legend } from './legend';
import { Line } from './line';
import { Matrix } from './matrix';
import type { Palettes } from './palette';
import type { Settings, Told } from './painter';
import { rendered } from './render';
import { Stage } from './stage';
import { isDark, onTheme } from './theme';
import type { Cell } from './viewport';

interface State {
  name: string;
  shape: number[];
  dtype: string;
  size: string;
  axes: string[];
  labelled: boolean[];
  settings: { how: string; scale: string; clip: string | [number, number] };
  height: number;
  poster: string;
  described: string;
  palettes: Palettes;
  /** Of rows and columns, the position that the first one is; null where they are no positions. */
  places: [number | null, number | null];
}

const KEYS =
  'Arrow keys pan, plus and minus zoom, Home shows all, Shift with arrows moves a cursor, Enter shows exact values.';
const HOWS = { mean: 'mean', max: 'largest', min: 'smallest', absmax: 'largest magnitude' };
const SCALES = { auto: 'automatic', sequential: 'low to high', diverging: 'around zero', log: 'log of magnitude' };

/** A heatmap in one place on the page. */
class Heatmap {
  #disposer = new Disposer();
  #state: State;
  #settings: Settings;
  #conversation: Conversation;
  #stage: Stage | null = null;
  #painter: Matrix | Line;
  #chooser: Chooser | null = null;
  #axes: Axes;
  #legend: Legend;
  #detail: Detail;
  #span: [number, number, string] | null = null;
  #sampled = false;
  /** Whether more rows may come. */
  #running = false;
  #about = element('span', { class: 'nnl-faint' });
  #readout = element('div', { class: 'nnl-readout' });
  #words = element('div', { class: 'nnl-words' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #wait = element('div', { class: 'nnl-wait', role: 'status', hidden: '' });
  #live = element('div', { class: 'nnl-hidden', role: 'status', 'aria-live': 'polite' });
  #pointed: Cell | null = null;
  #asking = false;
  #liveTimer = 0;
  readonly #madeAt = performance.now();
  #changedAt = this.#madeAt;

  constructor(
    model: AnyModel,
    readonly root: HTMLElement
  ) {
    const get = <K extends keyof State>(name: K) => model.get(name) as State[K];
    const names = ['name', 'shape', 'dtype', 'size', 'axes', 'labelled', 'settings', 'height', 'poster', 'described', 'palettes', 'places'] as const;
    this.#state = Object.fromEntries(names.map(name => [name, get(name)])) as unknown as State;
    const { shape, palettes, settings, labelled } = this.#state;
    this.#settings = { ...settings, leads: shape.slice(0, -2).map(() => 0) };
    this.#conversation = new Conversation(model, this.#disposer);
    this.#conversation.slow = slow => {
      const saved = this.#state.poster ? ' Until then there is a small picture.' : '';
      say(this.#wait, `The kernel has not answered yet. If it is busy it will; if it is gone, run the cell again.${saved}`);
      this.#wait.hidden = !slow;
    };
    const told = (what: Told) => this.#told(what);
    const line = shape.length === 1;
    this.#painter = line ? new Line(this.#conversation, palettes, told) : new Matrix(this.#conversation, palettes, told);
    this.#axes = new Axes(this.#conversation, labelled, () => this.#stage?.refresh());
    if (line) {
      this.#axes.left = 62;
    }
    this.#legend = new Legend(palettes);
    this.#detail = new Detail(
      () => this.#stage?.canvas.focus(),
      text => this.#announce(text)
    );
    this.#build();
    this.#follow(model);
    const heard = (message: unknown, buffers: DataView[]) => {
      const content = message as Record<string, unknown>;
      if (content[kinds.KIND] === kinds.GREW && this.#stage) {
        const copies = buffers.map(one => new Uint8Array(one.buffer.slice(one.byteOffset, one.byteOffset + one.byteLength)));
        this.#grew(model, content, copies);
      }
    };
    model.on('msg:custom', heard);
    this.#disposer.add(() => {
      model.off('msg:custom', heard);
      clearTimeout(this.#liveTimer);
    });
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  #build(): void {
    const { root } = this;
    const { name, shape } = this.#state;
    root.classList.add('nnl-heatmap');
    // JupyterLab's own keys would move from cell to cell, or delete one.
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.#about.textContent = this.#aboutText();
    const head = element('div', { class: 'nnl-head' }, element('strong', {}, name), this.#about);
    root.append(head);
    if (shape.includes(0)) {
      root.append(element('p', { class: 'nnl-words' }, 'It is empty: there is nothing to draw.'), this.#error);
      this.#set('done');
      return;
    }
    if (shape.length === 0) {
      this.#number();
      return;
    }
    this.#stage = this.#makeStage();
    head.append(this.#toolbar());
    root.append(...this.#sliders(), this.#stage.canvas);
    root.append(element('div', { class: 'nnl-foot' }, this.#readout, this.#legend.root));
    root.append(this.#words, this.#wait, this.#error, this.#detail.root, this.#live);
    if (this.#painter instanceof Line) {
      this.#legend.plain();
    }
    this.#disposer.listen(this.root, 'keydown', event => {
      if (event.key === 'Escape' && this.#detail.open) {
        this.#detail.hide();
        event.stopPropagation();
      }
    });
    onTheme(() => this.#recolour(), this.#disposer);
    this.#recolour();
    this.#describe();
    this.#loadPoster();
  }

  #aboutText(): string {
    const { dtype, size, shape } = this.#state;
    return `${dtype}${shape.length ? ` [${shape.map(count).join(' × ')}]` : ''} · ${size}`;
  }

  #makeStage(): Stage {
    const { shape, height, described } = this.#state;
    const matrix: [number, number] = shape.length === 1 ? [1, shape[0]!] : [shape.at(-2)!, shape.at(-1)!];
    const stage = new Stage(
      this.#painter,
      this.#axes,
      () => this.#settings,
      {
        pointed: cell => this.#point(cell),
        picked: (cell, byKey) => this.#pick(cell, byKey),
        moved: () => this.#moved(),
        failed: error => this.#fail(error),
        state: done => {
          this.#set(done ? 'done' : 'busy');
          this.#describe();
          if (this.#painter instanceof Matrix) {
            this.#spanned(this.#painter.span(stage.view, this.#settings));
          }
        }
      },
      this.#conversation,
      matrix,
      height,
      this.#disposer
    );
    const { canvas } = stage;
    canvas.setAttribute('role', 'application');
    canvas.setAttribute('aria-roledescription', 'heatmap');
    canvas.setAttribute('aria-label', described);
    canvas.setAttribute('aria-description', KEYS);
    canvas.setAttribute('aria-keyshortcuts', 'ArrowLeft ArrowRight ArrowUp ArrowDown + - Home Enter');
    canvas.title = `${KEYS} Drag to pan, Ctrl and wheel to zoom.`;
    // The browser's own hint would lie over the values that the pointer is after.
    this.#disposer.listen(canvas, 'pointerenter', () => canvas.removeAttribute('title'));
    return stage;
  }

  #toolbar(): HTMLElement {
    const stage = this.#stage!;
    const bar = element('div', { class: 'nnl-bar', role: 'group', 'aria-label': 'How it is drawn' });
    if (this.#painter instanceof Matrix) {
      const { clip } = this.#state.settings;
      const ranges: Record<string, string> = { robust: 'middle 98 %', full: 'all values' };
      if (typeof clip !== 'string') {
        ranges.given = `${clip[0]} to ${clip[1]}`;
      }
      ranges.held = 'as now';
      bar.append(
        this.#choice('From afar', HOWS, this.#settings.how, how => (this.#settings.how = how)),
        this.#choice('Colours', SCALES, this.#settings.scale, scale => (this.#settings.scale = scale)),
        this.#choice('Range', ranges, typeof clip === 'string' ? clip : 'given', range => {
          if (range === 'held' && this.#span) {
            this.#settings.clip = [this.#span[0], this.#span[1]];
          } else {
            this.#settings.clip = range === 'given' ? clip : range === 'full' ? 'full' : 'robust';
          }
        })
      );
    }
    bar.append(
      button('−', 'Zoom out', () => stage.zoom(1 / 1.5)),
      button('+', 'Zoom in', () => stage.zoom(1.5)),
      button('Fit', 'Fit: show all of it', () => stage.fit()),
      button('Copy slice', 'Copy slice: the expression of what is in sight', async () => {
        const expression = this.#expression();
        const done = await copy(expression);
        this.#announce(done ? `Copied ${expression}` : expression);
        say(this.#readout, done ? `Copied ${expression}` : expression);
      })
    );
    return bar;
  }

  #choice(label: string, options: Record<string, string>, chosen: string, change: (value: string) => void): HTMLElement {
    const select = element(
      'select',
      { class: 'nnl-select' },
      ...Object.entries(options).map(([value, text]) => element('option', value === chosen ? { value, selected: '' } : { value }, text))
    );
    this.#disposer.listen(select, 'change', () => {
      change(select.value);
      this.#changed();
    });
    return element('label', { class: 'nnl-choice' }, element('span', {}, label), select);
  }

  #sliders(): HTMLElement[] {
    const { shape, axes } = this.#state;
    return this.#settings.leads.map((_, dim) => {
      const most = String(shape[dim]! - 1);
      const name = axes[dim]!;
      const range = element('input', { type: 'range', min: '0', max: most, value: '0', 'aria-label': name });
      const number = element('input', { type: 'number', min: '0', max: most, value: '0', 'aria-label': `${name}, as a number`, class: 'nnl-number' });
      const change = (text: string) => {
        const at = Math.min(Math.max(Math.round(Number(text)) || 0, 0), Number(most));
        range.value = number.value = String(at);
        if (this.#settings.leads[dim] !== at) {
          this.#settings.leads = this.#settings.leads.map((old, other) => (other === dim ? at : old));
          this.#changed();
        }
      };
      this.#disposer.listen(range, 'input', () => change(range.value));
      this.#disposer.listen(number, 'change', () => change(number.value));
      return element('div', { class: 'nnl-slider' }, element('span', {}, name), range, number, element('span', { class: 'nnl-faint' }, `of ${count(shape[dim]!)}`));
    });
  }

  #changed(): void {
    this.#changedAt = performance.now();
    this.#sampled = false;
    this.#detail.hide();
    this.#error.hidden = true;
    this.#moved();
    this.#stage?.refresh();
  }

  #number(): void {
    const text = element('div', { class: 'nnl-one', role: 'text' });
    this.root.append(text, this.#error);
    this.#conversation
      .ask(kinds.VALUE, { leads: [], row: 0, column: 0 }, ({ content }) => {
        say(text, String(content.text));
        this.#set('done');
      })
      .catch(error => this.#fail(error));
  }

  /** Share the position, where its rows or columns are positions. */
  #follow(model: AnyModel): void {
    if (this.#chooser) {
      this.#chooser.follow();
    } else if (this.#stage && this.#state.places?.some(first => first !== null)) {
      this.#axes.firsts = this.#state.places.map(first => first ?? 0) as [number, number];
      const knows = (position: number) => this.#cellOf(position).some(at => at !== null);
      this.#chooser = new Chooser(model, this.#conversation, knows, position => this.#mark(position), this.#disposer);
    }
  }

  /** There is more of it, and a picture of all there is. */
  #grew(model: AnyModel, content: Record<string, unknown>, buffers: Uint8Array[]): void {
    const traits = content.traits as Record<string, unknown>;
    for (const [name, value] of Object.entries(traits)) {
      model.set(name, value);
    }
    Object.assign(this.#state, traits);
    const { shape, labelled, places, described } = this.#state;
    this.#running = content.running === true;
    const stage = this.#stage!;
    say(this.#about, this.#aboutText());
    stage.canvas.setAttribute('aria-label', described);
    this.#axes.grew(labelled, places.map(first => first ?? 0) as [number, number], this.#running);
    if (shape.length === 1) {
      this.#axes.left = 62;
    }
    this.#painter.grew(content, buffers, this.#running);
    stage.view.grow(shape.length === 1 ? 1 : shape.at(-2)!, shape.at(-1)!);
    stage.resize();
    this.#follow(model);
    if (this.#chooser) {
      this.#mark(this.#chooser.position, false);
    }
    this.#describe();
    this.root.dataset.rows = String(shape[0]);
  }

  // -- what the kernel said --------------------------------------------------------------------

  #told({ span, special, sampled, came }: Told): void {
    this.#spanned(span);
    if (special) {
      this.#legend.special(special, this.#state.shape.slice(-2).reduce((product, size) => product * size, 1));
    }
    if (came) {
      this.#error.hidden = true;
      if (sampled !== undefined && sampled !== this.#sampled) {
        this.#sampled = sampled;
        this.#describe();
      }
      this.#stage?.refresh();
      if (!this.root.dataset.firstMs) {
        // The frame that was just asked for comes first.
        requestAnimationFrame(() => (this.root.dataset.firstMs ??= (performance.now() - this.#madeAt).toFixed(1)));
      }
    }
    this.root.dataset.bytes = String(this.#conversation.bytes);
  }

  #spanned(span: Told['span']): void {
    if (span && span !== this.#span) {
      const changed = this.#span?.[2] !== span[2];
      this.#span = span;
      this.#legend.span(...span);
      if (changed) {
        this.#recolour();
      }
    }
  }

  #fail(error: Error): void {
    if (!(error instanceof KernelError)) {
      this.#conversation.tell(kinds.FAILED, { [kinds.ERROR]: error.stack ?? String(error) });
    }
    say(this.#error, error.message);
    this.#error.hidden = false;
    this.#set('failed');
  }

  /** For whoever waits until it is drawn: tests, and the measurements of it. */
  #set(state: string): void {
    if (this.root.dataset.state !== state) {
      this.root.dataset.state = state;
      if (state === 'done') {
        this.root.dataset.tookMs = (performance.now() - this.#changedAt).toFixed(1);
      }
    }
    this.root.dataset.bytes = String(this.#conversation.bytes);
  }

  // -- words -----------------------------------------------------------------------------------

  #moved(): void {
    if (this.root.dataset.state === 'done') {
      this.#changedAt = performance.now();
    }
    this.#describe();
    clearTimeout(this.#liveTimer);
    this.#liveTimer = window.setTimeout(() => this.#announce(`${this.#inSight()}. ${this.#words.textContent}`), 600);
  }

  #describe(): void {
    const [a, b] = this.#stage?.view.level ?? [0, 0];
    const size = 2 ** (a + b);
    let text = 'Every value is shown.';
    if (this.#running) {
      say(this.#words, 'It is growing: a picture of all there is so far.');
      return;
    }
    if (this.#painter instanceof Line && b > 0) {
      text = `Shown 1 of ${count(size)} values: the line is their mean, the band goes from the smallest to the largest.`;
    } else if (this.#sampled) {
      text = 'A sample of single values, until the rest is read.';
    } else if (size > 1) {
      const how = HOWS[this.#settings.how as keyof typeof HOWS];
      text = `Shown 1 of ${count(size)} values: ${how} of ${count(2 ** a)} × ${count(2 ** b)}.`;
    }
    say(this.#words, text);
  }

  #inSight(): string {
    const { axes, shape } = this.#state;
    const [firstRow, lastRow, first, last] = this.#stage!.view.window;
    const columns = `${axes.at(-1)} ${count(first)} to ${count(last - 1)} of ${count(shape.at(-1)!)}`;
    return shape.length === 1 ? columns : `${axes.at(-2)} ${count(firstRow)} to ${count(lastRow - 1)} of ${count(shape.at(-2)!)}, ${columns}`;
  }

  #expression(): string {
    const [firstRow, lastRow, first, last] = this.#stage!.view.window;
    const rows = this.#state.shape.length === 1 ? [] : [`${firstRow}:${lastRow}`];
    return `${this.#state.name}[${[...this.#settings.leads, ...rows, `${first}:${last}`].join(', ')}]`;
  }

  #announce(text: string): void {
    // A text that is there already would not be read again.
    say(this.#live, this.#live.textContent === text ? `${text} ` : text);
  }

  // -- one place -------------------------------------------------------------------------------

  #where(cell: Cell): Record<string, unknown> {
    return { leads: this.#settings.leads, level: this.#stage!.view.level, ...cell };
  }

  #point(cell: Cell | null): void {
    this.#pointed = cell;
    if (!cell) {
      say(this.#readout, '');
    } else if (!this.#asking) {
      void this.#askValue(cell);
    }
  }

  async #askValue(cell: Cell): Promise<void> {
    this.#asking = true;
    try {
      await this.#conversation.ask(kinds.VALUE, this.#where(cell), ({ content }) => {
        if (this.#pointed) {
          const text = `${content.text}  at ${content.where}`;
          say(this.#readout, text);
          if (this.#stage?.cursor === cell) {
            this.#announce(text);
          }
        }
      });
    } catch (error) {
      this.#fail(error as Error);
    }
    this.#asking = false;
    if (this.#pointed && this.#pointed !== cell && !same(this.#pointed, cell)) {
      void this.#askValue(this.#pointed);
    }
  }

  /** The row and the column that a position is. */
  #cellOf(position: number | null): [number | null, number | null] {
    const sizes = [this.#state.shape.at(-2) ?? 1, this.#state.shape.at(-1)!];
    return this.#state.places.map((first, axis) => {
      const at = position === null || first === null ? -1 : position - first;
      return at >= 0 && at < sizes[axis]! ? at : null;
    }) as [number | null, number | null];
  }

  #mark(position: number | null, reveal = true): void {
    const stage = this.#stage!;
    stage.marked = this.#cellOf(position);
    this.root.dataset.position = position === null ? '' : String(position);
    if (reveal) {
      stage.reveal(...stage.marked);
    }
  }

  #pick(cell: Cell, byKey: boolean): void {
    const [a, b] = this.#stage!.view.level;
    const [row, column] = this.#state.places ?? [null, null];
    if (this.#chooser && (row !== null || column !== null)) {
      this.#chooser.choose(row !== null ? row + cell.row * 2 ** a : column! + cell.column * 2 ** b);
    }
    this.#conversation
      .ask(kinds.DETAIL, this.#where(cell), answer => {
        this.#detail.show(answer, byKey);
        this.#announce(`${answer.content.text} at ${answer.content.where}`);
      })
      .catch(error => this.#fail(error));
  }

  // -- colours ---------------------------------------------------------------------------------

  #recolour(): void {
    this.#painter.recolour(this.#span?.[2] ?? 'sequential', isDark(this.root));
    if (this.#painter instanceof Matrix) {
      this.#legend.colours(this.#painter.colours);
    }
    this.#stage?.refresh();
  }

  #loadPoster(): void {
    const { poster } = this.#state;
    if (poster) {
      const image = new Image();
      image.onload = () => {
        if (this.#stage) {
          this.#stage.poster = image;
          this.#stage.refresh();
        }
      };
      image.src = poster;
    }
  }
}

function same(one: Cell, other: Cell): boolean {
  return one.row === other.row && one.column === other.column;
}

export default { render: rendered((model, el) => new Heatmap(model, el)) };
