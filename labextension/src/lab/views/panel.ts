/** The side panel: for each notebook's kernel its engines, their edits and saves, or in words why there is nothing. */
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { element, say } from '../../widgets/dom';
import { button, Keyed } from '../keyed';
import type { Watched } from '../watch';
import * as wire from '../wire';
import type { PanelAction, PanelEngine } from '../wire';
import * as words from '../words';
import { duration, presence } from '../words';
import type { Context } from './context';
import { EngineView } from './engine';
import { GpusView } from './gpus';
import { MachineView } from './machine';
import { SavesView } from './saves';
import { Spoken } from './spoken';
import { StartForm } from './startForm';

export const PANEL_ID = 'nnsight-lab-panel';

export class EnginePanel extends Widget {
  readonly #kernels: Keyed<Watched>;
  readonly #none: HTMLElement;
  readonly #live: HTMLElement;
  readonly #spoken: HTMLElement;
  readonly #news: Spoken;
  readonly #machine: MachineView;
  readonly #views = new Map<string, KernelView>();
  #ticking = 0;

  constructor(readonly context: Context) {
    super();
    const { trans, watch, machine } = context;
    this.id = PANEL_ID;
    this.addClass('nnlab-panel');
    this.title.caption = trans.__('Engine (nnsight-lab)');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('Engine'));
    this.#none = element('p', { class: 'nnlab-words' }, trans.__('Open a notebook: its engine, edits and saves are shown here.'));
    this.#live = element('div', { class: 'nnlab-live', role: 'status', 'aria-live': 'polite' });
    this.#spoken = element('div', { class: 'nnlab-spoken', role: 'status', 'aria-live': 'polite' });
    this.#news = new Spoken(trans);
    const kernels = element('div', {});
    this.#kernels = new Keyed(
      kernels,
      watched => watched.link.id,
      watched => {
        const view = new KernelView(context, watched);
        this.#views.set(watched.link.id, view);
        return { element: view.element, update: latest => view.update(latest, watch.current?.link === latest.link) };
      }
    );
    this.#machine = new MachineView(context, machine);
    this.node.append(element('h3', {}, trans.__('Engine')), this.#live, this.#spoken, this.#none, kernels, this.#machine.element);
    watch.changed.connect(this.update, this);
    context.defaults.changed.connect(this.update, this);
    machine?.changed.connect(this.update, this);
    this.update();
  }

  /** Say something, also to a screen reader. */
  announce(text: string): void {
    say(this.#live, text);
  }

  /** Put the keyboard into the start form of the notebook in front. */
  focusStart(): void {
    const watched = this.context.watch.current;
    if (watched) {
      this.#views.get(watched.link.id)?.openStart();
    }
  }

  protected override onAfterShow(_: Message): void {
    this.#look(true);
  }

  protected override onAfterHide(_: Message): void {
    this.#look(false);
  }

  protected override onAfterAttach(_: Message): void {
    if (this.isVisible) {
      this.#look(true);
    }
  }

  protected override onBeforeDetach(_: Message): void {
    this.#look(false);
  }

  protected override onUpdateRequest(_: Message): void {
    if (!this.isVisible) {
      return;
    }
    // Kernels other than that in front are shown where they have something to show.
    const front = this.context.watch.current;
    const shown = this.context.watch.all.filter(
      watched => watched.link === front?.link || (watched.link.status?.engines.length ?? 0) > 0
    );
    this.#none.hidden = shown.length > 0;
    this.#kernels.show(shown);
    this.#machine.update();
    const news = this.#news.news(this.context.watch.all);
    if (news) {
      this.#spoken.textContent = news;
    }
  }

  #look(visible: boolean): void {
    this.context.watch.look(this.id, visible, visible);
    this.context.machine?.look(visible);
    window.clearInterval(this.#ticking);
    if (visible) {
      // Durations go on between two answers.
      this.#ticking = window.setInterval(() => this.update(), 1000);
      this.update();
    }
  }
}

/** What is shown of one kernel. */
class KernelView {
  readonly element: HTMLElement;
  readonly #title = element('h4', { class: 'nnlab-kernel' });
  readonly #words = element('p', { class: 'nnlab-words' });
  readonly #load: HTMLButtonElement;
  readonly #engines: Keyed<PanelEngine>;
  readonly #start: HTMLDetailsElement;
  readonly #form: StartForm;
  readonly #actions: Keyed<PanelAction>;
  readonly #saves: SavesView;
  readonly #savesPart: HTMLElement;
  readonly #gpus: GpusView;
  #watched: Watched;

  constructor(
    readonly context: Context,
    watched: Watched
  ) {
    const { trans } = context;
    this.#watched = watched;
    this.#load = button(trans.__('Load it'), () => void this.#loadIt(), trans.__('Load it: run %1 in this notebook’s kernel', '%load_ext nnsight_lab'));
    const engines = element('div', {});
    this.#engines = new Keyed(
      engines,
      engine => engine.name,
      engine => {
        const view = new EngineView(context, this.#watched, engine);
        return { element: view.element, update: latest => view.update(latest) };
      }
    );
    this.#form = new StartForm(
      context,
      () => this.#watched,
      () => {
        this.#start.open = false;
        this.#start.querySelector('summary')?.focus();
      }
    );
    this.#start = element('details', { class: 'nnlab-start' }, element('summary', {}, trans.__('Start an engine')), this.#form.element);
    const actions = element('ul', { class: 'nnlab-list nnlab-actions-log', 'aria-label': trans.__('What was asked for') });
    this.#actions = new Keyed(
      actions,
      action => String(action.id),
      () => {
        const item = element('li', {});
        return { element: item, update: (action: PanelAction) => this.#action(item, action) };
      }
    );
    this.#gpus = new GpusView(context);
    this.#saves = new SavesView(context, watched);
    this.#savesPart = element('section', { 'aria-label': trans.__('Saves') }, element('h4', {}, trans.__('Saves')), this.#saves.element);
    this.element = element('section', { class: 'nnlab-kernel-part' });
    this.element.append(this.#title, this.#words, this.#load, engines, this.#gpus.element, this.#start, actions, this.#savesPart);
  }

  openStart(): void {
    this.#start.open = true;
    this.#form.focus();
  }

  update(watched: Watched, front: boolean): void {
    const { trans } = this.context;
    this.#watched = watched;
    const { link, panel } = watched;
    const status = link.status;
    const name = panel.isDisposed ? '' : panel.title.label;
    say(this.#title, front ? name : trans.__('%1 (another notebook)', name));
    this.element.setAttribute('aria-label', trans.__('Kernel of %1', name));
    say(this.#words, this.#said(watched));
    this.#words.hidden = !this.#words.textContent;
    this.#load.hidden = link.presence !== 'unloaded';
    const loaded = link.presence === 'loaded' && status !== null;
    this.#engines.show(loaded ? status.engines : []);
    this.#start.hidden = !(loaded || link.presence === 'unloaded');
    // What the Jupyter server tells of this machine is shown once, below.
    const told = this.context.machine?.status?.gpus.length;
    this.#gpus.update(loaded && !told && (front || status.engines.length) ? status.devices : []);
    this.#form.update(status?.models ?? ['demo']);
    // Done is not news, and a start under way is seen in its engine; nor is a failure that was made good since.
    const news = (action: PanelAction, index: number) =>
      action.state === wire.FAILED
        ? !status?.actions.slice(index + 1).some(later => later.engine === action.engine && later.state !== wire.FAILED)
        : action.state === wire.RUNNING && !status?.engines.some(engine => engine.name === action.engine && engine.state === wire.STARTING);
    this.#actions.show(loaded ? status.actions.filter(news).slice(-3) : []);
    this.#savesPart.hidden = !loaded || status.engines.length === 0;
    if (loaded) {
      this.#saves.update(status.saves);
    }
  }

  #said({ link }: Watched): string {
    const { trans } = this.context;
    if (link.silent) {
      return trans.__('The kernel has not answered for a while; what is shown may be old.');
    }
    if (link.presence !== 'loaded') {
      return presence(link.presence, link.status?.version ?? '', trans);
    }
    const status = link.status;
    if (!status) {
      return presence('unknown', '', trans);
    }
    if (status.importing_s > 0) {
      return trans.__('Importing vLLM and nnsight (%1) …', duration(status.importing_s, trans));
    }
    if (status.engines.length > 0) {
      return '';
    }
    const none = trans.__('No engine is running in this kernel.');
    return status.gpus === 0 ? `${none} ${trans.__('It has no GPU: an engine runs on the CPU, for small models.')}` : none;
  }

  #action(item: HTMLElement, action: PanelAction): void {
    const { trans } = this.context;
    const what = words.action(action.action, action.engine, trans);
    item.className = action.state === wire.FAILED ? 'nnlab-error' : 'nnlab-faint';
    say(item, action.state === wire.FAILED ? trans.__('%1: %2', what, action.text) : trans.__('%1 …', what));
  }

  async #loadIt(): Promise<void> {
    const answer = await this.#watched.link.load();
    if (!answer.ok) {
      this.context.announce(answer.text ?? this.context.trans.__('The extension could not be loaded.'));
    }
  }
}
