import type { AnyModel } from '@anywidget/types';
import { Conversation, KernelError } from './conversation';
import { Disposer } from './disposer';
import { button, count, element, say, short } from './dom';
import * as kinds from './kinds';
import { CODE_NAN, TOP, css, lookup, paint, type Palettes } from './palette';
import { picker } from './picker';
import { choosePosition, onPosition } from './position';
import { rendered } from './render';
import { type Box, fitted, type Place, Sheet, type Sight } from './sheet';
import { isDark, onTheme } from './theme';

/** Cells of one question. */
const [HIGH, WIDE] = [32, 64];
const MAX_PIECES = 600;
const KEYS =
  'Arrow keys move the cursor, Page Up and Down, Home and End go far, Enter chooses the position in every view, plus and minus zoom, 0 shows all.';
const SHOWN = { token: 'token', both: 'token and number', number: 'number' };

interface Measure {
  name: string;
  label: string;
  kind: 'share' | 'nats' | 'rank';
  most: number;
}

interface Prompt {
  layers: number[];
  positions: number;
  /** Places in the prompt, where they are not 0, 1, …. */
  places: number[] | null;
  sequence: string;
  measures: Measure[];
}

interface Piece {
  wide: number;
  ids: Int32Array;
  numbers: Float32Array[];
  texts: Record<string, string>;
  heads: string[];
  places: number[];
  /** As a picture, a dot for each cell, and of which measure. */
  painted: [string, HTMLCanvasElement] | null;
}

interface Told {
  label: string;
  text: string;
  id: number;
  rank: number;
  probability: number | null;
}

interface CellAnswer {
  layer: number;
  position: number;
  token: string;
  token_id: number | null;
  top: [string, number, number | null][];
  entropy: number | null;
  told: Told[];
}

/** A logit lens in one place on the page. */
class Lens {
  #disposer = new Disposer();
  #listening = new Disposer();
  #conversation: Conversation;
  #sheet: Sheet;
  #palettes: Palettes;
  #count: number;
  #prompt: Prompt | null = null;
  #number = 0;
  #pieces = new Map<string, Piece>();
  #asked = new Set<string>();
  #heads = new Map<number, [string, number]>();
  #colour: string;
  #shown = 'token';
  #colours: Uint32Array = new Uint32Array(256);
  #pointed: Place | null = null;
  #asking = false;
  #title = element('strong', {}, 'Logit lens');
  #about = element('span', { class: 'nnl-faint' });
  #colourChoice = element('select', { class: 'nnl-select', 'aria-label': 'Colours' });
  #pane = element('div', { class: 'nnl-pane' });
  #legend = element('div', { class: 'nnl-legend' });
  #bar = element('canvas', { width: '150', height: '10', 'aria-hidden': 'true' });
  #low = element('span');
  #high = element('span');
  #words = element('div', { class: 'nnl-words' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #wait = element('div', { class: 'nnl-wait', role: 'status', hidden: '' });
  #live = element('div', { class: 'nnl-hidden', role: 'status', 'aria-live': 'polite' });

  constructor(
    model: AnyModel,
    readonly root: HTMLElement
  ) {
    this.#palettes = model.get('palettes') as Palettes;
    this.#count = model.get('count') as number;
    this.#colour = model.get('colour') as string;
    this.#conversation = new Conversation(model, this.#disposer);
    this.#conversation.slow = slow => {
      say(this.#wait, 'The kernel has not answered yet. If it is busy it will; if it is gone, run the cell again.');
      this.#wait.hidden = !slow;
    };
    this.#sheet = new Sheet(
      {
        seen: sight => this.#seen(sight),
        cell: (context, place, box) => this.#cell(context, place, box),
        dots: (context, sight, box) => this.#dots(context, sight, box),
        rowHead: row => `layer ${this.#layer(row)}`,
        columnHead: column => this.#head(column),
        spoken: place => this.#spoken(place),
        pointed: (place, byKey) => this.#point(place, byKey),
        picked: (place, byKey) => this.#pick(place, byKey),
        failed: error => this.#fail(error)
      },
      model.get('height') as number,
      'Logit lens: layers by positions, the last layer on top',
      KEYS,
      this.#disposer
    );
    this.#build(model.get('prompts') as string[]);
    this.#disposer.add(() => this.#listening.dispose());
    void this.#open(0);
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  #build(prompts: string[]): void {
    const { root } = this;
    root.classList.add('nnl-lens');
    // JupyterLab's own keys would move from cell to cell, or delete one.
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    const shown = element(
      'select',
      { class: 'nnl-select', 'aria-label': 'Cells' },
      ...Object.entries(SHOWN).map(([value, text]) => element('option', { value }, text))
    );
    this.#disposer.listen(shown, 'change', () => {
      this.#shown = shown.value;
      this.#sheet.lines(shown.value === 'both' ? 2 : 1);
    });
    this.#disposer.listen(this.#colourChoice, 'change', () => {
      this.#colour = this.#colourChoice.value;
      this.#spans();
      this.#sheet.refresh();
    });
    const bar = element('div', { class: 'nnl-bar', role: 'group', 'aria-label': 'How it is drawn' });
    const pick = picker(prompts, this.#count, number => void this.#open(number), this.#disposer);
    bar.append(
      ...(pick ? [pick] : []),
      element('label', { class: 'nnl-choice' }, element('span', {}, 'Colours'), this.#colourChoice),
      element('label', { class: 'nnl-choice' }, element('span', {}, 'Cells'), shown),
      button('−', 'Smaller cells', () => this.#sheet.zoom(-1)),
      button('+', 'Larger cells', () => this.#sheet.zoom(1)),
      button('Fit', 'Fit: show all of it, or as much as can be', () => this.#sheet.fit())
    );
    this.#legend.append(this.#low, this.#bar, this.#high);
    root.append(
      element('div', { class: 'nnl-head' }, this.#title, this.#about, bar),
      element('div', { class: 'nnl-beside' }, this.#sheet.root, this.#pane),
      element('div', { class: 'nnl-foot' }, this.#words, this.#legend),
      this.#wait,
      this.#error,
      this.#live
    );
    this.#disposer.listen(root, 'keydown', event => {
      if (event.key === 'Escape' && this.#sheet.chosen !== null) {
        this.#choose(null);
        event.stopPropagation();
      }
    });
    onTheme(() => this.#recolour(), this.#disposer);
    this.#recolour();
  }

  // -- one prompt ------------------------------------------------------------------------------

  async #open(number: number): Promise<void> {
    this.root.dataset.state = 'busy';
    try {
      await this.#conversation.ask(kinds.PROMPT, { prompt: number }, ({ content }) => {
        this.#number = number;
        this.#prompt = content as unknown as Prompt;
        this.#pieces.clear();
        this.#asked.clear();
        this.#heads.clear();
        this.#pointed = null;
        this.#sheet.chosen = null;
        this.#measures();
        const { layers, positions, sequence } = this.#prompt;
        say(this.#about, `${many(layers.length, 'layer')} × ${many(positions, 'position')}`);
        this.#sheet.shape(layers.length, positions);
        this.#listening.dispose();
        onPosition(sequence, this.#conversation.view, place => this.#heard(place), this.#listening);
        this.#point(null, false);
      });
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #measures(): void {
    const { measures } = this.#prompt!;
    if (!measures.some(one => one.name === this.#colour)) {
      this.#colour = measures[0]!.name;
    }
    this.#colourChoice.replaceChildren(
      ...measures.map(({ name, label }) => element('option', name === this.#colour ? { value: name, selected: '' } : { value: name }, label))
    );
    this.#spans();
  }

  /** Row 0 is the last layer. */
  #at(row: number): number {
    return this.#prompt!.layers.length - 1 - row;
  }

  #layer(row: number): number {
    return this.#prompt?.layers[this.#at(row)] ?? 0;
  }

  #head(column: number): string {
    const [text, place] = this.#heads.get(column) ?? ['', column];
    return text || count(place);
  }

  get #measure(): [Measure, number] {
    const { measures } = this.#prompt!;
    const index = measures.findIndex(one => one.name === this.#colour);
    return [measures[index]!, index];
  }

  // -- what the kernel sends -------------------------------------------------------------------

  #seen({ rows, columns }: Sight): void {
    const [first, last] = [this.#at(rows[1] - 1), this.#at(rows[0])];
    let missing = false;
    for (let down = Math.floor(first / HIGH); down * HIGH <= last; down++) {
      for (let across = Math.floor(columns[0] / WIDE); across * WIDE < columns[1]; across++) {
        const key = `${down},${across}`;
        if (!this.#pieces.has(key)) {
          missing = true;
          if (!this.#asked.has(key)) {
            void this.#ask(key, down, across);
          }
        }
      }
    }
    this.root.dataset.state = missing ? 'busy' : 'done';
  }

  async #ask(key: string, down: number, across: number): Promise<void> {
    const prompt = this.#prompt!;
    this.#asked.add(key);
    const rows = [down * HIGH, Math.min((down + 1) * HIGH, prompt.layers.length)];
    const columns = [across * WIDE, Math.min((across + 1) * WIDE, prompt.positions)] as [number, number];
    try {
      await this.#conversation.ask(kinds.CELLS, { prompt: this.#number, rows, columns }, ({ content, buffers }) => {
        if (prompt !== this.#prompt) {
          return;
        }
        const [ids, ...numbers] = buffers;
        const heads = content.heads as string[];
        const places = content.places as number[];
        this.#pieces.set(key, {
          wide: columns[1] - columns[0],
          ids: new Int32Array(ids!.buffer),
          numbers: numbers.map(one => new Float32Array(one.buffer)),
          texts: content.texts as Record<string, string>,
          heads,
          places,
          painted: null
        });
        heads.forEach((head, index) => this.#heads.set(columns[0] + index, [head, places[index]!]));
        while (this.#pieces.size > MAX_PIECES) {
          const oldest = this.#pieces.keys().next().value!;
          this.#pieces.delete(oldest);
          this.#asked.delete(oldest);
        }
        this.#error.hidden = true;
        this.#sheet.refresh();
      });
    } catch (error) {
      if (prompt === this.#prompt) {
        this.#fail(error as Error);
      }
    }
    this.root.dataset.bytes = String(this.#conversation.bytes);
  }

  /** The piece of a cell, and where in it the cell is. */
  #find({ row, column }: Place): [Piece, number] | null {
    const layer = this.#at(row);
    const piece = this.#pieces.get(`${Math.floor(layer / HIGH)},${Math.floor(column / WIDE)}`);
    return piece ? [piece, (layer % HIGH) * piece.wide + (column % WIDE)] : null;
  }

  // -- drawing ---------------------------------------------------------------------------------

  #cell(context: CanvasRenderingContext2D, place: Place, box: Box): void {
    const found = this.#find(place);
    if (!found) {
      return;
    }
    const [piece, at] = found;
    const [measure, index] = this.#measure;
    const value = piece.numbers[index]![at]!;
    const packed = this.#colours[code(measure, value)]!;
    context.fillStyle = css(packed);
    context.fillRect(box.x, box.y, box.width, box.height);
    if (!this.#sheet.readable) {
      return;
    }
    context.fillStyle = light(packed) ? '#000' : '#fff';
    context.textAlign = 'left';
    const lines: string[] = [];
    if (this.#shown !== 'number') {
      lines.push(piece.texts[piece.ids[at]!] || '∅');
    }
    if (this.#shown !== 'token') {
      lines.push(written(measure, value));
    }
    lines.forEach((line, number) => {
      const y = box.y + (box.height * (2 * number + 1)) / (2 * lines.length) + 0.5;
      context.fillText(fitted(context, line, box.width - 5), box.x + 3, y);
    });
  }

  /** Cells too small for a text, a picture of each piece. */
  #dots(context: CanvasRenderingContext2D, { rows, columns }: Sight, box: (place: Place) => Box): void {
    const layers = this.#prompt!.layers.length;
    const [first, last] = [this.#at(rows[1] - 1), this.#at(rows[0])];
    context.imageSmoothingEnabled = false;
    for (let down = Math.floor(first / HIGH); down * HIGH <= last; down++) {
      for (let across = Math.floor(columns[0] / WIDE); across * WIDE < columns[1]; across++) {
        const piece = this.#pieces.get(`${down},${across}`);
        if (piece) {
          const high = Math.min(HIGH, layers - down * HIGH);
          const corner = box({ row: layers - down * HIGH - high, column: across * WIDE });
          context.drawImage(this.#painted(piece, high), corner.x, corner.y, piece.wide * corner.width, high * corner.height);
        }
      }
    }
  }

  #painted(piece: Piece, high: number): HTMLCanvasElement {
    if (piece.painted?.[0] === this.#colour) {
      return piece.painted[1];
    }
    const [measure, index] = this.#measure;
    const codes = new Uint8Array(high * piece.wide);
    piece.numbers[index]!.forEach((value, at) => {
      // The last layer is on top.
      codes[(high - 1 - Math.floor(at / piece.wide)) * piece.wide + (at % piece.wide)] = code(measure, value);
    });
    const made = paint(codes, high, piece.wide, this.#colours);
    piece.painted = [this.#colour, made];
    return made;
  }

  #recolour(): void {
    for (const piece of this.#pieces.values()) {
      piece.painted = null;
    }
    this.#colours = lookup(this.#palettes, 'sequential', isDark(this.root));
    const context = this.#bar.getContext('2d')!;
    for (let x = 0; x < 150; x++) {
      context.fillStyle = css(this.#colours[Math.round((x / 149) * TOP)]!);
      context.fillRect(x, 0, 1, 10);
    }
    this.#sheet.refresh();
  }

  #spans(): void {
    const [measure] = this.#measure;
    const { kind, most } = measure;
    // What is sure of itself is bright.
    say(this.#low, kind === 'share' ? '0 %' : kind === 'rank' ? `rank ${count(most)}` : `${short(most)} nats`);
    say(this.#high, kind === 'share' ? '100 %' : kind === 'rank' ? 'rank 0, the top' : '0 nats');
    say(this.#words, `Each cell: the likeliest next token, coloured by ${measure.label}.`);
  }

  // -- one place -------------------------------------------------------------------------------

  #spoken(place: Place): string {
    const found = this.#find(place);
    if (!found) {
      return '';
    }
    const [piece, at] = found;
    const numbers = this.#prompt!.measures.map((one, index) => `${one.label} ${written(one, piece.numbers[index]![at]!)}`);
    const [head, position] = this.#heads.get(place.column) ?? ['', place.column];
    return `${piece.texts[piece.ids[at]!] || 'empty'} at position ${position}${head ? ` ${head}` : ''}: ${numbers.join(', ')}`;
  }

  #point(place: Place | null, byKey: boolean): void {
    const shown = place ?? this.#sheet.cursor;
    if (!shown || (same(shown, this.#pointed) && !byKey)) {
      return;
    }
    this.#pointed = shown;
    if (!this.#asking) {
      void this.#askCell(shown);
    }
  }

  async #askCell(place: Place): Promise<void> {
    this.#asking = true;
    try {
      const where = { prompt: this.#number, row: this.#at(place.row), column: place.column };
      await this.#conversation.ask(kinds.CELL, where, ({ content }) => this.#tell(content as unknown as CellAnswer));
    } catch (error) {
      this.#fail(error as Error);
    }
    this.#asking = false;
    if (this.#pointed && !same(this.#pointed, place)) {
      void this.#askCell(this.#pointed);
    }
  }

  #tell(cell: CellAnswer): void {
    const head = element(
      'div',
      { class: 'nnl-pane-head' },
      element('b', {}, `layer ${cell.layer}`),
      `, position ${count(cell.position)}`
    );
    if (cell.token) {
      head.append(' ', element('code', {}, cell.token));
      if (cell.token_id !== null) {
        head.append(element('span', { class: 'nnl-faint' }, ` id ${cell.token_id}`));
      }
    }
    const rows = cell.top.map(([text, id, share]) => {
      const meter = element('i', { class: 'nnl-meter', 'aria-hidden': 'true' });
      meter.style.width = `${Math.round(100 * (share ?? 0))}%`;
      return element(
        'tr',
        {},
        element('td', { class: 'nnl-share' }, meter, element('span', {}, percent(share))),
        element('td', {}, element('code', {}, text || '∅')),
        element('td', { class: 'nnl-faint nnl-right' }, String(id))
      );
    });
    const table = element(
      'table',
      { class: 'nnl-top' },
      element('thead', {}, element('tr', {}, ...['probability', 'next token', 'id'].map(name => element('th', { scope: 'col', class: name === 'id' ? 'nnl-right' : '' }, name)))),
      element('tbody', {}, ...rows)
    );
    const told = cell.told.map(({ label, text, id, rank, probability }) =>
      element('div', {}, `${label} `, element('code', {}, text || '∅'), element('span', { class: 'nnl-faint' }, ` id ${id}`), `: rank ${rank < 0 ? 'unknown' : count(rank)}, ${percent(probability)}`)
    );
    const entropy = cell.entropy === null ? 'unknown: the logits are no numbers' : `${short(cell.entropy)} nats`;
    this.#pane.replaceChildren(head, table, element('div', {}, `entropy ${entropy}`), ...told);
  }

  // -- the position that all views share -------------------------------------------------------

  #pick(place: Place, byKey: boolean): void {
    this.#choose(place.column === this.#sheet.chosen ? null : place.column);
    this.#point(place, byKey);
  }

  #choose(column: number | null): void {
    this.#sheet.chosen = column;
    const place = column === null ? null : (this.#prompt?.places?.[column] ?? column);
    choosePosition(this.#prompt?.sequence ?? '', place, this.#conversation.view);
    this.#announce(place === null ? 'No position is chosen.' : `Position ${count(place)} is chosen in every view of this prompt.`);
    this.#sheet.refresh();
  }

  #heard(place: number | null): void {
    const { places, positions } = this.#prompt!;
    const column = place === null ? -1 : places ? places.indexOf(place) : place < positions ? place : -1;
    this.#sheet.chosen = column < 0 ? null : column;
    if (column >= 0) {
      this.#sheet.go({ row: this.#sheet.cursor?.row ?? 0, column }, false);
    }
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

function same(one: Place, other: Place | null): boolean {
  return other !== null && one.row === other.row && one.column === other.column;
}

function code({ kind, most }: Measure, value: number): number {
  if (!Number.isFinite(value) || (kind === 'rank' && value < 0)) {
    return CODE_NAN;
  }
  const share = kind === 'share' ? value : kind === 'nats' ? 1 - value / most : 1 - Math.log1p(value) / Math.log1p(most);
  return Math.round(Math.min(Math.max(share, 0), 1) * TOP);
}

function written({ kind }: Measure, value: number): string {
  if (!Number.isFinite(value) || (kind === 'rank' && value < 0)) {
    return '×';
  }
  return kind === 'share' ? percent(value) : kind === 'rank' ? count(value) : value.toFixed(2);
}

function percent(share: number | null): string {
  return share === null ? '×' : `${(100 * share).toFixed(share >= 0.9995 || share < 0.1 ? (share < 0.1 ? 2 : 0) : 1)}\u00a0%`;
}

function light(packed: number): boolean {
  return 0.299 * (packed & 255) + 0.587 * ((packed >> 8) & 255) + 0.114 * ((packed >> 16) & 255) > 110;
}

function many(number: number, noun: string): string {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}

export default { render: rendered((model, el) => new Lens(model, el)) };
