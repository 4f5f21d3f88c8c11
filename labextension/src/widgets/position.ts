import type { Disposer } from './disposer';

/** A position of a sequence, chosen in one view and shown by every view of that sequence on the page. */
interface Chosen {
  sequence: string;
  position: number | null;
  from: string;
}

/** Each widget's module is bundled by itself, so they meet at the window. */
const EVENT = 'nnsight-lab:position';
const LAST = Symbol.for('nnsight-lab:positions');

function last(): Map<string, number> {
  const place = window as unknown as Record<symbol, Map<string, number> | undefined>;
  return (place[LAST] ??= new Map<string, number>());
}

/**
 * Choose a position of a sequence, or none, for every view of it.
 *
 * `sequence` is the widget's synced trait of that name (`nnsight_lab.widgets.sequences.sequence_key`), empty where the
 * view knows none; `from` is the view that says so, which does not hear it.
 */
export function choosePosition(sequence: string, position: number | null, from: string): void {
  if (!sequence) {
    return;
  }
  if (position === null) {
    last().delete(sequence);
  } else {
    last().set(sequence, position);
  }
  window.dispatchEvent(new CustomEvent<Chosen>(EVENT, { detail: { sequence, position, from } }));
}

/** What is chosen of a sequence on this page. */
export function chosenPosition(sequence: string): number | null {
  return last().get(sequence) ?? null;
}

/** Hear what other views of the sequence choose; at once where one was chosen before. */
export function onPosition(
  sequence: string,
  view: string,
  heard: (position: number | null) => void,
  disposer: Disposer
): void {
  if (!sequence) {
    return;
  }
  const listen = (event: Event) => {
    const { detail } = event as CustomEvent<Chosen>;
    if (detail.sequence === sequence && detail.from !== view) {
      heard(detail.position);
    }
  };
  window.addEventListener(EVENT, listen);
  disposer.add(() => window.removeEventListener(EVENT, listen));
  const before = last().get(sequence);
  if (before !== undefined) {
    heard(before);
  }
}
