/**
 * One kernel as the panel sees it: whether the package is there, and its latest status.
 *
 * Status comes over the control channel, which is answered while a cell runs. A kernel without the package logs
 * an error for each such question and never answers, so it is first asked, silently and when it is idle, whether
 * the package is loaded. Nothing is remembered here that the kernel does not say again after a reload.
 */
import type { Kernel } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import type { PanelForecast, PanelStatus } from './wire';
import * as wire from './wire';

/** What is known of the package in a kernel. */
export type Presence = 'unknown' | 'other-language' | 'missing' | 'unloaded' | 'too-old' | 'loaded' | 'older' | 'newer';

export interface Answer {
  ok: boolean;
  text?: string;
  id?: number;
  path?: string;
  forecast?: PanelForecast | null;
}

const ANSWER_MS = 8000;
/** A kernel that does not say what it is within this time is running a cell. */
const BUSY_MS = 2000;
/** After a cell that mentions the package began: when it is asked whether it is loaded by now. */
const LOADING_MS = [1000, 3000, 8000];
/** Asked in the kernel itself, so it must run in any Python: it imports nothing of ours. */
const PROBE = `{'loaded': '${wire.STATUS_REQUEST}' in getattr(getattr(get_ipython(), 'kernel', None), 'control_handlers', {}), 'installed': __import__('importlib.util', fromlist=['x']).find_spec('nnsight_lab') is not None}`;

let links = 0;

export class KernelLink implements IDisposable {
  /** Its own: a kernel whose notebook is closed and opened again has another. */
  readonly id = `link-${(links += 1)}`;
  readonly changed = new Signal<this, void>(this);
  presence: Presence = 'unknown';
  status: PanelStatus | null = null;
  /** Whether the last question was not answered in time. */
  silent = false;
  #disposed = false;
  #probing = false;
  #asking = false;
  #ranSomething = false;
  #comm: Kernel.IComm | null = null;
  #told = 0;
  #pushed = Number.NEGATIVE_INFINITY;
  #looked = { [wire.VISIBLE]: true, [wire.SAVES]: false, [wire.EVERY_S]: 3 };
  #loading: number[] = [];

  constructor(readonly kernel: Kernel.IKernelConnection) {
    kernel.iopubMessage.connect(this.#heard, this);
    kernel.statusChanged.connect(this.#statusChanged, this);
    void this.#begin();
  }

  get isDisposed(): boolean {
    return this.#disposed;
  }

  /** Seconds since the latest status: durations in it go on meanwhile. */
  get age(): number {
    return this.#told ? (performance.now() - this.#told) / 1000 : 0;
  }

  dispose(): void {
    if (this.#disposed) {
      return;
    }
    this.#disposed = true;
    this.#forgetLoading();
    this.kernel.iopubMessage.disconnect(this.#heard, this);
    this.kernel.statusChanged.disconnect(this.#statusChanged, this);
    if (this.#comm && !this.kernel.isDisposed && !this.#comm.isDisposed) {
      this.#comm.close();
    }
    Signal.clearData(this);
  }

  /** Tell the kernel whether anybody looks, also at the saves, and how often to say that nothing changed. */
  look(visible: boolean, saves: boolean, everySeconds: number): void {
    const looked = { [wire.VISIBLE]: visible, [wire.SAVES]: saves, [wire.EVERY_S]: everySeconds };
    if (JSON.stringify(looked) !== JSON.stringify(this.#looked)) {
      this.#looked = looked;
      if (this.#comm && !this.#comm.isDisposed) {
        this.#comm.send(looked);
      }
    }
  }

  /**
   * Ask for a status, unless one came within about `everySeconds`.
   *
   * A kernel that tells by itself is given longer: the question would make a busy one look idle.
   */
  async poll(everySeconds: number, saves: boolean): Promise<void> {
    const wanted = ['loaded', 'older', 'newer'].includes(this.presence);
    const late = (since: number, times: number) => performance.now() - since > everySeconds * 1000 * times;
    if (wanted && !this.#asking && !this.#disposed && late(this.#told, 0.9) && late(this.#pushed, 1.8)) {
      await this.#ask(saves);
    }
  }

  /** Ask for something to be done; never rejects. A refusal without a text is a kernel that did not answer. */
  async act(action: string, content: JSONObject = {}): Promise<Answer> {
    const answer = await this.question(action, content);
    void this.#ask(false);
    return answer;
  }

  /** `act` for what changes nothing. */
  async question(action: string, content: JSONObject = {}): Promise<Answer> {
    const reply = await this.#control(wire.ACTION_REQUEST, { [wire.ACTION]: action, ...content }, ANSWER_MS);
    return reply ? (reply as unknown as Answer) : { ok: false };
  }

  /** Load the package's extension in the kernel. */
  async load(): Promise<Answer> {
    const future = this.kernel.requestExecute({ code: '%load_ext nnsight_lab', store_history: false });
    let text = '';
    future.onIOPub = message => {
      if (KernelMessage.isErrorMsg(message)) {
        text = `${message.content.ename}: ${message.content.evalue}`;
      }
    };
    const reply = await future.done;
    await this.#probe();
    if (reply.content.status === 'ok' && this.presence === 'unloaded') {
      this.#set('too-old');
    }
    return reply.content.status === 'ok' ? { ok: true } : { ok: false, text };
  }

  async #begin(): Promise<void> {
    const info = this.kernel.info.catch(() => null);
    const late = new Promise<'busy'>(resolve => window.setTimeout(() => resolve('busy'), BUSY_MS));
    if ((await Promise.race([info, late])) === 'busy') {
      // A page that was loaded in the middle of a cell: one question, and one line in the server's log at worst.
      await this.#ask(false);
    }
    const found = await info;
    if (this.#disposed) {
      return;
    }
    if (found && found.language_info.name !== 'python') {
      this.#set('other-language');
    } else {
      await this.#probe();
    }
  }

  async #probe(): Promise<void> {
    if (this.#probing || this.#disposed || this.presence === 'other-language') {
      return;
    }
    this.#probing = true;
    try {
      const future = this.kernel.requestExecute({
        code: '',
        silent: true,
        store_history: false,
        user_expressions: { there: PROBE }
      });
      const { content } = await future.done;
      const said = content.status === 'ok' ? JSON.stringify(content.user_expressions ?? {}) : '';
      if (said.includes("'loaded': True")) {
        if (!this.status) {
          this.#set('loaded');
        }
        await this.#ask(false);
      } else if (said.includes("'loaded': False")) {
        this.#close();
        this.#set(said.includes("'installed': True") ? (this.presence === 'too-old' ? 'too-old' : 'unloaded') : 'missing');
      }
    } catch {
      // The kernel went away meanwhile; its next status says more.
    } finally {
      this.#probing = false;
    }
  }

  async #ask(saves: boolean): Promise<void> {
    this.#asking = true;
    try {
      const reply = await this.#control(wire.STATUS_REQUEST, { [wire.SAVES]: saves }, ANSWER_MS);
      if (reply) {
        this.#take(reply as unknown as PanelStatus);
      } else if (this.presence === 'loaded') {
        this.silent = true;
        this.#say();
      }
    } finally {
      this.#asking = false;
    }
  }

  #take(status: PanelStatus): void {
    if (this.#disposed) {
      return;
    }
    this.#told = performance.now();
    this.silent = false;
    if (!status.with_saves) {
      status.saves = this.status?.saves ?? [];
    }
    this.status = status;
    this.presence = status.protocol === wire.PROTOCOL ? 'loaded' : status.protocol < wire.PROTOCOL ? 'older' : 'newer';
    this.#openComm();
    this.#say();
  }

  async #control(msgType: string, content: JSONObject, limitMs: number): Promise<JSONObject | null> {
    if (this.#disposed || this.kernel.isDisposed) {
      return null;
    }
    // JupyterLab's types know Jupyter's own messages only; the channel takes any.
    const message = KernelMessage.createMessage({
      channel: 'control',
      msgType: msgType as 'debug_request',
      session: this.kernel.clientId,
      username: this.kernel.username,
      content: content as never
    });
    const future = this.kernel.sendControlMessage(message, true, true);
    let timer = 0;
    const late = new Promise<null>(resolve => {
      timer = window.setTimeout(() => resolve(null), limitMs);
    });
    try {
      const reply = await Promise.race([future.done, late]);
      return reply ? (reply.content as unknown as JSONObject) : null;
    } catch {
      return null;
    } finally {
      window.clearTimeout(timer);
      if (!future.isDisposed) {
        future.dispose();
      }
    }
  }

  #openComm(): void {
    if (this.#disposed || !this.kernel.handleComms || (this.#comm && !this.#comm.isDisposed)) {
      return;
    }
    const comm = this.kernel.createComm(wire.COMM_TARGET);
    this.#comm = comm;
    comm.onMsg = message => {
      this.#pushed = performance.now();
      this.#take(message.content.data as unknown as PanelStatus);
    };
    comm.onClose = () => {
      this.#comm = null;
    };
    comm.open(this.#looked);
  }

  #close(): void {
    this.#comm = null;
    this.status = null;
    this.silent = false;
  }

  #heard(_: unknown, message: KernelMessage.IIOPubMessage): void {
    // Silent questions such as our own are not announced like this.
    if (KernelMessage.isExecuteInputMsg(message)) {
      this.#ranSomething = true;
      if (this.presence !== 'loaded' && message.content.code.includes('nnsight_lab')) {
        // It may load the package and go on for minutes, starting an engine.
        this.#forgetLoading();
        this.#loading = LOADING_MS.map(late => window.setTimeout(() => void this.#askWhileBusy(), late));
      }
    }
  }

  async #askWhileBusy(): Promise<void> {
    if (this.presence !== 'loaded' && this.kernel.status === 'busy' && !this.#asking && !this.#disposed) {
      await this.#ask(false);
    }
  }

  #forgetLoading(): void {
    this.#loading.splice(0).forEach(timer => window.clearTimeout(timer));
  }

  #statusChanged(_: unknown, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting' || status === 'dead') {
      this.#close();
      this.#ranSomething = true;
      this.#set('unknown');
    } else if (status === 'idle' && this.#ranSomething) {
      this.#ranSomething = false;
      void this.#probe();
    }
  }

  #set(presence: Presence): void {
    this.presence = presence;
    this.#say();
  }

  #say(): void {
    if (!this.#disposed) {
      this.changed.emit();
    }
  }
}
