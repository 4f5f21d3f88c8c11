/** What must be undone when a view goes away. */
export class Disposer {
  #undo: (() => void)[] = [];

  /** Undo this at the end. */
  add(undo: () => void): void {
    this.#undo.push(undo);
  }

  /** Listen until the end. */
  listen<K extends keyof HTMLElementEventMap>(
    target: EventTarget,
    name: K,
    heard: (event: HTMLElementEventMap[K]) => void,
    options?: AddEventListenerOptions
  ): void {
    target.addEventListener(name, heard as EventListener, options);
    this.add(() => target.removeEventListener(name, heard as EventListener, options));
  }

  dispose(): void {
    for (const undo of this.#undo.splice(0).reverse()) {
      undo();
    }
  }
}
