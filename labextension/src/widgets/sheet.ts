import type { Disposer } from './disposer';
import { element, say } from './dom';
import { type Inks, inks } from './theme';

/** Widths of a cell, from all in sight to long texts. */
const WIDTHS = [1, 2, 3, 5, 8, 12, 18, 26, 36, 48, 64, 84, 110, 150];
const TEXT_WIDTH = 34;
/** What cells begin with: wider where all columns are in sight then. */
const [FIRST_WIDTH, WIDE_WIDTH] = [64, 110];
const HEAD_LEFT = 62;
/** Narrower cells are dots of one picture: ten thousand are too many to be drawn one by one. */
const DOT_WIDTH = 12;

export interface Place {
  row: number;
  column: number;
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** The rows and columns in sight, ends exclusive. */
export interface Sight {
  rows: [number, number];
  columns: [number, number];
}

export interface SheetHooks {
  /** Called before the cells are drawn: what is missing is asked for. */
  seen(sight: Sight): void;
  cell(context: CanvasRenderingContext2D, place: Place, box: Box): void;
  /** Draws all cells in sight at once, where they are dots; in the place of `cell`. */
  dots?(context: CanvasRenderingContext2D, sight: Sight, box: (place: Place) => Box): void;
  rowHead(row: number): string;
  columnHead(column: number): string;
  /** What is read of a cell by who does not see it. */
  spoken(place: Place): string;
  /** The pointer or the cursor is on a cell, or on none. */
  pointed(place: Place | null, byKey: boolean): void;
  /** A column is chosen, by click or Enter; chosen again it is let go. */
  picked(place: Place, byKey: boolean): void;
  failed(error: Error): void;
}

/**
 * A table of any size, of which what is in sight is drawn; its heads stay in sight.
 *
 * The browser scrolls an empty area as large as the table, and a canvas that stays in place draws the part that would be
 * seen. A screen reader finds a grid with the row and cell at the cursor in it.
 */
export class Sheet {
  readonly root = element('div', { class: 'nnl-sheet', tabindex: '0', role: 'grid' });
  cursor: Place | null = null;
  /** The column that is chosen. */
  chosen: number | null = null;
  /** The cell that is chosen, where cells are chosen and not columns. */
  chosenCell: Place | null = null;
  /** Cells are as high as wide, and hold a picture. */
  square = false;
  #area = element('div', { class: 'nnl-sheet-area', role: 'presentation' });
  #canvas = element('canvas', { class: 'nnl-sheet-canvas', 'aria-hidden': 'true' });
  #row = element('div', { role: 'row', class: 'nnl-hidden' });
  #head = element('div', { role: 'rowheader' });
  #cell = element('div', { role: 'gridcell' });
  #rows = 0;
  #columns = 0;
  #step = WIDTHS.indexOf(FIRST_WIDTH);
  #lines = 1;
  #frame = 0;
  #alive = true;
  /** Another table came, which begins in its own way. */
  #begins = false;

  constructor(
    readonly hooks: SheetHooks,
    readonly most: number,
    label: string,
    keys: string,
    disposer: Disposer
  ) {
    this.#cell.id = `nnl-${Math.random().toString(36).slice(2)}`;
    this.#row.append(this.#head, this.#cell);
    this.#area.append(this.#canvas);
    this.root.append(this.#area, this.#row);
    this.root.setAttribute('aria-label', label);
    this.root.setAttribute('aria-description', keys);
    this.root.setAttribute('aria-readonly', 'true');
    disposer.listen(this.root, 'scroll', () => this.refresh());
    disposer.listen(this.root, 'focus', () => this.refresh());
    disposer.listen(this.root, 'blur', () => this.refresh());
    this.#hands(disposer);
    this.#keys(disposer);
    const observer = new ResizeObserver(() => this.#resized());
    observer.observe(this.root);
    disposer.add(() => {
      observer.disconnect();
      cancelAnimationFrame(this.#frame);
      this.#alive = false;
    });
  }

  get width(): number {
    return WIDTHS[this.#step]!;
  }

  get high(): number {
    const { width } = this;
    return this.square ? width : width < TEXT_WIDTH ? Math.max(4, Math.min(width, 16)) : 4 + 16 * this.#lines;
  }

  /** Whether a cell has room for a text. */
  get readable(): boolean {
    return this.width >= TEXT_WIDTH;
  }

  get #top(): number {
    return this.square ? 22 : this.width >= 36 ? 22 : this.width >= 12 ? 64 : 22;
  }

  /** Another table; its end is shown first, where a prompt ends. */
  shape(rows: number, columns: number): void {
    this.#rows = rows;
    this.#columns = columns;
    this.root.setAttribute('aria-rowcount', String(rows));
    this.root.setAttribute('aria-colcount', String(columns));
    this.cursor = { row: 0, column: this.square ? 0 : columns - 1 };
    this.#begins = !this.square;
    this.#laid();
  }

  /** How many lines of text a cell has. */
  lines(count: number): void {
    this.#lines = count;
    this.#laid();
  }

  zoom(by: number, around: Place | null = this.cursor): void {
    const before = around ? this.#box(around) : null;
    this.#step = Math.min(Math.max(this.#step + by, 0), WIDTHS.length - 1);
    this.#laid();
    if (around && before) {
      const after = this.#box(around);
      this.root.scrollLeft += after.x - before.x;
      this.root.scrollTop += after.y - before.y;
    }
  }

  /** All in sight, or as much as can be. */
  fit(): void {
    const room = this.root.clientWidth - HEAD_LEFT;
    this.#step = WIDTHS.length;
    while (--this.#step > 0 && (this.width * this.#columns > room || this.high * this.#rows + this.#top > this.most));
    this.#laid();
  }

  /** Move the cursor there, and show it. */
  go(place: Place, byKey: boolean): void {
    this.cursor = {
      row: Math.min(Math.max(place.row, 0), this.#rows - 1),
      column: Math.min(Math.max(place.column, 0), this.#columns - 1)
    };
    this.reveal(this.cursor);
    this.hooks.pointed(this.cursor, byKey);
    this.refresh();
  }

  reveal(place: Place): void {
    const box = this.#box(place);
    const { root } = this;
    if (box.x < HEAD_LEFT) {
      root.scrollLeft += box.x - HEAD_LEFT;
    } else if (box.x + box.width > root.clientWidth) {
      root.scrollLeft += box.x + box.width - root.clientWidth;
    }
    if (box.y < this.#top) {
      root.scrollTop += box.y - this.#top;
    } else if (box.y + box.height > root.clientHeight) {
      root.scrollTop += box.y + box.height - root.clientHeight;
    }
  }

  /** Say what is at the cursor, to who does not see it. */
  describe(): void {
    if (this.cursor) {
      const { row, column } = this.cursor;
      this.#row.setAttribute('aria-rowindex', String(row + 1));
      this.#cell.setAttribute('aria-colindex', String(column + 1));
      const selected = this.square ? this.chosenCell?.row === row && this.chosenCell.column === column : column === this.chosen;
      this.#cell.setAttribute('aria-selected', String(selected));
      say(this.#head, this.hooks.rowHead(row));
      say(this.#cell, this.hooks.spoken(this.cursor));
      this.root.setAttribute('aria-activedescendant', this.#cell.id);
    }
  }

  /** Draw soon. */
  refresh(): void {
    if (this.#alive && !this.#frame) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        try {
          this.#draw();
        } catch (error) {
          this.hooks.failed(error as Error);
        }
      });
    }
  }

  // -- its size --------------------------------------------------------------------------------

  #laid(): void {
    const [wide, high] = [HEAD_LEFT + this.width * this.#columns, this.#top + this.high * this.#rows];
    this.#area.style.width = `${wide}px`;
    this.#area.style.height = `${high}px`;
    // Room for a scroll bar beside what would just fit.
    this.root.style.height = `${Math.min(high + 18, this.most)}px`;
    this.#resized();
  }

  #resized(): void {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.root;
    if (!width) {
      return;
    }
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${height}px`;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.#canvas.width !== wide || this.#canvas.height !== high) {
      this.#canvas.width = wide;
      this.#canvas.height = high;
    }
    if (this.#begins) {
      this.#begins = false;
      this.#step = WIDTHS.indexOf(WIDE_WIDTH);
      while (this.width > FIRST_WIDTH && this.width * this.#columns > width - HEAD_LEFT) {
        this.#step--;
      }
      this.#laid();
      this.root.scrollLeft = this.root.scrollWidth;
      this.root.scrollTop = 0;
    }
    this.refresh();
  }

  #box({ row, column }: Place): Box {
    return {
      x: HEAD_LEFT + column * this.width - this.root.scrollLeft,
      y: this.#top + row * this.high - this.root.scrollTop,
      width: this.width,
      height: this.high
    };
  }

  get #sight(): Sight {
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.root;
    const within = (start: number, size: number, step: number, count: number): [number, number] => [
      Math.max(0, Math.floor(start / step)),
      Math.min(count, Math.ceil((start + size) / step))
    ];
    return {
      rows: within(scrollTop, clientHeight - this.#top, this.high, this.#rows),
      columns: within(scrollLeft, clientWidth - HEAD_LEFT, this.width, this.#columns)
    };
  }

  // -- drawing ---------------------------------------------------------------------------------

  #draw(): void {
    if (!this.#rows || !this.root.clientWidth) {
      return;
    }
    const sight = this.#sight;
    this.hooks.seen(sight);
    const context = this.#canvas.getContext('2d')!;
    const colours = inks(this.#canvas);
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.root;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(HEAD_LEFT, this.#top, width, height);
    context.clip();
    context.textBaseline = 'middle';
    context.font = `12px ${getComputedStyle(this.root).getPropertyValue('--nnl-mono').trim() || 'monospace'}`;
    const dots = this.width < DOT_WIDTH && this.hooks.dots;
    if (dots) {
      this.hooks.dots!(context, sight, place => this.#box(place));
    }
    const gap = this.width >= DOT_WIDTH ? 1 : 0;
    for (let row = sight.rows[0]; row < sight.rows[1] && !dots; row++) {
      for (let column = sight.columns[0]; column < sight.columns[1]; column++) {
        const box = this.#box({ row, column });
        this.hooks.cell(context, { row, column }, { ...box, width: box.width - gap, height: box.height - gap });
      }
    }
    this.#drawMarks(context, colours.accent, height);
    context.restore();
    this.#drawHeads(context, sight, colours);
    this.describe();
  }

  #drawMarks(context: CanvasRenderingContext2D, accent: string, height: number): void {
    if (this.chosenCell) {
      frame(context, this.#box(this.chosenCell), accent);
    }
    if (this.chosen !== null) {
      const box = this.#box({ row: 0, column: this.chosen });
      const bottom = Math.min(height, box.y + this.high * this.#rows);
      frame(context, { x: box.x, y: box.y, width: box.width, height: bottom - box.y }, accent);
    }
    if (this.cursor && (document.activeElement === this.root || this.root.getRootNode() !== document)) {
      frame(context, this.#box(this.cursor), '#fff');
    }
  }

  #drawHeads(context: CanvasRenderingContext2D, sight: Sight, { text, faint, accent, field }: Inks): void {
    const { clientWidth: width, clientHeight: height } = this.root;
    const style = getComputedStyle(this.root);
    context.fillStyle = field;
    context.fillRect(0, 0, width, this.#top);
    context.fillRect(0, 0, HEAD_LEFT, height);
    context.textBaseline = 'middle';
    context.save();
    context.beginPath();
    context.rect(0, this.#top, HEAD_LEFT, height);
    context.clip();
    context.textAlign = 'right';
    context.font = `11px ${style.fontFamily}`;
    const every = Math.max(1, Math.ceil(13 / this.high));
    for (let row = sight.rows[0]; row < sight.rows[1]; row++) {
      if (row % every === 0) {
        const box = this.#box({ row, column: 0 });
        const hidden = Math.max(0, this.#top - box.y);
        context.fillStyle = this.cursor?.row === row ? text : faint;
        // The head of a row that is only just in sight would lie on the next one's.
        if (hidden === 0 || this.high - hidden >= 13) {
          context.fillText(this.hooks.rowHead(row), HEAD_LEFT - 7, Math.max(box.y + this.high / 2, this.#top + 7));
        }
      }
    }
    context.restore();
    context.save();
    context.beginPath();
    context.rect(HEAD_LEFT, 0, width, this.#top);
    context.clip();
    context.font = `12px ${style.getPropertyValue('--nnl-mono') || 'monospace'}`;
    const apart = Math.max(1, Math.ceil(12 / this.width));
    for (let column = sight.columns[0]; column < sight.columns[1]; column++) {
      const { x } = this.#box({ row: 0, column });
      context.fillStyle = column === this.chosen ? accent : this.cursor?.column === column ? text : faint;
      const head = this.hooks.columnHead(column);
      if (this.square) {
        if (column % Math.max(1, Math.ceil(22 / this.width)) === 0) {
          context.textAlign = 'center';
          context.fillText(head, x + this.width / 2, this.#top / 2 + 1);
        }
      } else if (this.#top > 22) {
        context.save();
        context.translate(x + this.width / 2, this.#top - 4);
        context.rotate(-Math.PI / 2);
        context.textAlign = 'left';
        context.fillText(fitted(context, head, this.#top - 8), 0, 0);
        context.restore();
      } else if (this.width >= 36) {
        context.textAlign = 'left';
        context.fillText(fitted(context, head, this.width - 6), x + 3, this.#top / 2 + 1);
      } else if (column % (apart * 10) === 0) {
        context.textAlign = 'left';
        context.fillText(String(column), x, this.#top / 2 + 1);
      }
    }
    context.restore();
  }

  // -- hands and keys --------------------------------------------------------------------------

  #at(event: MouseEvent): Place | null {
    const bounds = this.root.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left - this.root.clientLeft, event.clientY - bounds.top - this.root.clientTop];
    const column = Math.floor((x - HEAD_LEFT + this.root.scrollLeft) / this.width);
    const row = Math.floor((y - this.#top + this.root.scrollTop) / this.high);
    const outside = x < HEAD_LEFT || x >= this.root.clientWidth || y >= this.root.clientHeight || column >= this.#columns || row >= this.#rows;
    return outside ? null : { row: y < this.#top ? -1 : row, column };
  }

  #hands(disposer: Disposer): void {
    disposer.listen(this.root, 'pointermove', event => {
      const place = this.#at(event);
      this.hooks.pointed(place && place.row >= 0 ? place : null, false);
    });
    disposer.listen(this.root, 'pointerleave', () => this.hooks.pointed(null, false));
    disposer.listen(this.root, 'click', event => {
      const place = this.#at(event);
      if (place) {
        this.cursor = place.row < 0 ? { row: this.cursor?.row ?? 0, column: place.column } : place;
        this.hooks.picked(this.cursor, false);
        this.refresh();
      }
    });
    disposer.listen(
      this.root,
      'wheel',
      event => {
        // A plain wheel scrolls; pinching arrives as a wheel with Ctrl.
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          this.zoom(event.deltaY < 0 ? 1 : -1, this.#at(event));
        }
      },
      { passive: false }
    );
  }

  #keys(disposer: Disposer): void {
    disposer.listen(this.root, 'keydown', event => {
      if (event.metaKey || event.altKey || !this.cursor) {
        return;
      }
      const { row, column } = this.cursor;
      const page = Math.max(1, Math.floor((this.root.clientHeight - this.#top) / this.high) - 1);
      const moves: Record<string, Place> = {
        ArrowLeft: { row, column: column - 1 },
        ArrowRight: { row, column: column + 1 },
        ArrowUp: { row: row - 1, column },
        ArrowDown: { row: row + 1, column },
        PageUp: { row: row - page, column },
        PageDown: { row: row + page, column },
        Home: { row: event.ctrlKey ? 0 : row, column: 0 },
        End: { row: event.ctrlKey ? this.#rows - 1 : row, column: this.#columns - 1 }
      };
      const move = moves[event.key];
      if (move) {
        this.go(move, true);
      } else if (event.ctrlKey) {
        return;
      } else if (event.key === '+' || event.key === '=') {
        this.zoom(1);
      } else if (event.key === '-' || event.key === '_') {
        this.zoom(-1);
      } else if (event.key === '0') {
        this.fit();
      } else if (event.key === 'Enter' || event.key === ' ') {
        this.hooks.picked(this.cursor, true);
        this.refresh();
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
    });
  }
}

/** Two lines, one of which is seen on every colour. */
function frame(context: CanvasRenderingContext2D, box: Box, colour: string): void {
  context.lineWidth = 4;
  context.strokeStyle = '#000';
  context.strokeRect(box.x, box.y, box.width - 1, box.height - 1);
  context.lineWidth = 2;
  context.strokeStyle = colour;
  context.strokeRect(box.x, box.y, box.width - 1, box.height - 1);
}

const WIDTHS_OF = new Map<string, Map<string, number>>();

/** A text cut to the room there is. */
export function fitted(context: CanvasRenderingContext2D, text: string, room: number): string {
  const known = WIDTHS_OF.get(context.font) ?? new Map<string, number>();
  WIDTHS_OF.set(context.font, known);
  const measure = (some: string): number => {
    let width = known.get(some);
    if (width === undefined) {
      if (known.size > 20_000) {
        known.clear();
      }
      width = context.measureText(some).width;
      known.set(some, width);
    }
    return width;
  };
  if (measure(text) <= room) {
    return text;
  }
  const characters = [...text];
  let length = Math.min(characters.length, Math.max(1, Math.floor((characters.length * room) / measure(text))));
  while (length > 1 && measure(`${characters.slice(0, length).join('')}…`) > room) {
    length--;
  }
  return length < 1 ? '' : `${characters.slice(0, length).join('')}…`;
}
