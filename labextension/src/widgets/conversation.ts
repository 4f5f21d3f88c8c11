import type { AnyModel } from '@anywidget/types';
import type { Disposer } from './disposer';
import * as kinds from './kinds';

/** What the kernel says to a question; `buffers` are aligned copies. */
export interface Answer {
  content: Record<string, unknown>;
  buffers: Uint8Array[];
  last: boolean;
  dropped: boolean;
}

/** What the kernel said was wrong; it has logged it. */
export class KernelError extends Error {}

/** A kernel that takes longer than this may be busy, or gone. */
const SLOW_MS = 2000;

interface Waiting {
  take: (answer: Answer) => void;
  fail: (error: Error) => void;
}

/** Questions to the kernel, by id, and its answers; an answer may come in parts. */
export class Conversation {
  readonly view = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  /** All bytes that came. */
  bytes = 0;
  /** Told when a question waits for long, and when it does no more. */
  slow: (slow: boolean) => void = () => undefined;
  /** What every question says beside its own words. */
  always: Record<string, unknown> = {};
  #model: AnyModel;
  #waiting = new Map<string, Waiting>();
  #next = 0;
  #slowTimer = 0;

  constructor(model: AnyModel, disposer: Disposer) {
    this.#model = model;
    const heard = (message: unknown, buffers: DataView[]) => this.#heard(message, buffers);
    model.on('msg:custom', heard);
    this.tell(kinds.HERE);
    disposer.add(() => {
      model.off('msg:custom', heard);
      clearTimeout(this.#slowTimer);
      this.#waiting.clear();
      this.tell(kinds.GONE);
    });
  }

  /** Say something that has no answer. */
  tell(kind: string, content: Record<string, unknown> = {}): void {
    try {
      this.#model.send({ ...content, [kinds.KIND]: kind, [kinds.VIEW]: this.view });
    } catch {
      // There is no kernel, or the widget was closed there.
    }
  }

  /** Ask, and take every part of the answer; resolves after the last. */
  ask(kind: string, content: Record<string, unknown>, take: (answer: Answer) => void): Promise<void> {
    const id = `${this.view}:${this.#next++}`;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, {
        take: answer => {
          take(answer);
          if (answer.last) {
            this.#waiting.delete(id);
            resolve();
          }
        },
        fail: error => {
          this.#waiting.delete(id);
          reject(error);
        }
      });
      this.#watch();
      const question = { ...this.always, ...content, [kinds.ASK]: id, [kinds.KIND]: kind, [kinds.VIEW]: this.view };
      try {
        this.#model.send(question);
      } catch (error) {
        const why = (error as Error).message;
        this.#waiting.get(id)?.fail(new KernelError(`The kernel is gone: run the cell again. (${why})`));
      }
    });
  }

  /** Start to count anew: something was asked, or came. */
  #watch(): void {
    clearTimeout(this.#slowTimer);
    this.slow(false);
    this.#slowTimer = window.setTimeout(() => this.slow(this.#waiting.size > 0), SLOW_MS);
  }

  #heard(message: unknown, buffers: DataView[]): void {
    const content = message as Record<string, unknown>;
    const waiting = this.#waiting.get(String(content[kinds.ANSWER]));
    if (!waiting) {
      return;
    }
    this.#watch();
    const copies = buffers.map(one => {
      this.bytes += one.byteLength;
      return new Uint8Array(one.buffer.slice(one.byteOffset, one.byteOffset + one.byteLength));
    });
    const error = content[kinds.ERROR];
    if (error !== undefined) {
      waiting.fail(new KernelError(String(error)));
      return;
    }
    try {
      waiting.take({
        content,
        buffers: copies,
        last: content[kinds.LAST] === true,
        dropped: content[kinds.DROPPED] === true
      });
    } catch (failure) {
      waiting.fail(failure as Error);
    }
  }
}
