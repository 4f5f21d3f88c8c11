import type { Answer, Conversation } from './conversation';
import * as kinds from './kinds';
import { CODE_NAN, SPECIAL, type Palettes, lookup, paint } from './palette';
import type { Geometry, Painter, Settings, Told } from './painter';
import type { Viewport } from './viewport';

/** Blocks along a side of a tile, as in the kernel. */
const TILE = 256;
const MAX_TILES = 160;
/** Below this, a sign in a cell is a smudge. */
const SIGN_PX = 11;

interface Tile {
  level: [number, number];
  row: number;
  column: number;
  height: number;
  width: number;
  codes: Uint8Array;
  painted: HTMLCanvasElement | null;
}

interface Preview {
  height: number;
  width: number;
  codes: Uint8Array;
  painted: HTMLCanvasElement | null;
}

/** A matrix drawn in tiles: those that are there at once, the others when the kernel sends them. */
export class Matrix implements Painter {
  readonly needsRows = true;
  #tiles = new Map<string, Tile>();
  #previews = new Map<string, Preview>();
  #colours: Uint32Array = new Uint32Array(256);
  #scale = '';
  #counted = new Set<string>();
  #spans = new Map<string, NonNullable<Told['span']>>();

  /** What a growing matrix looked like when it was last heard of, and whether more may come. */
  #whole: Preview | null = null;
  #running = false;

  constructor(
    readonly conversation: Conversation,
    readonly palettes: Palettes,
    readonly told: (told: Told) => void
  ) {}

  recolour(scale: string, dark: boolean): void {
    this.#scale = scale;
    this.#colours = lookup(this.palettes, scale, dark);
    for (const one of [...this.#tiles.values(), ...this.#previews.values(), ...(this.#whole ? [this.#whole] : [])]) {
      one.painted = null;
    }
  }

  grew(content: Record<string, unknown>, buffers: Uint8Array[], running: boolean): void {
    const [height, width] = content.picture as [number, number];
    this.#tiles.clear();
    this.#previews.clear();
    this.#counted.clear();
    this.#spans.clear();
    this.#whole = { height, width, codes: buffers[0]!, painted: null };
    this.#running = running;
    this.told({ span: content.span as Told['span'], came: true });
  }

  get colours(): Uint32Array {
    return this.#colours;
  }

  /** What the colours span in what is in sight; nothing before the kernel said so. */
  span(view: Viewport, settings: Settings): Told['span'] {
    return this.#spans.get(`${keyOf(settings)}|${view.level}`);
  }

  draw(context: CanvasRenderingContext2D, geometry: Geometry, settings: Settings): boolean {
    const { view } = geometry;
    const key = keyOf(settings);
    const wanted = this.#wanted(geometry);
    const missing = wanted.some(place => !this.#tiles.has(`${key}|${place}`));
    const all = this.#running || !missing;
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    context.rect(-view.x * view.scaleX, -view.y * view.scaleY, view.columns * view.scaleX, view.rows * view.scaleY);
    context.clip();
    if (missing) {
      this.#drawPreview(context, geometry, key);
      // Whatever was seen from afar stands in; the nearest lies on top.
      const [a, b] = view.level;
      const others = [...this.#tiles].filter(
        ([name, tile]) => name.startsWith(`${key}|`) && tile.level[0] >= a && tile.level[1] >= b
      );
      others.sort(([, one], [, other]) => other.level[0] + other.level[1] - one.level[0] - one.level[1]);
      for (const [, tile] of others) {
        this.#drawTile(context, geometry, tile);
      }
    }
    for (const place of wanted) {
      const name = `${key}|${place}`;
      const tile = this.#tiles.get(name);
      if (tile) {
        this.#tiles.delete(name); // looked at last: put at the end
        this.#tiles.set(name, tile);
        this.#drawTile(context, geometry, tile);
        this.#drawSigns(context, geometry, tile);
      }
    }
    context.restore();
    return all;
  }

  async ask(geometry: Geometry, settings: Settings): Promise<void> {
    if (this.#running) {
      return;
    }
    const key = keyOf(settings);
    const level = geometry.view.level;
    const missing = this.#wanted(geometry).filter(place => !this.#tiles.has(`${key}|${place}`));
    const slice = JSON.stringify(settings.leads);
    if (missing.length === 0 && this.#counted.has(slice)) {
      return;
    }
    const tiles = missing.map(place => place.split('|')[1]!.split(',').map(Number));
    const question = { ...settings, level, tiles, preview: !this.#previews.has(key), count: !this.#counted.has(slice) };
    await this.conversation.ask(kinds.TILES, question, answer => this.#take(answer, key, level, slice));
  }

  #take(answer: Answer, key: string, level: [number, number], slice: string): void {
    const { content, buffers } = answer;
    const preview = content.preview as [number, number] | undefined;
    if (preview) {
      this.#previews.set(key, { height: preview[0], width: preview[1], codes: buffers[0]!, painted: null });
    }
    const tiles = (content.tiles ?? []) as [number, number, number, number][];
    tiles.forEach(([row, column, height, width], number) => {
      const codes = buffers[number]!;
      this.#tiles.set(`${key}|${level}|${row},${column}`, { level, row, column, height, width, codes, painted: null });
    });
    if (tiles.length) {
      this.#spans.set(`${key}|${level}`, content.span as NonNullable<Told['span']>);
    }
    while (this.#tiles.size > MAX_TILES) {
      this.#tiles.delete(this.#tiles.keys().next().value!);
    }
    const special = content.special as Told['special'];
    if (special && special[3] >= 1) {
      this.#counted.add(slice);
    }
    this.told({
      span: content.span as Told['span'],
      special,
      sampled: preview !== undefined,
      came: tiles.length > 0 || preview !== undefined
    });
  }

  /** The tiles in sight, as `a,b|row,column`. */
  #wanted({ view }: Geometry): string[] {
    const [a, b] = view.level;
    const [firstRow, lastRow, firstColumn, lastColumn] = view.window;
    const [high, wide] = [TILE * 2 ** a, TILE * 2 ** b];
    const found: string[] = [];
    for (let row = Math.floor(firstRow / high); row * high < lastRow; row++) {
      for (let column = Math.floor(firstColumn / wide); column * wide < lastColumn; column++) {
        found.push(`${a},${b}|${row},${column}`);
      }
    }
    return found;
  }

  #drawPreview(context: CanvasRenderingContext2D, { view, poster }: Geometry, key: string): void {
    const preview = this.#whole ?? this.#previews.get(key);
    const image = preview ? (preview.painted ??= this.#paint(preview)) : poster;
    if (image) {
      const [x, y] = [-view.x * view.scaleX, -view.y * view.scaleY];
      context.drawImage(image, x, y, view.columns * view.scaleX, view.rows * view.scaleY);
    }
  }

  #drawTile(context: CanvasRenderingContext2D, { view }: Geometry, tile: Tile): void {
    const [high, wide] = [2 ** tile.level[0] * view.scaleY, 2 ** tile.level[1] * view.scaleX];
    const x = tile.column * TILE * wide - view.x * view.scaleX;
    const y = tile.row * TILE * high - view.y * view.scaleY;
    const [width, height] = [tile.width * wide, tile.height * high];
    if (x < view.width && y < view.height && x + width > 0 && y + height > 0) {
      context.drawImage((tile.painted ??= this.#paint(tile)), x, y, width, height);
    }
  }

  /** Special values have signs as well as colours where there is room. */
  #drawSigns(context: CanvasRenderingContext2D, { view }: Geometry, tile: Tile): void {
    const [high, wide] = [2 ** tile.level[0] * view.scaleY, 2 ** tile.level[1] * view.scaleX];
    if (high < SIGN_PX || wide < SIGN_PX) {
      return;
    }
    const size = Math.min(high, wide, 22) * 0.7;
    context.font = `${size}px sans-serif`;
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    context.fillStyle = '#000';
    const [left, top] = [tile.column * TILE * wide - view.x * view.scaleX, tile.row * TILE * high - view.y * view.scaleY];
    const [firstRow, lastRow] = [Math.max(0, Math.floor(-top / high)), Math.min(tile.height, Math.ceil((view.height - top) / high))];
    const [first, last] = [Math.max(0, Math.floor(-left / wide)), Math.min(tile.width, Math.ceil((view.width - left) / wide))];
    for (let row = firstRow; row < lastRow; row++) {
      for (let column = first; column < last; column++) {
        const code = tile.codes[row * tile.width + column]!;
        if (code >= CODE_NAN) {
          const sign = SPECIAL.find(one => one[1] === code)?.[3] ?? '';
          context.fillText(sign, left + (column + 0.5) * wide, top + (row + 0.5) * high);
        }
      }
    }
  }

  #paint(one: Preview): HTMLCanvasElement {
    if (!this.#scale) {
      return document.createElement('canvas');
    }
    return paint(one.codes, one.height, one.width, this.#colours);
  }
}

function keyOf(settings: Settings): string {
  return JSON.stringify([settings.leads, settings.how, settings.scale, settings.clip]);
}
