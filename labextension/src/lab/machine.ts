/**
 * The machine that the Jupyter server runs on, as its extension tells it: engines by their processes, and GPUs.
 *
 * It is asked while somebody looks, every ten seconds at most; at once when a kernel came or went. A server
 * without the extension logs each question as an address that it does not have, so it is asked again only after
 * minutes. What is shown without it is what the kernels tell.
 */
import { ServerConnection } from '@jupyterlab/services';
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import * as wire from './machineWire';
import type { MachineAnswer, MachineStatus } from './machineWire';

export const IMachine = new Token<Machine>('nnsight-lab:IMachine', 'Engines and GPUs of the Jupyter server’s machine.');

/** What is known of the server's extension. */
export type ServerPresence = 'unknown' | 'there' | 'absent' | 'refused' | 'other-version' | 'unreachable';

const EVERY_MS = 10_000;
/** Until a server that has nothing for us is asked again. */
const WITHOUT_MS = 300_000;
const SOON_MS = 1500;
const STATUS_MS = 20_000;
/** Processes that do not want to end are given ten seconds. */
const END_MS = 40_000;

export class Machine implements IDisposable {
  readonly changed = new Signal<this, void>(this);
  presence: ServerPresence = 'unknown';
  /** The latest that was told; null where nothing is known just now. */
  status: MachineStatus | null = null;
  #version = '';
  #asked = 0;
  #told = 0;
  #visible = false;
  #timer = 0;
  #asking: Promise<void> | null = null;
  #disposed = false;

  constructor(readonly settings: ServerConnection.ISettings) {
    document.addEventListener('visibilitychange', this.#looked);
  }

  get isDisposed(): boolean {
    return this.#disposed;
  }

  /** The extension's version, also of one that speaks in another way; '' where there is none. */
  get version(): string {
    return this.#version;
  }

  /** Seconds since the latest status: durations in it go on meanwhile. */
  get age(): number {
    return this.#told ? (performance.now() - this.#told) / 1000 : 0;
  }

  dispose(): void {
    if (!this.#disposed) {
      this.#disposed = true;
      window.clearTimeout(this.#timer);
      document.removeEventListener('visibilitychange', this.#looked);
      Signal.clearData(this);
    }
  }

  /** Somebody looks, or no longer does; who looks anew is told anew. */
  look(visible: boolean): void {
    if (visible !== this.#visible) {
      this.#visible = visible;
      this.#plan(0);
    }
  }

  /** Something happened that may have changed it: ask soon. */
  stir(): void {
    if (this.presence === 'there' || this.presence === 'unreachable') {
      this.#plan(SOON_MS);
    }
  }

  /** End what is left of an engine, or one that is kept; never rejects. */
  async end(engine: string, kind: string): Promise<MachineAnswer> {
    const route = kind === wire.KEPT ? wire.KEPT : wire.ORPHANS;
    const answer = await this.#request(`${route}/${encodeURIComponent(engine)}/${wire.END}`, 'POST', END_MS);
    await this.#ask();
    return said(answer);
  }

  /** The end of an engine's log; never rejects. */
  async log(engine: string): Promise<MachineAnswer> {
    return said(await this.#request(`${wire.LOG}?${wire.ENGINE}=${encodeURIComponent(engine)}`, 'GET', STATUS_MS));
  }

  #looked = (): void => {
    this.#plan(this.#asked ? Math.max(0, this.#every - (performance.now() - this.#asked)) : 0);
  };

  get #every(): number {
    return this.presence === 'there' || this.presence === 'unreachable' ? EVERY_MS : WITHOUT_MS;
  }

  get #shown(): boolean {
    return this.#visible && document.visibilityState === 'visible' && !this.#disposed;
  }

  #plan(ms: number): void {
    window.clearTimeout(this.#timer);
    if (this.#shown) {
      this.#timer = window.setTimeout(() => void this.#ask(), ms);
    }
  }

  #ask(): Promise<void> {
    this.#asking ??= this.#askNow().finally(() => {
      this.#asking = null;
      this.#plan(this.#every);
    });
    return this.#asking;
  }

  async #askNow(): Promise<void> {
    this.#asked = performance.now();
    const { status, content } = await this.#request(wire.STATUS, 'GET', STATUS_MS);
    const told = content as MachineStatus | null;
    this.status = null;
    this.#version = '';
    if (status === 200 && typeof told?.protocol === 'number') {
      this.#version = told.version;
      this.#told = performance.now();
      this.presence = told.protocol === wire.PROTOCOL ? 'there' : 'other-version';
      this.status = this.presence === 'there' ? told : null;
    } else if (status === 401 || status === 403) {
      this.presence = 'refused';
    } else if (status === 0 || status >= 500) {
      this.presence = 'unreachable';
    } else {
      this.presence = 'absent';
    }
    if (!this.#disposed) {
      this.changed.emit();
    }
  }

  async #request(path: string, method: string, limitMs: number): Promise<{ status: number; content: unknown }> {
    const stop = new AbortController();
    const timer = window.setTimeout(() => stop.abort(), limitMs);
    try {
      const url = `${this.settings.baseUrl.replace(/\/*$/, '/')}${wire.ROUTE}/${path}`;
      const response = await ServerConnection.makeRequest(url, { method, signal: stop.signal }, this.settings);
      return { status: response.status, content: await response.json().catch(() => null) };
    } catch {
      return { status: 0, content: null };
    } finally {
      window.clearTimeout(timer);
    }
  }
}

function said({ status, content }: { status: number; content: unknown }): MachineAnswer {
  const answer = content as Partial<MachineAnswer> | null;
  return { ok: status === 200 && answer?.ok === true, text: typeof answer?.text === 'string' ? answer.text : '' };
}
