import type { Inks } from './theme';
import type { Viewport } from './viewport';

/** How the kernel is asked to see the tensor. */
export interface Settings {
  leads: number[];
  how: string;
  scale: string;
  clip: string | [number, number];
}

export interface Geometry extends Inks {
  view: Viewport;
  /** A small picture that stands in until something better comes. */
  poster: HTMLImageElement | null;
}

/** What an answer said beside its picture. */
export interface Told {
  span?: [number, number, string] | undefined;
  /** NaN, +inf, −inf, and the share of the slice that was looked at. */
  special?: [number, number, number, number] | undefined;
  sampled?: boolean;
  came: boolean;
}

/** Draws into the plot, whose upper left corner is the origin. */
export interface Painter {
  /** Take a picture of all there is now; nothing is asked for while more may come. */
  grew(content: Record<string, unknown>, buffers: Uint8Array[], running: boolean): void;
  /** Whether rows can be walked as columns can. */
  readonly needsRows: boolean;
  /** Draw what is there; whether it is all. */
  draw(context: CanvasRenderingContext2D, geometry: Geometry, settings: Settings): boolean;
  /** Ask for what is missing; resolves when it came, or was given up. */
  ask(geometry: Geometry, settings: Settings): Promise<void>;
  recolour(scale: string, dark: boolean): void;
}
