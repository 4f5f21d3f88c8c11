import type { Conversation } from './conversation';
import { count } from './dom';
import * as kinds from './kinds';
import type { Geometry } from './painter';

/** Room around the plot. */
export const LEFT = 62;
export const TOP_ROOM = 4;
export const BOTTOM = 20;
const LABEL_PX = 13;
const COLUMN_LABEL_PX = 44;
/** Of more in sight only numbers are shown. */
const MAX_LABELS = 400;

/** Numbers and labels along the edges; labels come from the kernel where there is room to read them. */
export class Axes {
  left = LEFT;
  #labels: Map<number, string>[] = [new Map(), new Map()];
  #asked = '';

  constructor(
    readonly conversation: Conversation,
    public labelled: boolean[],
    readonly came: () => void
  ) {
    this.left = labelled[0] ? 110 : LEFT;
  }

  /** What the first of rows and of columns is called. */
  firsts: [number, number] = [0, 0];
  /** While more may come nothing is asked for. */
  running = false;

  /** There are more rows or columns now, and their labels are others. */
  grew(labelled: boolean[], firsts: [number, number], running: boolean): void {
    this.labelled = labelled;
    this.firsts = firsts;
    this.running = running;
    this.left = labelled[0] ? 110 : LEFT;
    if (!running) {
      this.#labels = [new Map(), new Map()];
      this.#asked = '';
    }
  }

  /** What stands at a place; its number where more than labels are read for is in sight. */
  label(axis: number, at: number, inSight = 0): string {
    return (inSight <= MAX_LABELS ? this.#labels[axis]!.get(at) : undefined) ?? count(at + this.firsts[axis]!);
  }

  draw(context: CanvasRenderingContext2D, geometry: Geometry, rows: boolean): void {
    const { view } = geometry;
    const [firstRow, lastRow, firstColumn, lastColumn] = view.window;
    context.fillStyle = geometry.text;
    context.font = '11px sans-serif';
    if (rows) {
      context.textAlign = 'right';
      context.textBaseline = 'middle';
      for (const at of this.#ticks(0, firstRow, lastRow, view.scaleY, this.labelled[0] ? LABEL_PX : 26)) {
        const y = (at + 0.5 - view.y) * view.scaleY;
        if (y >= 0 && y <= view.height) {
          context.fillText(fitted(context, this.label(0, at, lastRow - firstRow), this.left - 10), -6, Math.max(6, y));
        }
      }
    }
    context.textAlign = 'center';
    context.textBaseline = 'top';
    const apart = this.labelled[1] ? COLUMN_LABEL_PX : 70;
    for (const at of this.#ticks(1, firstColumn, lastColumn, view.scaleX, apart)) {
      const x = (at + 0.5 - view.x) * view.scaleX;
      if (x >= 0 && x <= view.width) {
        const text = fitted(context, this.label(1, at, lastColumn - firstColumn), apart - 4);
        const half = context.measureText(text).width / 2;
        context.fillText(text, Math.min(Math.max(x, half - 4), view.width - half), view.height + 5);
      }
    }
  }

  /** Fetch the labels in sight, once there is room for them. */
  async ask({ view }: Geometry): Promise<void> {
    const [firstRow, lastRow, firstColumn, lastColumn] = view.window;
    if (this.running) {
      return;
    }
    const wanted: [number, number, number][] = [];
    if (this.labelled[0] && lastRow - firstRow <= MAX_LABELS) {
      wanted.push([0, firstRow, lastRow]);
    }
    if (this.labelled[1] && lastColumn - firstColumn <= MAX_LABELS) {
      wanted.push([1, firstColumn, lastColumn]);
    }
    const asked = JSON.stringify(wanted);
    if (asked === this.#asked) {
      return;
    }
    this.#asked = asked;
    for (const [axis, first, last] of wanted) {
      await this.conversation.ask(kinds.LABELS, { axis, first, last }, ({ content }) => {
        const labels = new Map<number, string>();
        (content.labels as string[]).forEach((label, number) => labels.set(first + number, label));
        this.#labels[axis] = labels;
        this.came();
      });
    }
  }

  #ticks(axis: number, first: number, last: number, scale: number, apart: number): number[] {
    let step = Math.max(1, apart / scale);
    if (step > 1) {
      // 1, 2 or 5 times a power of ten, also where labels are sparse.
      const power = 10 ** Math.floor(Math.log10(step));
      step = power * (step / power <= 1 ? 1 : step / power <= 2 ? 2 : step / power <= 5 ? 5 : 10);
    }
    step = Math.ceil(step);
    const known = this.labelled[axis] && this.#labels[axis]!.size > 0 && last - first <= MAX_LABELS;
    const found: number[] = [];
    for (let at = Math.ceil(first / step) * step; at < last; at += step) {
      if (!known || this.#labels[axis]!.has(at)) {
        found.push(at);
      }
    }
    return found;
  }
}

function fitted(context: CanvasRenderingContext2D, text: string, room: number): string {
  const shown = text.replace(/\n/g, '⏎');
  if (context.measureText(shown).width <= room) {
    return shown;
  }
  let length = shown.length;
  while (length > 1 && context.measureText(`${shown.slice(0, length)}…`).width > room) {
    length--;
  }
  return `${shown.slice(0, length)}…`;
}
