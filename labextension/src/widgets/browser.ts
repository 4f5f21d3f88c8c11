import type { AnyModel } from '@anywidget/types';
import { Conversation, KernelError } from './conversation';
import { Disposer } from './disposer';
import { count, element, say } from './dom';
import { COLUMNS, Grid, howMany, type Row } from './grid';
import * as kinds from './kinds';
import { Pane } from './pane';
import { rendered } from './render';

const KEYS =
  'Arrow keys, Page Up, Page Down, Home and End move; Enter opens; slash searches; P pins; Delete drops, after a question.';
/** How the kernel begins to say what it reads. */
const READING = 'Reading the';
/** Rows of one question. */
const PAGE = 120;
const SEARCH_MS = 150;
/** New saves are shown no more often. */
const CHANGE_MS = 500;

/** A table of saves in one place on the page. */
class Browser {
  #disposer = new Disposer();
  #conversation: Conversation;
  #grid: Grid;
  #pane: Pane;
  #search = element('input', { type: 'search', class: 'nnl-field nnl-search', placeholder: 'Search', 'aria-label': 'Search prompts, blocks, names, modules and types' });
  #sort: HTMLSelectElement;
  #direction = element('button', { type: 'button', class: 'nnl-button' });
  #count = element('span', { class: 'nnl-faint nnl-count' });
  #pins = element('div', { class: 'nnl-pins', hidden: '' });
  #pinned: { number: number; title: string }[] = [];
  #words = element('div', { class: 'nnl-words' });
  #wait = element('div', { class: 'nnl-words', role: 'status', hidden: '' });
  #error = element('div', { class: 'nnl-error', role: 'alert', hidden: '' });
  #live = element('div', { class: 'nnl-hidden', role: 'status', 'aria-live': 'polite' });
  #order = { sort: '', descending: false, words: '' };
  /** Of which list the rows are that are known. */
  #key = '';
  #asking = false;
  #again = false;
  #counting = false;
  #searchTimer = 0;
  #changeTimer = 0;
  #restTimer = 0;
  #changedAt = 0;
  #visible = true;
  #stale = false;
  #alive = true;
  readonly #described: string;
  readonly #madeAt = performance.now();

  constructor(
    model: AnyModel,
    readonly root: HTMLElement
  ) {
    this.#described = String(model.get('described'));
    this.#conversation = new Conversation(model, this.#disposer);
    this.#conversation.slow = slow => {
      say(this.#wait, 'The kernel has not answered yet. If it is busy it will; if it is gone, run the cell again.');
      this.#wait.hidden = !slow;
    };
    this.#grid = new Grid(
      Number(model.get('height')),
      {
        scrolled: () => this.#look(),
        opened: row => this.#open(row),
        sorted: key => this.#sortBy(key, this.#order.sort === key && !this.#order.descending),
        key: (key, row) => this.#hotkey(key, row)
      },
      this.#disposer
    );
    this.#pane = new Pane(
      model,
      this.#conversation,
      {
        announce: text => this.#announce(text),
        failed: error => this.#fail(error),
        pin: (number, title) => this.#pin(number, title),
        closed: () => {
          this.#grid.opened = this.#pane.number;
          this.#grid.draw();
          this.#grid.root.focus({ preventScroll: true });
        }
      },
      this.#disposer
    );
    const options = [element('option', { value: '' }, 'newest first'), ...COLUMNS.filter(one => !one.line).map(one => element('option', { value: one.key }, one.title))];
    this.#sort = element('select', { class: 'nnl-select' }, ...options);
    this.#build();
    const heard = (message: Record<string, unknown>) => {
      if (message[kinds.KIND] === kinds.CHANGED) {
        this.#changed();
      }
    };
    model.on('msg:custom', heard);
    const opening = () => this.#openNumber(Number(model.get('opening')));
    model.on('change:opening', opening);
    this.#disposer.add(() => model.off('change:opening', opening));
    this.#watchSight();
    this.#disposer.add(() => {
      this.#alive = false;
      model.off('msg:custom', heard);
      clearTimeout(this.#searchTimer);
      clearTimeout(this.#changeTimer);
      clearTimeout(this.#restTimer);
    });
    this.#begin(model.get('begun') as { rows?: Row[]; unused?: string[] });
    this.#load(true);
    opening();
  }

  dispose(): void {
    this.#disposer.dispose();
  }

  #build(): void {
    const { root } = this;
    root.classList.add('nnl-browser');
    // JupyterLab's own keys would move from cell to cell, or delete one.
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    const keys = element('div', { class: 'nnl-hidden', id: `${this.#conversation.view}-keys` }, KEYS);
    this.#grid.root.setAttribute('aria-describedby', keys.id);
    const label = element('label', { class: 'nnl-choice' }, element('span', {}, 'Sort'), this.#sort);
    this.#turned();
    root.append(
      element('div', { class: 'nnl-head' }, element('strong', {}, 'Saves'), this.#count, element('div', { class: 'nnl-bar' }, this.#search, label, this.#direction)),
      this.#grid.root,
      this.#words,
      this.#wait,
      this.#error,
      this.#pins,
      this.#pane.root,
      this.#live,
      keys
    );
    this.#disposer.listen(this.#search, 'input', () => {
      clearTimeout(this.#searchTimer);
      this.#searchTimer = window.setTimeout(() => this.#searched(), SEARCH_MS);
    });
    this.#disposer.listen(this.#search, 'keydown', event => {
      if (event.key === 'Escape' || event.key === 'Enter' || event.key === 'ArrowDown') {
        clearTimeout(this.#searchTimer);
        this.#searched();
        this.#grid.root.focus({ preventScroll: true });
        event.preventDefault();
        event.stopPropagation();
      }
    });
    this.#disposer.listen(this.#sort, 'change', () => this.#sortBy(this.#sort.value, false));
    this.#direction.onclick = () => this.#sortBy(this.#order.sort, !this.#order.descending);
    this.#disposer.listen(this.#pane.root, 'keydown', event => {
      if (event.key === 'Escape' && !event.defaultPrevented) {
        this.#grid.root.focus({ preventScroll: true });
        event.stopPropagation();
      }
    });
  }

  // -- rows ------------------------------------------------------------------------------------

  /** Show the first rows, which came with the widget, until the kernel says what there is now. */
  #begin({ rows = [], unused = [] }: { rows?: Row[]; unused?: string[] }): void {
    if (rows.length) {
      this.#grid.length = rows.length;
      this.#grid.without(unused);
      rows.forEach((row, place) => this.#grid.rows.set(place, row));
      this.#grid.draw();
      requestAnimationFrame(() => (this.root.dataset.firstMs ??= (performance.now() - this.#madeAt).toFixed(1)));
    }
  }

  #sortBy(sort: string, descending: boolean): void {
    this.#order = { ...this.#order, sort, descending };
    this.#sort.value = sort;
    this.#turned();
    this.#grid.sortedBy(sort, descending);
    this.#grid.toTop();
    this.#load(true);
  }

  #turned(): void {
    const { sort, descending } = this.#order;
    say(this.#direction, descending ? '↓' : '↑');
    const text = sort ? (descending ? 'Largest first' : 'Smallest first') : descending ? 'Oldest first' : 'Newest first';
    this.#direction.setAttribute('aria-label', `${text}: turn around`);
    this.#direction.title = text;
  }

  #searched(): void {
    if (this.#search.value !== this.#order.words) {
      this.#order = { ...this.#order, words: this.#search.value };
      this.#grid.toTop();
      this.#load(true);
    }
  }

  /** Ask for what is in sight and not known. */
  #look(): void {
    const [first, last] = this.#grid.window;
    for (let place = first; place < last; place++) {
      if (!this.#grid.rows.has(place)) {
        this.#load(false);
        return;
      }
    }
    this.#askStatistics();
  }

  /** One question at a time, and a newer one where the order was changed meanwhile. */
  #load(fresh: boolean): void {
    if (!this.#alive) {
      return;
    }
    if (this.#asking && !fresh) {
      this.#again = true;
      return;
    }
    this.#asking = true;
    this.#again = false;
    this.#set('busy');
    const order = this.#order;
    const grid = this.#grid;
    const [top, bottom] = grid.window;
    const first = Math.max(0, Math.round((top + bottom) / 2) - PAGE / 2);
    const anchor = grid.rows.get(top)?.[0];
    const active = grid.activeRow?.[0];
    const find = [anchor, active, this.#pane.number].filter(number => number !== undefined && number !== null);
    const question = { ...order, first, count: PAGE, find: fresh ? find : [] };
    this.#conversation
      .ask(kinds.PAGE, question, ({ content }) => {
        if (order !== this.#order) {
          return;
        }
        if (content.progress !== undefined) {
          say(this.#words, String(content.progress));
        } else if (content.rows !== undefined) {
          this.#came(content, fresh, top, anchor, active);
        }
      })
      .then(
        () => this.#finished(order),
        error => {
          this.#finished(order);
          this.#fail(error);
        }
      );
  }

  #finished(order: object): void {
    if (order === this.#order) {
      this.#asking = false;
      if (this.#again) {
        this.#again = false;
        this.#look();
      }
    }
  }

  #came(content: Record<string, unknown>, fresh: boolean, top: number, anchor: number | undefined, active: number | undefined): void {
    const grid = this.#grid;
    const key = JSON.stringify([content.version, this.#order]);
    const first = Number(content.first);
    const other = key !== this.#key;
    if (other) {
      grid.rows.clear();
      this.#key = key;
    }
    grid.length = Number(content.matched);
    grid.without(content.unused as string[]);
    (content.rows as Row[]).forEach((row, place) => grid.rows.set(first + place, row));
    if (fresh) {
      const places = content.places as Record<string, number>;
      const at = anchor === undefined ? undefined : places[anchor];
      // At the top, new rows come into sight; elsewhere what was in sight stays there.
      if (at !== undefined && grid.root.scrollTop > 0 && at !== top) {
        grid.shift(at - top);
      }
      const now = active === undefined ? undefined : places[active];
      if (now !== undefined) {
        grid.active = now;
      }
      const opened = this.#pane.number;
      if (opened !== null && places[opened] === undefined && !this.#order.words && content.complete) {
        this.#pane.gone();
      }
    } else if (other) {
      this.#again = true;
    }
    const total = Number(content.total);
    say(this.#count, `${howMany(grid.length, total)}${content.complete ? '' : ' so far'}${content.store ? ` · ${content.store}` : ''}`);
    say(this.#words, total === 0 ? 'There are no saves yet. They appear here as requests bring them.' : grid.length ? '' : 'No save has all of these words.');
    if (fresh && this.#order.words) {
      this.#announce(`${count(grid.length)} found`);
    }
    this.#error.hidden = true;
    grid.draw();
    this.root.dataset.words = this.#order.words;
    this.#set('done');
    if (total) {
      this.root.dataset.firstMs ??= (performance.now() - this.#madeAt).toFixed(1);
    }
    this.#askStatistics();
    if (!content.complete) {
      // The first page was not to wait for the rest.
      clearTimeout(this.#restTimer);
      this.#restTimer = window.setTimeout(() => this.#load(true), 0);
    }
  }

  /** The numbers of the rows in sight, as many at a time as come quickly. */
  #askStatistics(): void {
    if (this.#counting || !this.#alive || !this.#key) {
      return;
    }
    const grid = this.#grid;
    const [first, last] = grid.window;
    const numbers: number[] = [];
    for (let place = first; place < last; place++) {
      const row = grid.rows.get(place);
      if (row && !grid.statistics.has(row[0])) {
        numbers.push(row[0]);
      }
    }
    if (!numbers.length) {
      return;
    }
    this.#counting = true;
    let came = false;
    this.#conversation
      .ask(kinds.STATISTICS, { numbers }, ({ content }) => {
        if (content.progress !== undefined) {
          say(this.#words, String(content.progress));
        }
        for (const [number, found] of Object.entries((content.statistics ?? {}) as Record<string, string[]>)) {
          grid.statistics.set(Number(number), found);
          came = true;
        }
      })
      .then(
        () => {
          this.#counting = false;
          if (this.#words.textContent!.startsWith(READING)) {
            say(this.#words, '');
          }
          grid.draw();
          if (came) {
            this.#askStatistics();
          }
        },
        error => {
          this.#counting = false;
          this.#fail(error);
        }
      );
  }

  // -- what changes ----------------------------------------------------------------------------

  #changed(): void {
    if (!this.#visible || document.hidden) {
      this.#stale = true;
    } else if (!this.#changeTimer) {
      const wait = Math.max(0, this.#changedAt + CHANGE_MS - performance.now());
      this.#changeTimer = window.setTimeout(() => {
        this.#changeTimer = 0;
        this.#changedAt = performance.now();
        this.#load(true);
      }, wait);
    }
  }

  #watchSight(): void {
    const seen = () => {
      if (this.#stale && this.#visible && !document.hidden) {
        this.#stale = false;
        this.#changed();
      }
    };
    const observer = new IntersectionObserver(entries => {
      this.#visible = entries.at(-1)!.isIntersecting;
      seen();
    });
    observer.observe(this.root);
    document.addEventListener('visibilitychange', seen);
    this.#disposer.add(() => {
      observer.disconnect();
      document.removeEventListener('visibilitychange', seen);
    });
  }

  // -- one row ---------------------------------------------------------------------------------

  #open(row: Row): void {
    this.#openNumber(row[0]);
  }

  #openNumber(number: number): void {
    if (number > 0) {
      this.#grid.opened = number;
      this.#grid.draw();
      this.#pane.open(number).catch(error => this.#fail(error));
    }
  }

  #hotkey(key: string, row: Row | undefined): boolean {
    if (key === '/') {
      this.#search.focus();
      this.#search.select();
    } else if ((key === 'p' || key === 'P') && row) {
      this.#pin(row[0], `${row[4]} of ${row[2]}`);
    } else if (key === 'Delete' && row) {
      this.#grid.opened = row[0];
      const ask = () => this.#pane.askDrop();
      if (this.#pane.number === row[0]) {
        ask();
      } else {
        this.#pane.open(row[0]).then(ask, error => this.#fail(error));
      }
    } else if (key === 'Escape' && !this.#pane.root.hidden) {
      this.#pane.close();
    } else {
      return false;
    }
    return true;
  }

  #pin(number: number, title: string): void {
    const there = this.#pinned.some(one => one.number === number);
    this.#pinned = there ? this.#pinned.filter(one => one.number !== number) : [...this.#pinned, { number, title }].slice(-2);
    this.#announce(there ? `Unpinned ${title}` : `Pinned ${title}`);
    this.#drawPins();
    if (this.#pinned.length === 2 && !there) {
      this.#compare();
    }
  }

  #compare(): void {
    this.#grid.opened = null;
    this.#grid.draw();
    this.#pane.compare(this.#pinned.map(one => one.number)).catch(error => this.#fail(error));
  }

  #drawPins(): void {
    this.#grid.pins = this.#pinned.map(one => one.number);
    this.#grid.draw();
    this.#pins.hidden = !this.#pinned.length;
    const chips = this.#pinned.map(({ number, title }) => {
      const made = element('button', { type: 'button', class: 'nnl-button nnl-chip', 'aria-label': `Unpin ${title}` }, `${title} ✕`);
      made.onclick = () => this.#pin(number, title);
      return made;
    });
    this.#pins.replaceChildren(element('span', {}, 'Pinned'), ...chips);
    if (this.#pinned.length === 2) {
      const compare = element('button', { type: 'button', class: 'nnl-button' }, 'Compare');
      compare.onclick = () => this.#compare();
      this.#pins.append(compare);
    } else {
      this.#pins.append(element('span', { class: 'nnl-faint' }, 'pin another to compare'));
    }
  }

  // -- words -----------------------------------------------------------------------------------

  #fail(error: Error): void {
    if (!(error instanceof KernelError)) {
      this.#conversation.tell(kinds.FAILED, { [kinds.ERROR]: error.stack ?? String(error) });
    }
    say(this.#error, error.message);
    this.#error.hidden = false;
    if (!this.#grid.length) {
      say(this.#count, this.#described);
    }
    this.#set('failed');
  }

  #set(state: string): void {
    this.root.dataset.state = state;
    this.#grid.root.setAttribute('aria-busy', String(state === 'busy'));
  }

  #announce(text: string): void {
    // A text that is there already would not be read again.
    say(this.#live, this.#live.textContent === text ? `${text} ` : text);
  }
}

export default { render: rendered((model, el) => new Browser(model, el)) };
