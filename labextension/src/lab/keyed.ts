import { say } from '../widgets/dom';

/**
 * A list of elements that follows a list of records: an element stays the same for as long as its record is there,
 * so that the keyboard's place in it, and what is open, outlive every new status.
 */
export class Keyed<T> {
  #made = new Map<string, { element: HTMLElement; update: (item: T) => void }>();

  constructor(
    readonly parent: HTMLElement,
    readonly key: (item: T) => string,
    readonly make: (item: T) => { element: HTMLElement; update: (item: T) => void }
  ) {}

  show(items: readonly T[]): void {
    const keys = new Set(items.map(this.key));
    for (const [key, { element }] of this.#made) {
      if (!keys.has(key)) {
        element.remove();
        this.#made.delete(key);
      }
    }
    let place: ChildNode | null = this.parent.firstChild;
    for (const item of items) {
      const key = this.key(item);
      let made = this.#made.get(key);
      if (!made) {
        made = this.make(item);
        this.#made.set(key, made);
      }
      if (made.element !== place) {
        this.parent.insertBefore(made.element, place);
      } else {
        place = place.nextSibling;
      }
      made.update(item);
    }
  }
}

/** What a button says, and in full; the latter has the former in it, for who speaks to the machine. */
export function rename(made: HTMLButtonElement, label: string, title = ''): void {
  say(made, label);
  if (title && made.title !== title) {
    made.title = title;
    made.setAttribute('aria-label', title);
  }
}

/** A button that says what it does. */
export function button(label: string, pressed: () => void, title = ''): HTMLButtonElement {
  const made = document.createElement('button');
  made.type = 'button';
  made.className = 'nnlab-button';
  rename(made, label, title);
  made.addEventListener('click', () => {
    if (made.getAttribute('aria-disabled') !== 'true') {
      pressed();
    }
  });
  return made;
}
