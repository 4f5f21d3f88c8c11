import type { AnyModel } from '@anywidget/types';
import { Axes } from './axes';
import { Conversation, KernelError } from './conversation';
import { Disposer } from './disposer';
import { button, count, element, say } from './dom';
import * as kinds from './kinds';
import { Legend } from './legend';
import { Matrix } from './matrix';
import { lookup, paint, type Palettes } from './palette';
import type { Settings } from './painter';
import { picker } from './picker';
import { choosePosition, onPosition } from './position';
import { rendered } from './render';
import { type Box, type Place, Sheet, type Sight } from './sheet';
import { Stage } from './stage';
import { TokenLine } from './token_line';
import { isDark, onTheme } from './theme';
import type { Cell } from './viewport';

const SCALES = { log: '1 to 100 %, logarithmic', sequential: '0 to 100 %' };
const SPANS: Record<string, [number, number]> = { log: [0.01, 1], sequential: [0, 1] };
const MAX_THUMBS = 4000;
const LABELS_AT_ONCE = 400;
/** Tokens in the strip; a longer prompt shows those up to the query. */
const STRIP_TOKENS = 2000;
const TOP_KEYS = 3;
const KEYS =
  'Arrow keys pan, plus and minus zoom, Home shows all, Shift with arrows moves a cursor, Enter chooses the query there in every view.';
const GRID_KEYS = 'Arrow keys move among layers and heads, Enter enlarges a head, plus and minus zoom.';

interface Prompt {
  layers: number[];
  heads: number[];
  queries: number[] | null;
  sizes: [number, number, number, number];
  sequence: string;
}

interface Layer {
  high: number;
  wide: number;
  codes: Uint8Array[];
  painted: (HTMLCanvasElement | null)[];
}

/** Attention patterns in one place on the page. */
class Attention {
  #disposer = new Disposer();
  #ofPrompt = new Disposer();
  #conversation: Conversation;
  #palettes: Palettes;
  #prompt: Prompt | null = null;
  #number = 0;
  #sheet: Sheet;
  #stage: Stage | null = null;
  #matrix: Matrix | null = null;
  #strip: TokenLine;
  #legend: Legend;
  #settings: Settings = { leads: [0, 0], how: 'max', scale: 'log', clip: SPANS.log! };
  #layers = new Map<number, Layer>();
  #asked = new Set<number>();
  #thumbTimer = 0;
  #colours: Uint32Array = new Uint32Array(256);
  #tokens: string[] = [];
  /** The row of the patterns that the strip is about. */
  #query = 0;
  /** The row that it is about when nobody points at another. */
  #stays = 0;
  /** A position is chosen, here or in another view. */
  #chosen = false;
  #weights: Float32Array[] = [];
  #asking = false;
  #again: (() => void) | null = null;
  #height: number;
  #title = element('strong', {}, 'Attention');
  #about = element('span', { class: 'nnl-faint' });
  #large = element('div', { class: 'nnl-large' });
  #largeTitle = element('b');
  #readout = element('div', { class: 'nnl-readout' });
  #heads = element('div', { class: 'nnl-pane nnl-heads-told' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #wait = element('div', { class: 'nnl-wait', role: 'status', hidden: '' });
  #live = element('div', { class: 'nnl-hidden', role: 'status', 'aria-live': 'polite' });

  constructor(
    model: AnyModel,
    readonly root: HTMLElement
  ) {
    this.#palettes = model.get('palettes') as Palettes;
    this.#height = model.get('height') as number;
    this.#legend = new Legend(this.#palettes);
    this.#conversation = new Conversation(model, this.#disposer);
    this.#conversation.slow = slow => {
      say(this.#wait, 'The kernel has not answered yet. If it is busy it will; if it is gone, run the cell again.');
      this.#wait.hidden = !slow;
    };
    this.#sheet = new Sheet(
      {
        seen: sight => this.#seen(sight),
        cell: (context, place, box) => this.#thumb(context, place, box),
        rowHead: row => `layer ${this.#prompt?.layers[this.#at(row)] ?? ''}`,
        columnHead: column => String(this.#prompt?.heads[column] ?? ''),
        spoken: place => `layer ${this.#prompt?.layers[this.#at(place.row)]}, head ${this.#prompt?.heads[place.column]}`,
        pointed: () => undefined,
        picked: place => this.#enlarge(this.#at(place.row), place.column),
        failed: error => this.#fail(error)
      },
      Math.min(this.#height, 330),
      'Heads by layer, the last layer on top',
      GRID_KEYS,
      this.#disposer
    );
    this.#sheet.square = true;
    this.#strip = new TokenLine(
      at => this.#look(this.#queryAt(at)),
      at => this.#choose(this.#queryAt(at)),
      () => this.#look(this.#stays),
      this.#disposer
    );
    this.#build(model.get('prompts') as string[], model.get('count') as number);
    this.#disposer.add(() => {
      this.#ofPrompt.dispose();
      clearTimeout(this.#thumbTimer);
    });
    void this.#open(0);
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  #build(prompts: string[], total: number): void {
    const { root } = this;
    root.classList.add('nnl-attention');
    // JupyterLab's own keys would move from cell to cell, or delete one.
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    const scale = element(
      'select',
      { class: 'nnl-select', 'aria-label': 'Colours' },
      ...Object.entries(SCALES).map(([value, text]) => element('option', { value }, text))
    );
    this.#disposer.listen(scale, 'change', () => {
      this.#settings = { ...this.#settings, scale: scale.value, clip: SPANS[scale.value]! };
      this.#layers.clear();
      this.#asked.clear();
      this.#recolour();
    });
    const pick = picker(prompts, total, number => void this.#open(number), this.#disposer);
    const bar = element(
      'div',
      { class: 'nnl-bar', role: 'group', 'aria-label': 'How it is drawn' },
      ...(pick ? [pick] : []),
      element('label', { class: 'nnl-choice' }, element('span', {}, 'Colours'), scale),
      button('−', 'Smaller heads', () => this.#sheet.zoom(-1)),
      button('+', 'Larger heads', () => this.#sheet.zoom(1))
    );
    const largeBar = element(
      'div',
      { class: 'nnl-bar', role: 'group', 'aria-label': 'The large head' },
      button('−', 'Zoom out', () => this.#stage?.zoom(1 / 1.5)),
      button('+', 'Zoom in', () => this.#stage?.zoom(1.5)),
      button('Fit', 'Fit: show all of it', () => this.#stage?.fit())
    );
    root.append(
      element('div', { class: 'nnl-head' }, this.#title, this.#about, bar),
      this.#sheet.root,
      element('div', { class: 'nnl-head nnl-large-head' }, this.#largeTitle, element('span', { class: 'nnl-faint' }, 'queries downward, keys across'), largeBar),
      this.#large,
      element('div', { class: 'nnl-foot' }, this.#readout, this.#legend.root),
      element('div', { class: 'nnl-beside' }, this.#strip.root, this.#heads),
      this.#wait,
      this.#error,
      this.#live
    );
    this.#disposer.listen(root, 'keydown', event => {
      if (event.key === 'Escape' && this.#chosen) {
        this.#chosen = false;
        this.#strip.choose(null);
        choosePosition(this.#prompt!.sequence, null, this.#conversation.view);
        this.#announce('No position is chosen.');
        event.stopPropagation();
      }
    });
    onTheme(() => this.#recolour(), this.#disposer);
  }

  // -- one prompt ------------------------------------------------------------------------------

  async #open(number: number): Promise<void> {
    this.root.dataset.state = 'busy';
    try {
      await this.#conversation.ask(kinds.PROMPT, { prompt: number }, ({ content }) => {
        this.#ofPrompt.dispose();
        this.#conversation.always = { prompt: number };
        this.#number = number;
        this.#prompt = content as unknown as Prompt;
        this.#layers.clear();
        this.#asked.clear();
        this.#weights = [];
        this.#chosen = false;
        const [layers, heads, queries, keys] = this.#prompt.sizes;
        say(this.#about, `${many(layers, 'layer')} × ${many(heads, 'head')}, ${many(queries, 'query', 'queries')} × ${many(keys, 'key')}`);
        this.#settings = { ...this.#settings, leads: [layers - 1, 0] };
        this.#query = this.#stays = queries - 1;
        this.#sheet.shape(layers, heads);
        this.#sheet.chosenCell = { row: 0, column: 0 };
        this.#makeStage(queries, keys);
        this.#recolour();
      });
      await this.#readTokens(number);
      if (number === this.#number) {
        this.#enlarge(this.#settings.leads[0]!, this.#settings.leads[1]!);
        onPosition(this.#prompt!.sequence, this.#conversation.view, place => this.#heard(place), this.#ofPrompt);
      }
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #makeStage(queries: number, keys: number): void {
    const matrix = new Matrix(this.#conversation, this.#palettes, ({ came }) => {
      if (came) {
        this.#error.hidden = true;
        this.#stage?.refresh();
      }
      this.root.dataset.bytes = String(this.#conversation.bytes);
    });
    const axes = new Axes(this.#conversation, [true, true], () => this.#stage?.refresh());
    const stage = new Stage(
      matrix,
      axes,
      () => this.#settings,
      {
        pointed: cell => this.#point(cell),
        picked: cell => this.#choose(this.#row(cell)),
        moved: () => undefined,
        failed: error => this.#fail(error),
        state: done => {
          this.root.dataset.state = done ? 'done' : 'busy';
        }
      },
      this.#conversation,
      [queries, keys],
      this.#height,
      this.#ofPrompt
    );
    stage.canvas.setAttribute('role', 'application');
    stage.canvas.setAttribute('aria-roledescription', 'heatmap');
    stage.canvas.setAttribute('aria-label', `Attention, ${many(queries, 'query', 'queries')} by ${many(keys, 'key')}`);
    stage.canvas.setAttribute('aria-description', KEYS);
    this.#large.replaceChildren(stage.canvas);
    this.#matrix = matrix;
    this.#stage = stage;
  }

  async #readTokens(number: number): Promise<void> {
    const keys = this.#prompt!.sizes[3];
    const tokens: string[] = [];
    for (let first = 0; first < Math.min(keys, STRIP_TOKENS); first += LABELS_AT_ONCE) {
      const last = Math.min(first + LABELS_AT_ONCE, keys);
      await this.#conversation.ask(kinds.LABELS, { prompt: number, axis: 1, first, last }, ({ content }) => {
        tokens.push(...(content.labels as string[]));
      });
    }
    if (number === this.#number) {
      this.#tokens = tokens;
      this.#strip.show(tokens, keys);
    }
  }

  /** Row 0 of the grid is the last layer. */
  #at(row: number): number {
    return (this.#prompt?.layers.length ?? 1) - 1 - row;
  }

  /** The place in the prompt of a row of the patterns, and the other way round; -1 where it was not asked for. */
  #place(query: number): number {
    return this.#prompt?.queries?.[query] ?? query;
  }

  #queryAt(place: number): number {
    const { queries, sizes } = this.#prompt!;
    return queries ? queries.indexOf(place) : place < sizes[2] ? place : -1;
  }

  // -- the heads, small ------------------------------------------------------------------------

  #seen({ rows }: Sight): void {
    const missing: number[] = [];
    for (let row = rows[0]; row < rows[1]; row++) {
      const layer = this.#at(row);
      if (!this.#layers.has(layer) && !this.#asked.has(layer)) {
        missing.push(layer);
      }
    }
    if (missing.length && !this.#thumbTimer) {
      this.#thumbTimer = window.setTimeout(() => {
        this.#thumbTimer = 0;
        void this.#askThumbs(missing);
      }, 30);
    }
  }

  async #askThumbs(layers: number[]): Promise<void> {
    const [prompt, scale] = [this.#prompt!, this.#settings.scale];
    layers.forEach(layer => this.#asked.add(layer));
    try {
      await this.#conversation.ask(kinds.HEADS, { layers, scale }, ({ content, buffers, dropped }) => {
        if (prompt !== this.#prompt || scale !== this.#settings.scale) {
          return;
        }
        if (dropped) {
          layers.filter(layer => !this.#layers.has(layer)).forEach(layer => this.#asked.delete(layer));
        } else if (content.layer !== undefined) {
          const [high, wide] = content.sizes as [number, number];
          const all = buffers.flatMap(buffer => {
            const heads = buffer.length / (high * wide);
            return Array.from({ length: heads }, (_, head) => buffer.subarray(head * high * wide, (head + 1) * high * wide));
          });
          this.#layers.set(content.layer as number, { high, wide, codes: all, painted: all.map(() => null) });
          const room = Math.max(4, Math.floor(MAX_THUMBS / Math.max(1, all.length)));
          while (this.#layers.size > room) {
            const oldest = this.#layers.keys().next().value!;
            this.#layers.delete(oldest);
            this.#asked.delete(oldest);
          }
        }
        this.#sheet.refresh();
      });
    } catch (error) {
      if (prompt === this.#prompt) {
        this.#fail(error as Error);
      }
    }
    this.root.dataset.thumbs = String(this.#layers.size);
  }

  #thumb(context: CanvasRenderingContext2D, { row, column }: Place, box: Box): void {
    const layer = this.#layers.get(this.#at(row));
    const codes = layer?.codes[column];
    if (layer && codes) {
      const picture = (layer.painted[column] ??= paint(codes, layer.high, layer.wide, this.#colours));
      context.imageSmoothingEnabled = false;
      context.drawImage(picture, box.x + 1, box.y + 1, box.width - 2, box.height - 2);
    }
  }

  /** Show a head of a layer large, by their places among those asked for. */
  #enlarge(layer: number, head: number): void {
    const { layers, heads } = this.#prompt!;
    const other = layer !== this.#settings.leads[0] || !this.#weights.length;
    this.#settings = { ...this.#settings, leads: [layer, head] };
    this.#sheet.chosenCell = { row: layers.length - 1 - layer, column: head };
    const name = `layer ${layers[layer]}, head ${heads[head]}`;
    say(this.#largeTitle, name);
    this.#announce(name);
    this.#stage?.refresh();
    this.#sheet.refresh();
    if (other) {
      this.#look(this.#query);
    } else {
      this.#tell();
    }
  }

  // -- where a token looks ---------------------------------------------------------------------

  #row(cell: Cell): number {
    return Math.min(cell.row * 2 ** this.#stage!.view.level[0], this.#prompt!.sizes[2] - 1);
  }

  #point(cell: Cell | null): void {
    if (!cell || this.#asking) {
      if (!cell) {
        say(this.#readout, '');
      }
      this.#again = cell ? () => this.#point(cell) : null;
      return;
    }
    this.#asking = true;
    const where = { leads: this.#settings.leads, level: this.#stage!.view.level, ...cell };
    this.#conversation
      .ask(kinds.VALUE, where, ({ content }) => {
        const text = `${content.text}  at ${content.where}`;
        say(this.#readout, text);
        if (this.#stage?.cursor === cell) {
          this.#announce(text);
        }
      })
      .catch(error => this.#fail(error))
      .finally(() => {
        this.#asking = false;
        const again = this.#again;
        this.#again = null;
        again?.();
      });
  }

  /** Show where a query looks; -1 is one whose row was not asked for. */
  #look(query: number): void {
    if (query < 0) {
      this.#strip.words('This token is none of the queries that were asked for.');
      return;
    }
    this.#query = query;
    const [layer] = this.#settings.leads;
    const prompt = this.#prompt;
    this.#conversation
      .ask(kinds.CELL, { layer, query }, ({ buffers }) => {
        if (prompt === this.#prompt && query === this.#query && layer === this.#settings.leads[0]) {
          this.#weights = buffers.map(one => new Float32Array(one.buffer));
          if (this.#stage) {
            this.#stage.row = query;
            this.#stage.refresh();
          }
          this.#tell();
        }
      })
      .catch(error => this.#fail(error));
  }

  #tell(): void {
    const [layer, head] = this.#settings.leads as [number, number];
    const { layers, heads } = this.#prompt!;
    const place = this.#place(this.#query);
    const token = this.#tokens[place] ?? '';
    this.#strip.weigh(this.#weights[head] ?? new Float32Array(), place);
    this.#strip.words(`Where position ${count(place)} “${token}” looks in layer ${layers[layer]}, head ${heads[head]}. Point at a token, or move with the arrow keys; Enter chooses it in every view.`);
    const rows = this.#weights.map((weights, number) => {
      const top = highest(weights, TOP_KEYS).flatMap(key => [element('code', {}, this.#tokens[key] ?? count(key)), ` ${percent(weights[key]!)}  `]);
      const pick = element('button', { type: 'button', class: 'nnl-button', 'aria-pressed': String(number === head), 'aria-label': `Enlarge head ${heads[number]}` }, String(heads[number]));
      pick.onclick = () => this.#enlarge(layer, number);
      return element('tr', {}, element('th', { scope: 'row' }, pick), element('td', {}, ...top));
    });
    this.#heads.replaceChildren(
      element('div', { class: 'nnl-faint' }, `Every head of layer ${layers[layer]}, from position ${count(place)} `, element('code', {}, token)),
      element('table', { class: 'nnl-top' }, element('tbody', {}, ...rows))
    );
    this.root.dataset.query = String(this.#query);
  }

  // -- the position that all views share -------------------------------------------------------

  #choose(query: number): void {
    this.#look(query);
    if (query >= 0) {
      this.#stays = query;
      this.#chosen = true;
      const place = this.#place(query);
      this.#strip.choose(place);
      choosePosition(this.#prompt!.sequence, place, this.#conversation.view);
      this.#announce(`Position ${count(place)} is chosen in every view of this prompt.`);
    }
  }

  #heard(place: number | null): void {
    this.#chosen = place !== null;
    this.#strip.choose(place);
    if (place !== null) {
      const query = this.#queryAt(place);
      this.#stays = query < 0 ? this.#stays : query;
      this.#look(query);
    }
  }

  // -- words and colours -----------------------------------------------------------------------

  #recolour(): void {
    const dark = isDark(this.root);
    this.#matrix?.recolour(this.#settings.scale, dark);
    this.#colours = lookup(this.#palettes, 'sequential', dark);
    this.#legend.colours(this.#colours);
    this.#legend.span(...SPANS[this.#settings.scale]!, 'sequential');
    for (const layer of this.#layers.values()) {
      layer.painted.fill(null);
    }
    this.#stage?.refresh();
    this.#sheet.refresh();
  }

  #announce(text: string): void {
    // A text that is there already would not be read again.
    say(this.#live, this.#live.textContent === text ? `${text} ` : text);
  }

  #fail(error: Error): void {
    if (!(error instanceof KernelError)) {
      this.#conversation.tell(kinds.FAILED, { [kinds.ERROR]: error.stack ?? String(error) });
    }
    say(this.#error, error.message);
    this.#error.hidden = false;
    this.root.dataset.state = 'failed';
  }
}

/** The places of the largest weights, largest first. */
function highest(weights: Float32Array, most: number): number[] {
  const found: number[] = [];
  weights.forEach((weight, at) => {
    if (found.length < most || weight > weights[found.at(-1)!]!) {
      const before = found.findIndex(one => weight > weights[one]!);
      found.splice(before < 0 ? found.length : before, 0, at);
      found.length = Math.min(found.length, most);
    }
  });
  return found.filter(at => weights[at]! > 0);
}

function percent(share: number): string {
  return `${(100 * share).toFixed(share < 0.9995 ? 1 : 0)}\u00a0%`;
}

function many(number: number, noun: string, plural = `${noun}s`): string {
  return `${count(number)} ${number === 1 ? noun : plural}`;
}

export default { render: rendered((model, el) => new Attention(model, el)) };
