/**
 * The kernels of all open notebooks, and the questions to them: only while somebody looks, and only as often as set.
 */
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import { KernelLink } from './link';

export const IWatch = new Token<Watch>('nnsight-lab:IWatch', 'The kernels of all open notebooks, with their engines.');

/** One notebook's kernel. */
export interface Watched {
  panel: NotebookPanel;
  link: KernelLink;
}

export class Watch implements IDisposable {
  readonly changed = new Signal<this, void>(this);
  #pollSeconds = 3;
  #links = new Map<string, KernelLink>();
  #panels = new Map<NotebookPanel, string>();
  #lookers = new Map<string, boolean>();
  #timer = 0;
  #disposed = false;

  constructor(readonly tracker: INotebookTracker) {
    tracker.widgetAdded.connect((_, panel) => this.#added(panel));
    tracker.currentChanged.connect(() => this.#say());
    tracker.forEach(panel => this.#added(panel));
    document.addEventListener('visibilitychange', this.#looked);
    this.#tick();
  }

  get isDisposed(): boolean {
    return this.#disposed;
  }

  /** The kernel of the notebook in front; null where there is none. */
  get current(): Watched | null {
    const panel = this.tracker.currentWidget;
    const link = panel && this.linkOf(panel);
    return panel && link ? { panel, link } : null;
  }

  /** Every kernel once, that of the notebook in front first. */
  get all(): Watched[] {
    const front = this.current;
    const found = front ? [front] : [];
    for (const [panel, id] of this.#panels) {
      const link = this.#links.get(id);
      if (link && !found.some(other => other.link === link)) {
        found.push({ panel, link });
      }
    }
    return found;
  }

  /** How often a kernel is to say something though nothing changed; at least 3. */
  get pollSeconds(): number {
    return this.#pollSeconds;
  }

  set pollSeconds(seconds: number) {
    this.#pollSeconds = Math.max(3, seconds);
    this.#looked();
  }

  linkOf(panel: NotebookPanel): KernelLink | null {
    return this.#links.get(this.#panels.get(panel) ?? '') ?? null;
  }

  /** Somebody looks, or no longer does; `saves` where the saves are looked at. */
  look(who: string, visible: boolean, saves = false): void {
    if (this.#lookers.get(who) === (visible ? saves : undefined)) {
      return;
    }
    if (visible) {
      this.#lookers.set(who, saves);
    } else {
      this.#lookers.delete(who);
    }
    this.#looked();
    if (visible) {
      void this.poll();
    }
  }

  /** Ask every kernel that has not said anything for a while. */
  async poll(): Promise<void> {
    if (this.#visible) {
      await Promise.all([...this.#links.values()].map(link => link.poll(this.#pollSeconds, this.#saves)));
    }
  }

  dispose(): void {
    if (!this.#disposed) {
      this.#disposed = true;
      window.clearTimeout(this.#timer);
      document.removeEventListener('visibilitychange', this.#looked);
      for (const link of this.#links.values()) {
        link.dispose();
      }
      Signal.clearData(this);
    }
  }

  get #visible(): boolean {
    return this.#lookers.size > 0 && document.visibilityState === 'visible';
  }

  get #saves(): boolean {
    return [...this.#lookers.values()].some(Boolean);
  }

  #looked = (): void => {
    for (const link of this.#links.values()) {
      link.look(this.#visible, this.#saves, this.#pollSeconds);
    }
  };

  #tick(): void {
    this.#timer = window.setTimeout(
      () => {
        void this.poll().finally(() => !this.#disposed && this.#tick());
      },
      this.#pollSeconds * 1000
    );
  }

  #added(panel: NotebookPanel): void {
    if (this.#panels.has(panel)) {
      return;
    }
    this.#panels.set(panel, '');
    panel.sessionContext.kernelChanged.connect(() => this.#kernelOf(panel));
    panel.disposed.connect(() => {
      this.#panels.delete(panel);
      this.#sweep();
    });
    void panel.sessionContext.ready.then(() => this.#kernelOf(panel));
    this.#kernelOf(panel);
  }

  #kernelOf(panel: NotebookPanel): void {
    if (panel.isDisposed || !this.#panels.has(panel)) {
      return;
    }
    const kernel = panel.sessionContext.session?.kernel ?? null;
    this.#panels.set(panel, kernel?.id ?? '');
    if (kernel && !this.#links.has(kernel.id)) {
      const link = new KernelLink(kernel);
      link.look(this.#visible, this.#saves, this.#pollSeconds);
      link.changed.connect(() => this.#say());
      this.#links.set(kernel.id, link);
    }
    this.#sweep();
  }

  /** Let go of kernels that no notebook has any more. */
  #sweep(): void {
    const used = new Set(this.#panels.values());
    for (const [id, link] of this.#links) {
      if (!used.has(id) || link.kernel.isDisposed) {
        link.dispose();
        this.#links.delete(id);
        const other = [...this.#panels].find(([panel, kernel]) => kernel === id && !panel.isDisposed);
        if (other && other[0].sessionContext.session?.kernel?.isDisposed === false) {
          this.#kernelOf(other[0]);
        }
      }
    }
    this.#say();
  }

  #say(): void {
    if (!this.#disposed) {
      this.changed.emit();
    }
  }
}
