/** The edits of one engine: switched, read, compared with the version before, cleared, found again in the notebook. */
import { Dialog, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';

import { element, say } from '../../widgets/dom';
import { editOf, revealCell } from '../cells';
import { button, Keyed } from '../keyed';
import type { Watched } from '../watch';
import * as wire from '../wire';
import type { PanelEdit } from '../wire';
import type { Context } from './context';
import { act } from './context';
import { differenceView, showSource } from './source';

export class EditsView {
  readonly element: HTMLElement;
  readonly #list: Keyed<PanelEdit>;
  readonly #none: HTMLElement;

  constructor(
    readonly context: Context,
    readonly watched: Watched,
    readonly engine: string
  ) {
    const { trans } = context;
    const list = element('ul', { class: 'nnlab-list', 'aria-label': trans.__('Edits of engine %1', engine) });
    this.#none = element('p', { class: 'nnlab-faint' }, trans.__('No edits. A cell that starts with %1 leaves one.', '%%edit NAME'));
    this.element = element('div', { class: 'nnlab-edits' }, element('h5', {}, trans.__('Edits')), this.#none, list);
    this.#list = new Keyed(
      list,
      edit => edit.name,
      edit => this.#make(edit)
    );
  }

  update(edits: readonly PanelEdit[]): void {
    this.#none.hidden = edits.length > 0;
    this.#list.show(edits);
  }

  #make(first: PanelEdit): { element: HTMLElement; update: (edit: PanelEdit) => void } {
    const { trans } = this.context;
    let latest = first;
    const named = { engine: this.engine, edit: first.name };
    const on = element('input', { type: 'checkbox', role: 'switch', 'aria-label': trans.__('Edit %1 runs by default', first.name) });
    on.title = trans.__('Requests that name no edits run it');
    on.addEventListener('change', () => {
      void act(this.context, this.watched, on.checked ? wire.EDIT_ON : wire.EDIT_OFF, named);
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
