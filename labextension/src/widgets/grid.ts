import type { Disposer } from './disposer';
import { count, element } from './dom';

/** A row as the kernel sends it: its number, then a text for each column that needs no statistics. */
export type Row = [number, ...string[]];

export interface Column {
  key: string;
  title: string;
  width: string;
  /** Where its text is in a row, or among a row's statistics. */
  row?: number;
  statistic?: number;
  right?: boolean;
  mono?: boolean;
  /** Drawn as a line, and not sorted by; what it shows is the next statistic. */
  line?: boolean;
}

export const COLUMNS: Column[] = [
  { key: 'prompt', title: 'Prompt', width: 'minmax(120px, 1fr)', row: 1 },
  { key: 'block', title: 'Block', width: '56px', row: 3 },
  { key: 'name', title: 'Name', width: '96px', row: 4 },
  { key: 'module', title: 'Module', width: '112px', row: 5, mono: true },
  { key: 'step', title: 'Step', width: '42px', row: 6, right: true },
  { key: 'sequence', title: 'Seq', width: '38px', row: 7, right: true },
  { key: 'shape', title: 'Shape', width: '76px', row: 8, right: true },
  { key: 'dtype', title: 'Type', width: '68px', row: 9 },
  { key: 'bytes', title: 'Size', width: '62px', row: 10, right: true },
  { key: 'values', title: 'Values', width: '70px', statistic: 5, line: true },
  { key: 'min', title: 'Min', width: '66px', statistic: 0, right: true },
  { key: 'max', title: 'Max', width: '66px', statistic: 1, right: true },
  { key: 'mean', title: 'Mean', width: '76px', statistic: 2, right: true },
  { key: 'std', title: 'Std', width: '66px', statistic: 3, right: true },
  { key: 'special', title: 'NaN, inf', width: '116px', statistic: 4 },
  { key: 'request', title: 'Request', width: '92px', row: 2, mono: true }
];
const ROW_PX = 24;
const BEYOND = 8;
const GAP_PX = 10;

export interface GridHooks {
  /** Other rows are in sight. */
  scrolled: () => void;
  opened: (row: Row, byKey: boolean) => void;
  sorted: (key: string) => void;
  /** A key that the table itself has no use for; whether somebody had. */
  key: (key: string, row: Row | undefined) => boolean;
}

/** A table of any length of which only the rows in sight are on the page. */
export class Grid {
  readonly root: HTMLElement;
  /** Rows that are known, by place. */
  rows = new Map<number, Row>();
  statistics = new Map<number, string[]>();
  length = 0;
  /** The place that keys move. */
  active = 0;
  opened: number | null = null;
  pins: number[] = [];
  #body = element('div', { role: 'rowgroup', class: 'nnl-rows' });
  #heads: HTMLElement[];
  #shown = new Map<number, HTMLElement>();
  #frame = 0;
  readonly #id = `nnl-${Math.random().toString(36).slice(2)}`;

  constructor(
    readonly height: number,
    readonly hooks: GridHooks,
    disposer: Disposer
  ) {
    this.#heads = COLUMNS.map(column => {
      const { key, title } = column;
      const head = element('div', { role: 'columnheader', class: classes({ ...column, mono: false }), title: column.line ? 'The values in a few points' : `Sort by ${title}` }, title);
      if (column.line) {
        head.classList.add('nnl-unsorted');
      } else {
        head.onclick = () => hooks.sorted(key);
      }
      return head;
    });
    const header = element('div', { role: 'row', class: 'nnl-row nnl-header', 'aria-rowindex': '1' }, ...this.#heads);
    this.root = element(
      'div',
      { role: 'grid', tabindex: '0', class: 'nnl-grid', 'aria-label': 'Saves', 'aria-rowcount': '1', 'aria-colcount': String(COLUMNS.length) },
      element('div', { role: 'rowgroup', class: 'nnl-heads' }, header),
      this.#body
    );
    this.root.style.height = `${height}px`;
    this.without([]);
    this.root.setAttribute('aria-keyshortcuts', 'ArrowUp ArrowDown PageUp PageDown Home End Enter / p Delete');
    disposer.listen(this.root, 'scroll', () => this.refresh(), { passive: true });
    disposer.listen(this.#body, 'click', event => this.#clicked(event));
    disposer.listen(this.root, 'keydown', event => this.#pressed(event));
    const observer = new ResizeObserver(() => this.refresh());
    observer.observe(this.root);
    disposer.add(() => {
      observer.disconnect();
      cancelAnimationFrame(this.#frame);
    });
  }

  /** The places in sight: the first, and the one after the last. */
  get window(): [number, number] {
    const first = Math.max(0, Math.floor(this.root.scrollTop / ROW_PX));
    // Not as high as it is now: on a page that changes its theme it is nothing for a moment.
    const room = Math.ceil(this.height / ROW_PX);
    return [first, Math.min(this.length, first + room)];
  }

  get activeRow(): Row | undefined {
    return this.rows.get(this.active);
  }

  sortedBy(key: string, descending: boolean): void {
    COLUMNS.forEach((column, number) => {
      const head = this.#heads[number]!;
      if (column.key === key) {
        head.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
      } else {
        head.removeAttribute('aria-sort');
      }
    });
  }

  /** Leave columns out in which nothing stands. */
  without(unused: string[]): void {
    const columns = COLUMNS.filter(column => !unused.includes(column.key));
    const widths = columns.map(({ width }) => Number(width.match(/\d+/)![0]) + GAP_PX);
    this.root.style.setProperty('--nnl-columns', columns.map(column => column.width).join(' '));
    this.root.style.setProperty('--nnl-width', `${widths.reduce((sum, width) => sum + width, GAP_PX)}px`);
    for (const { key } of COLUMNS) {
      this.root.classList.toggle(`nnl-no-${key}`, unused.includes(key));
    }
  }

  /** Move what is in sight by whole rows, so that the same rows stay there. */
  shift(rows: number): void {
    this.#fit();
    this.root.scrollTop += rows * ROW_PX;
  }

  toTop(): void {
    this.root.scrollTop = 0;
  }

  /** Draw soon. */
  refresh(): void {
    if (!this.#frame) {
      this.#frame = requestAnimationFrame(() => {
        this.#frame = 0;
        this.draw();
        this.hooks.scrolled();
      });
    }
  }

  draw(): void {
    this.#fit();
    this.active = Math.max(0, Math.min(this.active, this.length - 1));
    const [first, last] = this.window;
    const [from, to] = [Math.max(0, first - BEYOND), Math.min(this.length, last + BEYOND)];
    for (const [place, made] of this.#shown) {
      if (place < from || place >= to) {
        made.remove();
        this.#shown.delete(place);
      }
    }
    for (let place = from; place < to; place++) {
      let made = this.#shown.get(place);
      if (!made) {
        made = this.#make(place);
        this.#shown.set(place, made);
        // In the order in which they are read aloud.
        const next = this.#shown.get(place + 1);
        this.#body.insertBefore(made, next ?? null);
      }
      this.#fill(made, place);
    }
    const active = this.#shown.get(this.active);
    if (active && this.length) {
      this.root.setAttribute('aria-activedescendant', active.id);
    } else {
      this.root.removeAttribute('aria-activedescendant');
    }
  }

  /** Make a place the active one, and bring it into sight. */
  go(place: number): void {
    this.active = Math.max(0, Math.min(place, this.length - 1));
    const top = this.active * ROW_PX;
    const room = this.root.clientHeight - ROW_PX;
    if (top < this.root.scrollTop) {
      this.root.scrollTop = top;
    } else if (top + ROW_PX > this.root.scrollTop + room) {
      this.root.scrollTop = top + ROW_PX - room;
    }
    this.draw();
    this.hooks.scrolled();
  }

  #fit(): void {
    this.#body.style.height = `${this.length * ROW_PX}px`;
    this.root.setAttribute('aria-rowcount', String(this.length + 1));
  }

  #make(place: number): HTMLElement {
    const cells = COLUMNS.map(column => element('div', { role: 'gridcell', class: classes(column) }));
    const row = element('div', { role: 'row', class: 'nnl-row', id: `${this.#id}-${place}`, 'aria-rowindex': String(place + 2) }, ...cells);
    row.style.top = `${place * ROW_PX}px`;
    row.dataset.place = String(place);
    return row;
  }

  #fill(made: HTMLElement, place: number): void {
    const row = this.rows.get(place);
    const statistics = row && this.statistics.get(row[0]);
    const dropped = statistics?.[0] === 'dropped';
    COLUMNS.forEach((column, number) => {
      const cell = made.children[number] as HTMLElement;
      let text = '…';
      if (column.statistic !== undefined) {
        text = statistics?.[column.statistic] ?? (row && !statistics && row[8] ? '…' : '');
      } else if (row || number) {
        text = row ? String(row[column.row!] ?? '') : '';
      }
      if (column.line) {
        drawLine(cell, text, statistics?.[column.statistic! + 1] ?? '');
        return;
      }
      if (column.key === 'special') {
        cell.classList.toggle('nnl-flag', text !== '' && text !== '…');
      }
      if (cell.textContent !== text) {
        cell.textContent = text;
        cell.title = text.length > 8 ? text : '';
      }
    });
    made.classList.toggle('nnl-dropped', dropped);
    made.classList.toggle('nnl-active', place === this.active);
    made.classList.toggle('nnl-odd', place % 2 === 1);
    const pin = row ? this.pins.indexOf(row[0]) : -1;
    made.classList.toggle('nnl-pinned', pin >= 0);
    made.setAttribute('aria-selected', String(row !== undefined && row[0] === this.opened));
  }

  #clicked(event: MouseEvent): void {
    const made = (event.target as HTMLElement).closest<HTMLElement>('[data-place]');
    const place = Number(made?.dataset.place);
    const row = made && this.rows.get(place);
    if (row && !String(getSelection() ?? '')) {
      this.go(place);
      this.hooks.opened(row, false);
    }
  }

  #pressed(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.root) {
      return;
    }
    const page = Math.max(1, Math.floor(this.root.clientHeight / ROW_PX) - 2);
    const moves: Record<string, number> = {
      ArrowUp: this.active - 1,
      ArrowDown: this.active + 1,
      PageUp: this.active - page,
      PageDown: this.active + page,
      Home: 0,
      End: this.length - 1
    };
    const place = moves[event.key];
    const row = this.activeRow;
    if (place !== undefined) {
      this.go(place);
    } else if (event.key === 'Enter' && row) {
      this.hooks.opened(row, true);
    } else if (!this.hooks.key(event.key, row)) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}

function classes({ key, right, mono }: Column): string {
  return [`nnl-col-${key}`, right ? 'nnl-right' : '', mono ? 'nnl-code' : ''].filter(Boolean).join(' ');
}

/** Points as digits of sixteen, and gaps as dots; drawn only where they changed. */
function drawLine(cell: HTMLElement, points: string, words: string): void {
  if (cell.dataset.points === points) {
    return;
  }
  cell.dataset.points = points;
  cell.title = words;
  if (!/[0-9a-f]/.test(points)) {
    cell.textContent = points === '…' ? points : points ? 'not finite' : '';
    return;
  }
  const make = (tag: string, attributes: Record<string, string>) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    return made;
  };
  const picture = make('svg', { viewBox: '0 0 66 18', class: 'nnl-spark', role: 'img', 'aria-label': words });
  const step = 64 / Math.max(1, points.length - 1);
  let line: string[] = [];
  const end = () => {
    if (line.length === 1) {
      const [x, y] = line[0]!.split(',');
      picture.append(make('circle', { cx: x!, cy: y!, r: '1.2' }));
    } else if (line.length) {
      picture.append(make('polyline', { points: line.join(' ') }));
    }
    line = [];
  };
  [...points].forEach((digit, at) => {
    if (digit === '.') {
      end();
    } else {
      line.push(`${(1 + at * step).toFixed(1)},${(16.5 - parseInt(digit, 16)).toFixed(1)}`);
    }
  });
  end();
  cell.replaceChildren(picture);
}

/** As in "1,200 of 30,000 saves". */
export function howMany(matched: number, total: number): string {
  const saves = total === 1 ? 'save' : 'saves';
  return matched === total ? `${count(total)} ${saves}` : `${count(matched)} of ${count(total)} ${saves}`;
}
