import { Axes, BOTTOM, TOP_ROOM } from './axes';
import type { Conversation } from './conversation';
import type { Disposer } from './disposer';
import { element } from './dom';
import type { Geometry, Painter, Settings } from './painter';
import { inks } from './theme';
import { type Cell, Viewport } from './viewport';

const ZOOM = 1.5;
/** A question is not overtaken sooner than this, so that a pan is a few questions and not a hundred. */
const ASK_APART_MS = 60;

export interface Hooks {
  /** The block under the pointer or the cursor changed. */
  pointed(cell: Cell | null): void;
  /** A block is to be shown in detail. */
  picked(cell: Cell, byKey: boolean): void;
  /** The part in sight changed. */
  moved(): void;
  failed(error: Error): void;
  /** What was asked for is drawn, or is not yet. */
  state(done: boolean): void;
}

/** The canvas: what of the tensor is seen, and the hands and keys that move it. */
export class Stage {
  readonly canvas = element('canvas', { tabindex: '0', class: 'nnl-canvas' });
  readonly view: Viewport;
  cursor: Cell | null = null;
  /** A row that is marked, in values. */
  row: number | null = null;
  poster: HTMLImageElement | null = null;
  /** The row and the column that are the chosen position. */
  marked: [number | null, number | null] = [null, null];
  #frame = 0;
  #asking = false;
  #again = false;
  #askedAt = 0;
  #timer = 0;
  #alive = true;
  #smooth = 0;

  constructor(
    readonly painter: Painter,
    readonly axes: Axes,
    readonly settings: () => Settings,
    readonly hooks: Hooks,
    readonly conversation: Conversation,
    shape: [number, number],
    readonly height: number,
    disposer: Disposer
  ) {
    this.view = new Viewport(...shape);
    this.#hands(disposer);
    this.#keys(disposer);
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(this.canvas);
    disposer.add(() => {
      observer.disconnect();
      cancelAnimationFrame(this.#frame);
      cancelAnimationFrame(this.#smooth);
      clearTimeout(this.#timer);
      this.#alive = false;
    });
  }

  resize(): void {
    const width = this.canvas.clientWidth;
    if (!width) {
      return;
    }
    const ratio = window.devicePixelRatio || 1;
    const inner = this.painter.needsRows ? Viewport.heightFor(this.view.rows, this.height) : Math.min(180, this.height);
    const height = inner + TOP_ROOM + BOTTOM;
    this.canvas.style.height = `${height}px`;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    this.view.resize(width - this.axes.left - 2, inner);
    this.refresh();
  }

  /** Draw soon, and ask for what is missing. */
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

  fit(): void {
    this.view.fit();
    this.#moved();
  }

  zoom(factor: number, px = this.view.width / 2, py = this.view.height / 2): void {
    this.view.zoom(factor, px, py);
    this.#moved();
  }

  #moved(): void {
    this.refresh();
    this.hooks.moved();
  }

  #geometry(): Geometry {
    return { view: this.view, poster: this.poster, ...inks(this.canvas) };
  }

  #draw(): void {
    const context = this.canvas.getContext('2d')!;
    const geometry = this.#geometry();
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.setTransform(ratio, 0, 0, ratio, this.axes.left * ratio, TOP_ROOM * ratio);
    context.save();
    context.beginPath();
    context.rect(this.painter.needsRows ? 0 : -this.axes.left, 0, this.view.width + this.axes.left, this.view.height);
    context.clip();
    const done = this.painter.draw(context, geometry, this.settings());
    this.#drawMarked(context, geometry);
    this.#drawRow(context, geometry);
    this.#drawCursor(context, geometry);
    context.restore();
    this.axes.draw(context, geometry, this.painter.needsRows);
    this.hooks.state(done);
    this.#ask(done);
  }

  /** A frame around the chosen row or column, in black and white, which stands out on any colour. */
  #drawMarked(context: CanvasRenderingContext2D, { view }: Geometry): void {
    const [row, column] = this.marked;
    const frames: [number, number, number, number][] = [];
    if (row !== null && this.painter.needsRows) {
      const high = Math.max(view.scaleY, 3);
      frames.push([-2, (row - view.y) * view.scaleY, view.columns * view.scaleX + 4, high]);
    }
    if (column !== null) {
      const wide = Math.max(view.scaleX, 3);
      const high = this.painter.needsRows ? view.rows * view.scaleY : view.height;
      frames.push([(column - view.x) * view.scaleX, -2, wide, high + 4]);
    }
    for (const [x, y, width, height] of frames) {
      for (const [line, colour] of [[4, '#000'], [2, '#fff']] as const) {
        context.lineWidth = line;
        context.strokeStyle = colour;
        context.strokeRect(x, y, width, height);
      }
    }
  }

  #drawRow(context: CanvasRenderingContext2D, { view, accent }: Geometry): void {
    if (this.row !== null) {
      const y = (this.row - view.y) * view.scaleY;
      const width = Math.min(view.width, (view.columns - view.x) * view.scaleX);
      for (const [line, colour] of [[3.5, '#000'], [1.5, accent]] as const) {
        context.lineWidth = line;
        context.strokeStyle = colour;
        context.strokeRect(1, y, width - 2, Math.max(view.scaleY, 3));
      }
    }
  }

  /** Bring a row or column into sight. */
  reveal(row: number | null, column: number | null): void {
    const { view } = this;
    const [firstRow, lastRow, first, last] = view.window;
    const seen = (at: number | null, from: number, to: number) => at === null || (at >= from && at < to);
    if (!seen(row, firstRow, lastRow) || !seen(column, first, last)) {
      view.reveal(row ?? Math.ceil(view.y), column ?? Math.ceil(view.x), 1, 1);
      this.hooks.moved();
    }
    this.refresh();
  }

  #drawCursor(context: CanvasRenderingContext2D, { view }: Geometry): void {
    if (!this.cursor) {
      return;
    }
    const [a, b] = view.level;
    const x = (this.cursor.column * 2 ** b - view.x) * view.scaleX;
    const y = this.painter.needsRows ? (this.cursor.row * 2 ** a - view.y) * view.scaleY : 0;
    const width = Math.max(2 ** b * view.scaleX, 5);
    const height = this.painter.needsRows ? Math.max(2 ** a * view.scaleY, 5) : view.height;
    // Two lines, one of which is seen on every colour.
    context.lineWidth = 3;
    context.strokeStyle = '#000';
    context.strokeRect(x - 1, y - 1, width + 2, height + 2);
    context.lineWidth = 1.5;
    context.strokeStyle = '#fff';
    context.strokeRect(x - 1, y - 1, width + 2, height + 2);
  }

  /** One question at a time, and a newer one in its place where it takes long. */
  #ask(done: boolean): void {
    if (this.#asking) {
      this.#again = true;
      if (!done && !this.#timer) {
        const wait = Math.max(0, this.#askedAt + ASK_APART_MS - performance.now());
        this.#timer = window.setTimeout(() => {
          this.#timer = 0;
          this.#send();
        }, wait);
      }
      return;
    }
    this.#send();
  }

  #send(): void {
    if (!this.#alive) {
      return;
    }
    this.#asking = true;
    this.#again = false;
    const asked = (this.#askedAt = performance.now());
    const finished = () => {
      if (asked === this.#askedAt) {
        this.#asking = false;
        if (this.#again) {
          this.refresh();
        }
      }
    };
    const geometry = this.#geometry();
    this.painter.ask(geometry, this.settings()).then(finished, error => {
      finished();
      this.#again = false;
      this.hooks.failed(error);
    });
    this.axes.ask(geometry).catch(error => this.hooks.failed(error));
  }

  #spot(event: MouseEvent): [number, number] {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left - this.axes.left, event.clientY - box.top - TOP_ROOM];
  }

  #hands(disposer: Disposer): void {
    let from: [number, number] | null = null;
    let travelled = 0;
    disposer.listen(this.canvas, 'pointerdown', event => {
      if (event.button === 0) {
        from = [event.clientX, event.clientY];
        travelled = 0;
        this.canvas.setPointerCapture(event.pointerId);
      }
    });
    disposer.listen(this.canvas, 'pointermove', event => {
      if (from) {
        const [dx, dy] = [from[0] - event.clientX, from[1] - event.clientY];
        travelled += Math.abs(dx) + Math.abs(dy);
        if (travelled > 4) {
          this.canvas.classList.add('nnl-dragging');
          this.view.pan(dx, dy);
          from = [event.clientX, event.clientY];
          this.#moved();
        }
      } else {
        this.hooks.pointed(this.view.at(...this.#spot(event)));
      }
    });
    const up = (event: PointerEvent) => {
      this.canvas.classList.remove('nnl-dragging');
      const cell = this.view.at(...this.#spot(event));
      if (from && travelled <= 4 && cell && event.type === 'pointerup') {
        this.cursor = cell;
        this.hooks.picked(cell, false);
        this.refresh();
      }
      from = null;
    };
    disposer.listen(this.canvas, 'pointerup', up);
    disposer.listen(this.canvas, 'pointercancel', up);
    disposer.listen(this.canvas, 'pointerleave', () => this.hooks.pointed(null));
    disposer.listen(this.canvas, 'dblclick', event => this.zoom(ZOOM * ZOOM, ...this.#spot(event)));
    disposer.listen(
      this.canvas,
      'wheel',
      event => {
        // A plain wheel goes on scrolling the notebook; pinching arrives as a wheel with Ctrl.
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          this.zoom(Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) / 120), ...this.#spot(event));
        } else if (event.shiftKey) {
          event.preventDefault();
          this.view.pan(event.deltaX + event.deltaY, 0);
          this.#moved();
        }
      },
      { passive: false }
    );
  }

  #keys(disposer: Disposer): void {
    const { view } = this;
    const arrows: Record<string, [number, number]> = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1]
    };
    disposer.listen(this.canvas, 'keydown', event => {
      const arrow = arrows[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey) {
        return;
      }
      if (arrow && event.shiftKey) {
        this.#step(...arrow);
      } else if (arrow) {
        this.#glide((arrow[0] * view.width) / 8, (arrow[1] * view.height) / 8);
      } else if (event.key === '+' || event.key === '=') {
        this.#zoomAtCursor(ZOOM);
      } else if (event.key === '-' || event.key === '_') {
        this.#zoomAtCursor(1 / ZOOM);
      } else if (event.key === 'Home') {
        this.fit();
      } else if (event.key === 'Enter') {
        this.cursor ??= this.view.at(view.width / 2, view.height / 2) ?? { row: 0, column: 0 };
        this.hooks.picked(this.cursor, true);
        this.refresh();
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** Pan in a few frames, so that the eye can follow; at once where that is not wanted. */
  #glide(dx: number, dy: number): void {
    cancelAnimationFrame(this.#smooth);
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) {
      this.view.pan(dx, dy);
      this.#moved();
      return;
    }
    let left = 4;
    const step = () => {
      this.view.pan(dx / 4, dy / 4);
      this.#moved();
      if (--left > 0) {
        this.#smooth = requestAnimationFrame(step);
      }
    };
    step();
  }

  #step(dx: number, dy: number): void {
    const { view } = this;
    const [a, b] = view.level;
    const start = this.cursor ?? view.at(view.width / 2, view.height / 2) ?? { row: 0, column: 0 };
    const row = Math.min(Math.max(start.row + dy, 0), Math.ceil(view.rows / 2 ** a) - 1);
    const column = Math.min(Math.max(start.column + dx, 0), Math.ceil(view.columns / 2 ** b) - 1);
    this.cursor = { row, column };
    view.reveal(row, column, 2 ** a, 2 ** b);
    this.hooks.pointed(this.cursor);
    this.#moved();
  }

  #zoomAtCursor(factor: number): void {
    const { view, cursor } = this;
    const [a, b] = view.level;
    if (!cursor) {
      this.zoom(factor);
      return;
    }
    const [row, column] = [(cursor.row + 0.5) * 2 ** a, (cursor.column + 0.5) * 2 ** b];
    this.view.zoom(factor, (column - view.x) * view.scaleX, (row - view.y) * view.scaleY);
    const [c, d] = view.level;
    this.cursor = { row: Math.floor(row / 2 ** c), column: Math.floor(column / 2 ** d) };
    this.#moved();
  }
}
