/** The edits of one engine: switched, read, compared with the version before, cleared, found again in the notebook. */
import { Dialog, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';

import { element, say } from '../../widgets/dom';
import { editOf, revealCell } from '../cells';
import { remember, remembered } from '../defaults';
import { button, Keyed } from '../keyed';
import type { Watched } from '../watch';
import * as wire from '../wire';
import type { PanelEdit, PanelEngine } from '../wire';
import type { Context } from './context';
import { act } from './context';
import { differenceView, showSource } from './source';

export class EditsView {
  readonly element: HTMLElement;
  readonly #list: Keyed<PanelEdit>;
  readonly #none: HTMLElement;
  readonly #chooses: HTMLInputElement;
  readonly #choice: HTMLElement;
  readonly #missing: HTMLElement;
  readonly #offer: HTMLElement;
  readonly #offered = element('span', {});
  #latest: PanelEngine | null = null;

  constructor(
    readonly context: Context,
    readonly watched: Watched,
    readonly engine: string
  ) {
    const { trans } = context;
    const list = element('ul', { class: 'nnlab-list', 'aria-label': trans.__('Edits of engine %1', engine) });
    this.#none = element('p', { class: 'nnlab-faint' }, trans.__('No edits. A cell that starts with %1 leaves one.', '%%edit NAME'));
    this.#chooses = element('input', { type: 'checkbox', role: 'switch' });
    this.#chooses.addEventListener('change', () => {
      const on = this.#latest?.edits.filter(edit => edit.on).map(edit => edit.name) ?? [];
      void this.#choose(this.#chooses.checked ? on : null);
    });
    this.#choice = element('label', { class: 'nnlab-choice' }, this.#chooses, trans.__('Only those chosen for this notebook'));
    this.#choice.title = trans.__('Requests that name no edits run exactly those that are checked here, whatever is switched on elsewhere');
    this.#missing = element('p', { class: 'nnlab-stale nnlab-missing', role: 'status' });
    this.#offer = element(
      'div',
      { class: 'nnlab-offer', role: 'group', 'aria-label': trans.__('Defaults kept in the notebook') },
      this.#offered,
      button(trans.__('Use'), () => void this.#choose(remembered(watched.panel, engine)), trans.__('Use the defaults kept in the notebook')),
      button(
        trans.__('Forget'),
        () => {
          remember(watched.panel, engine, null);
          this.#offer.hidden = true;
        },
        trans.__('Forget the defaults kept in the notebook')
      )
    );
    this.element = element(
      'div',
      { class: 'nnlab-edits' },
      element('h5', {}, trans.__('Edits')),
      this.#offer,
      this.#none,
      this.#choice,
      this.#missing,
      list
    );
    this.#list = new Keyed(
      list,
      edit => edit.name,
      edit => this.#make(edit)
    );
  }

  update(engine: PanelEngine): void {
    const { trans } = this.context;
    const { edits, chooses_edits, default_edits } = engine;
    this.#latest = engine;
    this.#none.hidden = edits.length > 0;
    this.#chooses.checked = chooses_edits;
    this.#choice.hidden = edits.length === 0 && !chooses_edits;
    const missing = this.#notInstalled(default_edits);
    say(this.#missing, missing ? trans.__('Chosen and not installed yet, so requests are refused until its cell has run: %1', missing) : '');
    this.#missing.hidden = !missing;
    const kept = chooses_edits ? null : remembered(this.watched.panel, this.engine);
    this.#offer.hidden = kept === null;
    if (kept) {
      const absent = this.#notInstalled(kept);
      const names = kept.join(', ') || trans.__('none');
      say(
        this.#offered,
        absent ? trans.__('This notebook’s defaults were: %1 (not installed yet: %2)', names, absent) : trans.__('This notebook’s defaults were: %1', names)
      );
    }
    this.#list.show(edits);
  }

  #notInstalled(names: readonly string[]): string {
    return names.filter(name => !this.#latest?.edits.some(edit => edit.name === name)).join(', ');
  }

  async #choose(names: string[] | null): Promise<void> {
    await act(this.context, this.watched, wire.EDIT_DEFAULT, { engine: this.engine, [wire.EDITS]: names });
  }

  #make(first: PanelEdit): { element: HTMLElement; update: (edit: PanelEdit) => void } {
    const { trans } = this.context;
    let latest = first;
    const named = { engine: this.engine, edit: first.name };
    const on = element('input', { type: 'checkbox', role: 'switch', 'aria-label': trans.__('Edit %1 runs by default', first.name) });
    on.title = trans.__('Requests that name no edits run it');
    on.addEventListener('change', () => {
      if (this.#latest?.chooses_edits) {
        const others = this.#latest.default_edits.filter(name => name !== first.name);
        void this.#choose(on.checked ? [...others, first.name] : others);
      } else {
        void act(this.context, this.watched, on.checked ? wire.EDIT_ON : wire.EDIT_OFF, named);
      }
    });
    const version = element('span', { class: 'nnlab-faint' });
    const stale = element('span', { class: 'nnlab-stale' });
    const counts = element('span', { class: 'nnlab-counts' });
    const error = element('p', { class: 'nnlab-error' });
    const source = element('pre', { class: 'nnlab-source', tabindex: '0', role: 'group', 'aria-label': trans.__('Source of edit %1', first.name) });
    const owner = element('p', { class: 'nnlab-faint' });
    const jump = button(trans.__('Go to cell'), () => void revealCell(this.watched.panel, latest.cell_id));
    const compare = button(trans.__('Difference'), () => void this.#compare(latest), trans.__('Difference to the version before'));
    const clear = button(trans.__('Clear'), () => void act(this.context, this.watched, wire.EDIT_CLEAR, named), trans.__('Clear edit %1', first.name));
    const details = element(
      'details',
      {},
      element('summary', {}, element('span', { class: 'nnlab-edit-name' }, first.name), ' ', version, ' ', stale, ' ', counts),
      source,
      owner,
      element('div', { class: 'nnlab-actions' }, jump, compare, clear)
    );
    const item = element('li', { class: 'nnlab-edit' }, element('div', { class: 'nnlab-edit-line' }, on, details), error);
    return {
      element: item,
      update: edit => {
        latest = edit;
        on.checked = edit.on;
        say(version, trans.__('v%1', edit.version));
        const isStale = editOf(this.watched.panel, edit) === 'stale';
        say(stale, isStale ? trans.__('stale') : '');
        stale.title = isStale ? trans.__('Its cell was changed since it was installed') : '';
        const ran = trans._n('%1 request', '%1 requests', edit.hits);
        say(counts, `· ${edit.errors ? `${ran}, ${trans._n('%1 error', '%1 errors', edit.errors)}` : ran}`);
        say(error, edit.errors ? edit.last_error : '');
        error.hidden = !edit.errors;
        say(owner, trans.__('Installed by %1', edit.owner));
        showSource(source, edit.source, this.context.languages);
        jump.hidden = !edit.cell_id;
        compare.hidden = !edit.previous_source;
      }
    };
  }

  async #compare(edit: PanelEdit): Promise<void> {
    const { trans } = this.context;
    const title = trans.__('Edit %1: version %2 to %3', edit.name, edit.version - 1, edit.version);
    const body = new Widget({ node: differenceView(edit.previous_source, edit.source, title) });
    await showDialog({
      title,
      body,
      buttons: [Dialog.okButton({ label: trans.__('Close') })]
    });
  }
}
