/** Which part of the matrix is seen, and how large: pure arithmetic. */

const MAX_CELL = 64;
const MAX_ROW = 28;

export interface Cell {
  row: number;
  column: number;
}

export class Viewport {
  /** The value at the upper left corner. */
  x = 0;
  y = 0;
  /** Pixels per value. */
  scaleX = 1;
  scaleY = 1;
  width = 1;
  height = 1;
  /** All is in sight, and stays so when the room changes. */
  #fitted = true;

  constructor(
    public rows: number,
    public columns: number
  ) {}

  /** There are more rows or columns now; who saw all of it goes on seeing all. */
  grow(rows: number, columns: number): void {
    this.rows = rows;
    this.columns = columns;
    this.resize(this.width, this.height);
  }

  /** How high a picture of that many rows is at most worth. */
  static heightFor(rows: number, most: number): number {
    return Math.round(Math.min(most, Math.max(rows * MAX_ROW, 56)));
  }

  get fitX(): number {
    return Math.min(this.width / this.columns, MAX_CELL);
  }

  get fitY(): number {
    return Math.min(this.height / this.rows, MAX_CELL);
  }

  resize(width: number, height: number): void {
    this.width = Math.max(1, width);
    this.height = Math.max(1, height);
    if (this.#fitted) {
      this.fit();
    } else {
      this.#clamp();
    }
  }

  fit(): void {
    this.x = this.y = 0;
    this.scaleX = this.fitX;
    this.scaleY = this.fitY;
    this.#fitted = true;
  }

  pan(dx: number, dy: number): void {
    this.x += dx / this.scaleX;
    this.y += dy / this.scaleY;
    this.#clamp();
  }

  /** Zoom so that the value under a pixel stays there. */
  zoom(factor: number, px: number, py: number): void {
    const [x, y] = [this.x + px / this.scaleX, this.y + py / this.scaleY];
    this.scaleX = Math.min(Math.max(this.scaleX * factor, this.fitX), MAX_CELL);
    this.scaleY = Math.min(Math.max(this.scaleY * factor, this.fitY), MAX_CELL);
    this.x = x - px / this.scaleX;
    this.y = y - py / this.scaleY;
    this.#clamp();
    this.#fitted = this.scaleX === this.fitX && this.scaleY === this.fitY;
  }

  /** Move as little as shows a block. */
  reveal(row: number, column: number, high: number, wide: number): void {
    this.x = Math.min(Math.max(this.x, (column + 1) * wide - this.width / this.scaleX), column * wide);
    this.y = Math.min(Math.max(this.y, (row + 1) * high - this.height / this.scaleY), row * high);
    this.#clamp();
  }

  /** The level whose blocks are one to two pixels large, or single values: exponents of rows and columns. */
  get level(): [number, number] {
    return [exponent(this.scaleY), exponent(this.scaleX)];
  }

  /** The values in sight: first and last (exclusive) row and column. */
  get window(): [number, number, number, number] {
    return [
      Math.max(0, Math.floor(this.y)),
      Math.min(this.rows, Math.ceil(this.y + this.height / this.scaleY)),
      Math.max(0, Math.floor(this.x)),
      Math.min(this.columns, Math.ceil(this.x + this.width / this.scaleX))
    ];
  }

  /** The block at a pixel, in blocks of the level; null beside the matrix. */
  at(px: number, py: number): Cell | null {
    const [a, b] = this.level;
    const [row, column] = [Math.floor(this.y + py / this.scaleY), Math.floor(this.x + px / this.scaleX)];
    if (px < 0 || py < 0 || row < 0 || column < 0 || row >= this.rows || column >= this.columns) {
      return null;
    }
    return { row: Math.floor(row / 2 ** a), column: Math.floor(column / 2 ** b) };
  }

  #clamp(): void {
    this.scaleX = Math.max(this.scaleX, this.fitX);
    this.scaleY = Math.max(this.scaleY, this.fitY);
    this.x = Math.max(0, Math.min(this.x, this.columns - this.width / this.scaleX));
    this.y = Math.max(0, Math.min(this.y, this.rows - this.height / this.scaleY));
  }
}

function exponent(scale: number): number {
  // A hair's breadth: 1 / 8 pixels is level 3 however the division came out.
  return Math.max(0, Math.ceil(-Math.log2(scale) - 1e-9));
}
