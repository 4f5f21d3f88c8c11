import type { Conversation } from './conversation';
import { short } from './dom';
import * as kinds from './kinds';
import { type Palettes, SPECIAL } from './palette';
import type { Geometry, Painter, Settings, Told } from './painter';

interface Part {
  level: number;
  first: number;
  last: number;
  low: Float64Array;
  high: Float64Array;
  mean: Float64Array;
  flags: Uint8Array;
}

const FLAGS = [1, 2, 4];

/** Values of one dimension as a line; from afar its mean, within the band from least to greatest. */
export class Line implements Painter {
  readonly needsRows = false;
  #part: Part | null = null;
  #ends: [number, number] = [0, 1];
  #running = false;

  constructor(
    readonly conversation: Conversation,
    readonly palettes: Palettes,
    readonly told: (told: Told) => void
  ) {}

  grew(content: Record<string, unknown>, buffers: Uint8Array[], running: boolean): void {
    this.#running = running;
    this.#take(content, buffers, Number(content.level));
  }

  recolour(): void {
    // A line has the page's colours.
  }

  #window({ view }: Geometry): [number, number, number] {
    const level = view.level[1];
    const [, , first, last] = view.window;
    return [level, Math.floor(first / 2 ** level), Math.ceil(last / 2 ** level)];
  }

  draw(context: CanvasRenderingContext2D, geometry: Geometry): boolean {
    const { view } = geometry;
    const part = this.#part;
    if (!part) {
      return false;
    }
    const [low, high] = this.#ends;
    const room = (view.height - 16) / (high / 2 - low / 2);
    const y = (value: number) => view.height - 8 - (value / 2 - low / 2) * room;
    const size = 2 ** part.level;
    const x = (at: number) => ((part.first + at + 0.5) * size - view.x) * view.scaleX;
    context.save();
    context.beginPath();
    context.rect(0, 0, view.width, view.height);
    context.clip();
    context.strokeStyle = context.fillStyle = geometry.faint;
    if (low < 0 && high > 0) {
      context.fillRect(0, Math.round(y(0)), view.width, 1);
    }
    if (part.level > 0) {
      context.fillStyle = geometry.accent;
      context.globalAlpha = 0.3;
      for (let at = 0; at < part.low.length; at++) {
        const [top, bottom] = [y(part.high[at]!), y(part.low[at]!)];
        context.fillRect(x(at - 0.5), top, Math.max(1, size * view.scaleX), Math.max(1, bottom - top));
      }
      context.globalAlpha = 1;
    }
    context.strokeStyle = context.fillStyle = geometry.accent;
    context.lineWidth = 1.5;
    context.beginPath();
    let pen = false;
    for (let at = 0; at < part.mean.length; at++) {
      const value = part.mean[at]!;
      if (Number.isNaN(value)) {
        pen = false;
      } else {
        context[pen ? 'lineTo' : 'moveTo'](x(at), y(value));
        pen = true;
        if (part.level === 0 && view.scaleX > 6) {
          context.fillRect(x(at) - 2, y(value) - 2, 4, 4);
        }
      }
    }
    context.stroke();
    for (let at = 0; at < part.flags.length; at++) {
      FLAGS.forEach((flag, number) => {
        if (part.flags[at]! & flag) {
          context.fillStyle = this.palettes[SPECIAL[number]![0]] as string;
          context.fillRect(x(at - 0.5), number === 1 ? 0 : view.height - 6, Math.max(2, size * view.scaleX), 6);
        }
      });
    }
    context.restore();
    context.fillStyle = geometry.text;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.font = '11px sans-serif';
    context.fillText(short(high), -6, 10);
    context.fillText(short(low), -6, view.height - 10);
    return this.#running || this.#covers(geometry);
  }

  #covers(geometry: Geometry): boolean {
    const [level, first, last] = this.#window(geometry);
    const part = this.#part;
    return part !== null && part.level === level && part.first <= first && part.last >= last;
  }

  async ask(geometry: Geometry, settings: Settings): Promise<void> {
    if (this.#running || this.#covers(geometry)) {
      return;
    }
    const [level, first, last] = this.#window(geometry);
    const room = last - first;
    const question = { ...settings, level, first: Math.max(0, first - room), last: last + room };
    await this.conversation.ask(kinds.LINE, question, answer => {
      if (answer.content.line !== undefined) {
        this.#take(answer.content, answer.buffers, level);
      }
    });
  }

  #take(content: Record<string, unknown>, buffers: Uint8Array[], level: number): void {
    const line = content.line as [number, number];
    const [low, high, mean] = buffers.slice(0, 3).map(one => new Float64Array(one.buffer)) as [Float64Array, Float64Array, Float64Array];
    this.#ends = content.ends as [number, number];
    this.#part = { level, first: line[0], last: line[1], low, high, mean, flags: buffers[3]! };
    this.told({ special: content.special as Told['special'], came: true });
  }
}
