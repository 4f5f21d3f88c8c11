/**
 * Engines that no kernel tells of, and the GPUs: what the Jupyter server sees, put together with what kernels see.
 *
 * An engine that a kernel shows is not shown here again: its log's path is the same, and no other engine has it.
 */
import { Clipboard } from '@jupyterlab/apputils';
import type { Session } from '@jupyterlab/services';

import { element, say } from '../../widgets/dom';
import { button, Keyed } from '../keyed';
import type { Machine } from '../machine';
import * as machineWire from '../machineWire';
import type { MachineEngine, MachineGpu } from '../machineWire';
import type { Watched } from '../watch';
import * as wire from '../wire';
import { bytes, duration } from '../words';
import type { Context } from './context';
import { act } from './context';

/** An engine to show: as the server tells it, or an orphan as a kernel does. */
interface Shown {
  engine: MachineEngine;
  /** Whether the server told it; else a kernel did, and is asked to end it. */
  byServer: boolean;
}

/** Within so many seconds the server is asked again; so it has seen, by twice that, what it can see. */
const SEEN_S = 15;

export class MachineView {
  readonly element: HTMLElement;
  readonly #words = element('p', { class: 'nnlab-faint nnlab-machine-words' });
  readonly #held: HTMLElement;
  readonly #heldList: Keyed<Shown>;
  readonly #kept: HTMLElement;
  readonly #keptList: Keyed<Shown>;
  readonly #orphans: HTMLElement;
  readonly #orphanList: Keyed<Shown>;
  readonly #gpus: HTMLElement;
  readonly #gpuList: Keyed<MachineGpu>;
  readonly #gpuTrouble = element('p', { class: 'nnlab-faint' });
  readonly #ending = new Set<string>();

  constructor(
    readonly context: Context,
    readonly machine: Machine | null
  ) {
    const { trans } = context;
    const list = () => element('ul', { class: 'nnlab-list' });
    const section = (label: string, name: string, ...children: Node[]) =>
      element('section', { class: name, 'aria-label': label }, element('h4', {}, label), ...children);
    const [held, kept, orphans, gpus] = [list(), list(), list(), list()];
    const make = (shown: Shown) => this.#engine(shown);
    this.#heldList = new Keyed(held, shown => shown.engine.engine, make);
    this.#keptList = new Keyed(kept, shown => shown.engine.engine, make);
    this.#orphanList = new Keyed(orphans, shown => shown.engine.engine, make);
    this.#gpuList = new Keyed(
      gpus,
      gpu => String(gpu.index),
      () => this.#gpu()
    );
    this.#held = section(trans.__('Other engines'), 'nnlab-held', held);
    this.#kept = section(
      trans.__('Kept engines'),
      'nnlab-kept',
      element('p', { class: 'nnlab-faint' }, trans.__('They need no kernel; run the attach line in a notebook to use one.')),
      kept
    );
    this.#orphans = section(
      trans.__('Engines without a kernel'),
      'nnlab-orphans',
      element('p', { class: 'nnlab-faint' }, trans.__('Yours; their kernels are gone, and they still hold memory.')),
      orphans
    );
    this.#gpus = section(trans.__('GPUs'), 'nnlab-gpus', this.#gpuTrouble, gpus);
    this.element = element('div', { class: 'nnlab-machine' }, this.#kept, this.#held, this.#orphans, this.#gpus, this.#words);
  }

  update(): void {
    const status = this.machine?.status ?? null;
    const told = this.context.watch.all;
    const logs = new Set(told.flatMap(({ link }) => (link.presence === 'loaded' ? (link.status?.engines ?? []) : []).map(engine => engine.log)));
    const shown: Shown[] = (status?.engines ?? []).filter(engine => !engine.log || !logs.has(engine.log)).map(engine => ({ engine, byServer: true }));
    const known = new Set(status?.engines.map(engine => engine.engine));
    for (const { link } of told) {
      for (const orphan of link.status?.orphans ?? []) {
        // What the server sees, it knows better; a kernel may be on another machine than the server.
        if (!known.has(orphan.engine)) {
          known.add(orphan.engine);
          const unknown = { kind: machineWire.ORPHAN, name: '', model: '', owner_pid: 0, kernel_id: '', age_s: 0, attach: '' };
          shown.push({ engine: { ...unknown, ...orphan }, byServer: false });
        }
      }
    }
    const orphans = shown.filter(({ engine }) => engine.kind === machineWire.ORPHAN);
    const kept = shown.filter(({ engine }) => engine.kind === machineWire.KEPT);
    const held = shown.filter(({ engine }) => engine.kind !== machineWire.ORPHAN && engine.kind !== machineWire.KEPT);
    this.#kept.hidden = kept.length === 0;
    this.#keptList.show(kept);
    this.#held.hidden = held.length === 0;
    this.#heldList.show(held);
    this.#orphans.hidden = orphans.length === 0;
    this.#orphanList.show(orphans);
    this.#gpus.hidden = !status || (status.gpus.length === 0 && !status.gpus_trouble);
    this.#gpuList.show(status?.gpus ?? []);
    say(this.#gpuTrouble, status?.gpus_trouble ?? '');
    this.#gpuTrouble.hidden = !status?.gpus_trouble;
    say(this.#words, this.#said(told));
    this.#words.hidden = !this.#words.textContent;
  }

  /** What is amiss between the page, the server and the kernels. */
  #said(told: Watched[]): string {
    const { trans } = this.context;
    switch (this.machine?.presence) {
      case 'absent':
        return trans.__(
          'This Jupyter server has no nnsight-lab, or has it disabled: engines of kernels that do not answer, and GPUs, are not shown. Install it in the server’s environment, then start the server again; “%1” says whether it is enabled.',
          'jupyter server extension list'
        );
      case 'refused':
        return trans.__('This Jupyter server does not let you ask for its engines and GPUs.');
      case 'other-version':
        return trans.__(
          'The Jupyter server has nnsight-lab %1, which speaks to this panel in another way: start the server again, then reload the page. Until then, only what kernels tell is shown.',
          this.machine.version
        );
      case 'unreachable':
        return trans.__('The Jupyter server did not answer: only what kernels tell is shown.');
      case 'there':
        return [...this.#elsewhere(told), ...this.#otherVersions(told)].join(' ');
      default:
        return '';
    }
  }

  /** Kernels whose engines the server does not see. */
  #elsewhere(told: Watched[]): string[] {
    const { trans } = this.context;
    const seen = new Set(this.machine?.status?.engines.map(engine => engine.log));
    const up = (state: string) => state === wire.READY || state === wire.BUSY;
    const away = told.filter(
      ({ link }) =>
        this.machine!.age < SEEN_S &&
        link.status?.engines.some(engine => up(engine.state) && engine.pids.length > 0 && engine.up_s > 2 * SEEN_S && !seen.has(engine.log))
    );
    return away.map(({ panel }) =>
      trans.__('The kernel of %1 runs where the Jupyter server sees no processes, on another machine or in a container: GPUs and engines here are the server’s.', titleOf(panel))
    );
  }

  #otherVersions(told: Watched[]): string[] {
    const { trans } = this.context;
    const version = this.machine?.version ?? '';
    return told
      .filter(({ link }) => link.presence === 'loaded' && link.status && link.status.version !== version)
      .map(({ panel, link }) =>
        trans.__('The Jupyter server has nnsight-lab %1, the kernel of %2 has %3.', version, titleOf(panel), link.status!.version)
      );
  }

  #engine(first: Shown): { element: HTMLElement; update: (shown: Shown) => void } {
    const { trans } = this.context;
    const id = first.engine.engine;
    let shown = first;
    const name = element('div', {});
    const owner = element('div', { class: 'nnlab-faint' });
    const text = element('div', { class: 'nnlab-faint' });
    const end = button(trans.__('End'), () => void this.#end(shown), trans.__('End the processes of engine %1', id));
    const log = button(trans.__('Log'), () => void this.context.app.commands.execute('nnsight-lab:machine-log', { engine: id }), trans.__('Show the log of engine %1', id));
    const attach = button(trans.__('Copy attach line'), () => this.#copy(shown), trans.__('Copy attach line of engine %1', first.engine.name || id));
    const buttons = element('div', { class: 'nnlab-actions' }, attach, end, log);
    return {
      element: element('li', { class: 'nnlab-orphan', 'data-engine': id }, element('div', {}, name, owner, text), buttons),
      update: latest => {
        shown = latest;
        const { engine, byServer } = latest;
        const orphan = engine.kind === machineWire.ORPHAN;
        const kept = engine.kind === machineWire.KEPT;
        say(name, [engine.name || trans.__('Engine %1', id), engine.model].filter(Boolean).join(' · '));
        say(owner, kept ? engine.attach || trans.__('It is starting.') : orphan ? '' : this.#ownerOf(engine));
        owner.hidden = !owner.textContent;
        const gpu = engine.gpu_bytes ? trans.__(', %1 on the GPU', bytes(engine.gpu_bytes, trans)) : '';
        const up = engine.age_s ? trans.__(', for %1', duration(engine.age_s + (this.machine?.age ?? 0), trans)) : '';
        say(text, trans.__('Processes %1: %2', engine.pids.join(', '), bytes(engine.memory_bytes, trans) + gpu + up));
        end.hidden = !(orphan || kept);
        attach.hidden = !engine.attach;
        log.hidden = !byServer || !engine.log;
        end.setAttribute('aria-disabled', this.#ending.has(id) ? 'true' : 'false');
        say(end, this.#ending.has(id) ? trans.__('Ending …') : kept ? trans.__('Stop') : trans.__('End'));
        end.setAttribute('aria-label', kept ? trans.__('Stop engine %1, for every notebook', engine.name) : trans.__('End the processes of engine %1', id));
      }
    };
  }

  /** Whose engine it is, as far as that is known. */
  #ownerOf(engine: MachineEngine): string {
    const { trans, app, watch } = this.context;
    if (engine.kind !== machineWire.KERNEL) {
      return engine.kind;
    }
    const open = engine.kernel_id ? watch.all.find(({ link }) => link.kernel.id === engine.kernel_id) : undefined;
    if (open) {
      return trans.__('Of %1, whose kernel says nothing of it just now.', titleOf(open.panel));
    }
    const session = engine.kernel_id ? sessionOf(app.serviceManager.sessions.running(), engine.kernel_id) : null;
    if (session) {
      return trans.__('Of %1, which is not open here.', session.path || session.name);
    }
    return trans.__('Started by process %1, which is no kernel of this Jupyter server.', engine.owner_pid);
  }

  #copy({ engine }: Shown): void {
    // Not the browser's own, which there is on secure pages only.
    Clipboard.copyToSystem(engine.attach);
    this.context.announce(this.context.trans.__('Copied: %1', engine.attach));
  }

  async #end({ engine, byServer }: Shown): Promise<void> {
    const { trans, watch } = this.context;
    this.#ending.add(engine.engine);
    this.update();
    if (byServer && this.machine) {
      const answer = await this.machine.end(engine.engine, engine.kind);
      this.context.announce(answer.text || (answer.ok ? '' : trans.__('The Jupyter server did not answer.')));
    } else {
      const asked = watch.all.find(({ link }) => link.status?.orphans.some(other => other.engine === engine.engine));
      if (asked) {
        await act(this.context, asked, wire.END_ORPHAN, { engine: engine.engine });
      }
    }
    this.#ending.delete(engine.engine);
    this.update();
  }

  #gpu(): { element: HTMLElement; update: (gpu: MachineGpu) => void } {
    const { trans } = this.context;
    const name = element('div', {});
    const figures = element('div', { class: 'nnlab-faint' });
    const fill = element('span', {});
    const bar = element('span', { class: 'nnlab-bar', 'aria-hidden': 'true' }, fill);
    const holders = element('ul', { class: 'nnlab-list nnlab-holders' });
    return {
      element: element('li', { class: 'nnlab-gpu' }, name, figures, bar, holders),
      update: gpu => {
        const busy = gpu.busy >= 0 ? trans.__(', %1 % busy', gpu.busy) : '';
        say(name, trans.__('%1: %2', gpu.index, gpu.name));
        say(figures, trans.__('%1 of %2', bytes(gpu.used_bytes, trans), bytes(gpu.total_bytes, trans)) + busy);
        fill.style.width = `${gpu.total_bytes ? Math.min(100, (gpu.used_bytes / gpu.total_bytes) * 100) : 0}%`;
        const lines = gpu.processes.map(process => {
          const held = process.used_bytes ? bytes(process.used_bytes, trans) : '–';
          const engine = this.machine?.status?.engines.find(other => other.engine === process.engine);
          const who = engine ? trans.__('your engine %1', engine.name || engine.engine) : process.owner;
          return who ? trans.__('%1 · %2 (process %3)', held, who, process.pid) : trans.__('%1 · process %2', held, process.pid);
        });
        while (holders.children.length > lines.length) {
          holders.lastElementChild!.remove();
        }
        lines.forEach((line, index) => {
          const item = (holders.children[index] as HTMLElement | undefined) ?? holders.appendChild(element('li', { class: 'nnlab-faint' }));
          say(item, line);
        });
      }
    };
  }
}

function titleOf(panel: Watched['panel']): string {
  return panel.isDisposed ? '' : panel.title.label;
}

function sessionOf(running: Iterable<Session.IModel>, kernelId: string): Session.IModel | null {
  for (const session of running) {
    if (session.kernel?.id === kernelId) {
      return session;
    }
  }
  return null;
}
